"""`tiny` with linear attention in three layers of four (LASP-2H's hybrid): on the same data, byte
by byte.

    python -m experiments.pretrain --config=experiments/configs/tiny_linear.py

Hardware: two CPU cores, no network, no data; about five minutes.
Expected: a loss of 2.3 nats per byte at step 90 and no router that collapses. A shorter run
(--config.run.num_steps=40
--config.data.global_batch=8 --config.data.seq_len=128) goes from 5.7 to 2.8, with a held-out loss
of 2.98.
"""

from ml_collections import ConfigDict

from experiments.configs import tiny


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = tiny.get_config()
    c.name = "tiny_linear"
    c.model.layer_types = ("hybrid_linear", "hybrid_linear", "hybrid_linear", "hybrid")
    return c
