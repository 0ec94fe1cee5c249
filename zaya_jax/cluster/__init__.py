"""Several processes as one run: places, the roll call, lost processes, signals, barriers."""
