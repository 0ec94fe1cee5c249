"""The pure model: ZAYA1's arithmetic, without training, data or files."""
