"""ZAYA1's training stack in JAX: the model, its optimizer, its data, its checkpoints."""

__version__ = "0.1.0"
