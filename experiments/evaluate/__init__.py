"""Evaluates a model: its loss on any text, and lm-eval-harness tasks. The options are in `__main__`."""
