"""Microbenchmarks of the devices that are there: collectives, matrix products, memory.

Each program is compiled ahead of time. `results` has the figures, as dataclasses and as a file that plans read.
"""
