"""The layout of a run on its devices."""
