"""A run on a cluster by formulas: memory, work, traffic and time of a step, and what a whole run takes."""
