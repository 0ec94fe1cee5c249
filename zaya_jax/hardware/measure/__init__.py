"""Microbenchmarks of the devices that are there: collectives, matrix products, memory.

Each program is compiled ahead of time and its values are checked before it is timed. `figures` is what they give, as
dataclasses and as a file that plans read.
"""
