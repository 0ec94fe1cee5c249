"""Estimates how long one device takes to read a prompt and to decode a token, by the plan's rates.

    serving.seconds(case, rates, rows=1, new=4096)            # a prompt of 4,096 tokens
    serving.seconds(case, rates, rows=8, new=1, seen=4096)    # a token of each of eight texts of that length

A forward pass over `rows` texts of `new` tokens each, `seen` of them in the cache. Its kernels are
those of the training step's forward pass (`work.PASSES`), with three differences: all weights lie
rounded, of the experts only those are read that the tokens reach, and the head has one token of
each text. Tokens choose experts independently and evenly, so of E experts N tokens reach
E (1 - (1 - 1/E)^N): text is more alike than that. Attention is full, as ZAYA1's.
"""

import dataclasses
from collections.abc import Iterator

from zaya_jax.model import decode
from zaya_jax.parallel.spread import NO_SPREAD
from zaya_jax.plan import step_time, work
from zaya_jax.plan.case import StepCase, itemsize
from zaya_jax.plan.rates import Rates
from zaya_jax.plan.work import ScopeWork

LAUNCHES = 8  # around the layers: look-up, last norm, head, and what draws the token


def seconds(case: StepCase, rates: Rates, rows: int, new: int, seen: int = 0) -> float:
    """The time of a pass of the case's model on one device of its chip."""
    alone = dataclasses.replace(
        case,
        config=dataclasses.replace(
            case.config, data=dataclasses.replace(case.config.data, seq_len=new)
        ),
        spread=NO_SPREAD,
        sequences=rows,
        micro_batches=1,
    )
    parts = [*_layers(alone, rows, seen), _head(alone, rows)]
    return sum(step_time.part_time(part, alone, rates).seconds for part in parts)


def experts_reached(experts: int, tokens: int) -> float:
    """How many of so many experts these tokens go to, in expectation."""
    return experts * (1 - (1 - 1 / experts) ** tokens)


def _layers(alone: StepCase, rows: int, seen: int) -> Iterator[ScopeWork]:
    """The parts of all layers."""
    m, number = alone.model, itemsize(alone.config.precision.compute)
    for name, scope, layers in work.layer_parts(alone):
        products, others, launches, _ = work.PASSES[name][work.FORWARD]
        weights = alone.layer_numel.get(name, 0.0)
        if name == "experts":
            weights *= experts_reached(m.num_experts, alone.tokens) / m.num_experts
        read = {"w2": number * weights, "w4": 4.0 * weights, "wh": number * weights}
        # Only training turns weights to the format of products at each pass.
        terms = [term for term in others.split(" + ") if not term.endswith(("w2", "w4", "wh"))]
        passes = " + ".join(terms)
        sizes = work.array_bytes(alone) | read
        flops, cache = work.forward_flops(alone, name), 0.0
        if name == "softmax":
            flops += 4.0 * alone.tokens * seen * m.num_attention_heads * m.head_dim
            cache = (
                rows * seen * decode.cache_bytes(m, alone.config.precision, 1, 1).per_token / layers
            )
        yield ScopeWork(
            scope,
            work.FORWARD,
            layers * flops,
            layers * (work.bytes_moved(products, sizes) + cache),
            layers * work.bytes_moved(passes, sizes),
            layers * launches,
            work.RATES.get(name, "products"),
        )


def _head(alone: StepCase, rows: int) -> ScopeWork:
    """The head's product for the last token of each text."""
    table = float(alone.model.vocab_size * alone.model.hidden_size)
    number = itemsize(alone.config.precision.compute)
    logits = 4.0 * rows * alone.model.vocab_size
    return ScopeWork(
        "head", work.FORWARD, 2.0 * rows * table, number * table + logits, 2 * logits, LAUNCHES
    )
