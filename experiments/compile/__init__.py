"""Compiles the training step for absent chips and reports its cost. The options are in `__main__`."""
