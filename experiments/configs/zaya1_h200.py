"""ZAYA1-base, whole, on one H200: pre-training at 4,096 tokens.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m experiments.pretrain --config=experiments/configs/zaya1_h200.py \
        --config.data.path=ROOT

ROOT holds the prepared directories web, code, math and tokenizer, as for zaya1_base.py.

Hardware: one H200. Not run on one yet; compiled for one, a step takes 139.1 GB (benchmarks/compile.md), of
which JAX's share of 0.95, 143.8 GB, has room. A single GPU has no NCCL that would need the rest.
With --config.precision.weights=float32 the step takes 16 GB less and the experts' products are slower.
"""

import dataclasses

from ml_collections import ConfigDict

from experiments.configs import zaya1_base


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = zaya1_base.get_config()
    c.name = "zaya1_h200"
    # The room that this leaves is what lets remat "elementwise" fit: no product is repeated, 24 of
    # 178 TFLOP a micro-batch.
    c.precision.momentum = "bfloat16"
    c.data.micro_batch = 4
    first = c.schedule.phases[0]
    # A million tokens a step: 64 micro-batches, beside which the optimizer's second is small.
    c.schedule.phases = (
        dataclasses.replace(
            first, name="pretrain", tokens=10 * 10**9, global_batch=256, ramp_from=0, ramp_tokens=0
        ),
    )
    return c
