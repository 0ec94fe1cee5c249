"""Programs a person runs."""
