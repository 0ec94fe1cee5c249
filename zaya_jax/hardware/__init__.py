"""Chips, and what programs compiled for them contain."""
