"""Describes chips, and reads the programs compiled for them."""
