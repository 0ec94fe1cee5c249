"""Compares shapes of models near two budgets for a chip. The options are in `__main__`."""
