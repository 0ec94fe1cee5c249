"""Notebooks for researchers; README.md there lists them, and `tools/run_notebooks.py` runs them."""
