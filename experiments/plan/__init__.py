"""Plans a run on a cluster by formulas, before anything is compiled. The options are in `__main__`."""
