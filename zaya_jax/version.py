"""The version, which every part may import."""

__version__ = "0.2.0"
