"""Estimates a run on a cluster by formulas: memory, work, traffic and time of a step, and days of
the whole run."""
