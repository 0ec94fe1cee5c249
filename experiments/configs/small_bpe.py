"""A small ZAYA on a prepared directory: the standard library's sources with a BPE of 8,192 trained
on them.

    python -m experiments.prepare_data --input=stdlib --train_bpe=8192 --out=data/stdlib_bpe
    python -m experiments.pretrain --config=experiments/configs/small_bpe.py

Hardware: two CPU cores. The first command takes under a minute, the second about five. Expected: a
held-out loss of about 4.2 nats per token, which is 1.14 nats a byte at 3.7 bytes per token.
"""

from ml_collections import ConfigDict

from experiments.configs import tiny


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = tiny.get_config()
    c.name = "small_bpe"

    c.model.vocab_size = 8192
    c.model.initializer_range = 0.02
    c.model.bos_token_id, c.model.eos_token_id, c.model.pad_token_id = 0, 1, 2

    c.data.path = "data/stdlib_bpe"
    c.data.tokenizer = "data/stdlib_bpe/tokenizer"
    c.run.num_steps = 300
    return c
