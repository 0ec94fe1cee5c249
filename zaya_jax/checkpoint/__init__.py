"""Saves, verifies, moves and restores checkpoints, in the layout of Orbax."""
