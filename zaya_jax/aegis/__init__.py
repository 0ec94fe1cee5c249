"""Watch, decide, act: the run's guardian."""
