"""Training: the state, the pure step, its figures, and the folder of a run. The loop itself is
`zaya_jax.run`."""
