"""Converts text to token shards, once, before training. The options are in `__main__`."""
