"""Inspects and verifies a run's checkpoints, and exchanges weights with transformers. The options are in `__main__`."""
