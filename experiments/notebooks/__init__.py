"""Notebooks for researchers; README.md there says what each shows, and `tools/run_notebooks.py` runs them."""
