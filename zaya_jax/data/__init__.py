"""Data: from text to the batches of a training run, the same batches whatever reads them.

`tokenizers` turns text into ids; `sources` finds text; `tokens` holds prepared token shards; `pack` fills
rows; `mix` decides which source a row comes from; `pipeline` puts these together into a stream of batches.
"""
