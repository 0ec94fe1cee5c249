"""Several processes as one run: ranks, the roll call, lost processes, signals, barriers, events."""
