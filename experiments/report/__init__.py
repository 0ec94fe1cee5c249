"""Draws a run's report anew, or compares several runs on one page. The options are in `__main__`."""
