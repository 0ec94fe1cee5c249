"""Reads what a compiled program costs: `hlo` its collectives, `launches` the kernels of a GPU with
their bytes and FLOPs, `buffers` its memory. `measure` compiles the training step and asks all
three."""
