"""How a run lies on its devices."""
