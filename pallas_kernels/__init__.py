"""Operators on arrays, each with its definition and an implementation for each kind of chip."""
