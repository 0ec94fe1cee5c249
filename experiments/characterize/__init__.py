"""Measures a machine and derives sizing rules for a run. The options are in `__main__`."""
