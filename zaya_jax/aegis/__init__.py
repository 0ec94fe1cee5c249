"""Supervises a run: detects failures, decides how to respond, and restarts the processes."""
