"""What a run does with its checkpoints: the other wing, `zaya_jax.checkpoint`, knows nothing of it.

store        saves in the background, brings the newest whole step, restores it
durable      copies steps to a safer place, and fetches them from there
retention    decides which steps to delete, and which belong to a past that was given up
claims       one program at a time in a folder, and no folder inside another
timings      records how long saves and loads took
look         summarises a run's checkpoints
step_zero    writes step 0 of a new run from weights that lie anywhere
"""
