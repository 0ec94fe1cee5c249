"""The pure model: ZAYA1's arithmetic, and nothing of training, data or files."""
