"""Describes chips, clusters and the host's settings, and keeps the figures that were measured."""
