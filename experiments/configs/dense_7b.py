"""A dense model of 7B parameters: the shape on which tensor-and-sequence parallelism (TSP) is
compared.

    python -m experiments.pretrain --config=experiments/configs/dense_7b.py --workdir=runs/dense_7b \
        --config.data.tokenizer=TOKENIZER --config.data.path=PREPARED

Hardware: one node of 8 MI300X, which share every sequence of 131,072 tokens and every matrix
(mesh.tsp). Expected: no run of it is published; `benchmarks/tsp.md` has its memory and traffic
under each scheme.

Width 4096, 32 layers and 32 heads of 128 channels are the published comparison's. Not published are
the MLP's width and the vocabulary: 11,008 channels and 64,000 tokens (embedding and head tied) make
6,738,423,808 parameters.
"""

from ml_collections import ConfigDict

from zaya_jax import config


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = config.default()
    c.name = "dense_7b"

    c.model.model_type = "dense"
    c.model.vocab_size = 64_000
    c.model.hidden_size = 4096
    c.model.num_hidden_layers = 32
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 32
    c.model.head_dim = 128
    c.model.intermediate_size = 11_008
    c.model.num_experts = 1
    c.model.max_position_embeddings = 131_072
    c.model.rope_parameters.hybrid.rope_theta = 5e6
    c.model.rope_parameters.hybrid.partial_rotary_factor = 1.0

    c.data.seq_len = 131_072
    c.data.global_batch = 8
    c.data.micro_batch = 1

    c.mesh.tensor = 8
    c.mesh.tsp = True
    c.optim.name = "adamw"
    c.optim.lr = 3e-4
    c.remat = "layer"
    c.run.num_steps = 1000
    c.eval.every = 1000
    return c
