"""Training: the state, the pure step, the figures it leaves."""
