"""Reads what a compiled program costs, from its text and from XLA's record of its buffers.

`hlo` finds collectives, `launches` the kernels of a GPU with their bytes and FLOPs, `buffers` the
memory over the program's course. `measure` compiles the training step from shapes alone, for chips
that may be absent, and asks all three.
"""
