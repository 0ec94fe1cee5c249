"""Inspects, verifies, moves and exports a run's checkpoints. The options are in `__main__`."""
