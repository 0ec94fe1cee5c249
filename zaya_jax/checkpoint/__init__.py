"""Checkpoints: Orbax's for training, and the exchange with the public PyTorch implementation."""
