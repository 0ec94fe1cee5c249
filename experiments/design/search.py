"""Finds the shapes of models near two budgets, and how each of them is trained.

A shape is a hidden width, a part of it for the queries, and a number of experts: depth and the
experts' width follow from the two budgets, and of those near both the nearest one is taken. Widths
are whole tiles of the chip. Each shape is trained in the first of `ways` that fits the memory.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments.configs import zaya1_base
from zaya_jax import config as config_lib
from zaya_jax import schedule
from zaya_jax.config import Model
from zaya_jax.hardware import chips, sizing, targets
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.plan import footprint, serving, step_time
from zaya_jax.plan.case import StepCase
from zaya_jax.plan.rates import Rates
from zaya_jax.training import recipe

BASE = config_lib.check(zaya1_base.get_config()).model
WIDTHS = (256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
PARTS = (1, 2, 4)  # the hidden width over the queries', which CCA compresses; ZAYA1: 2
GROUPS = (4, 5, 3)  # query heads of a key-value head, as near to ZAYA1's 4 as divides
EXPERTS = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
ASPECTS = (32, 128)  # the hidden width over the depth, where published models lie
NEAR = 0.02  # how far a shape may be from a budget
TOKENS = 2**24  # of a step, as ZAYA1's
REMATS = ("elementwise", "attention", "layer")  # from the fastest to the smallest
KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "moe_intermediate_size",
    "max_position_embeddings",
)
# What the front compares: layers, training tokens per second, and the time of a token below zero.
Gains = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is asked for. The budgets do not count the embedding."""

    cluster: Cluster
    devices: int
    active: float
    total: float
    context: int
    vocab: int
    figures: str = ""  # a file of experiments.characterize


class Candidate(NamedTuple):
    """A shape, and how it is trained."""

    case: StepCase
    settings: dict[str, Any]  # keys of the config, over zaya1_base's
    strains: list[
        str
    ]  # the rules that it breaks: of sizes, and that experts lie evenly over a node


def base_shape(ask: Ask) -> Model:
    """ZAYA1-base's, with the vocabulary and for the context that are asked for."""
    return dataclasses.replace(
        BASE,
        vocab_size=ask.vocab,
        max_position_embeddings=max(BASE.max_position_embeddings, ask.context),
    )


def shapes(ask: Ask) -> Iterator[Model]:
    """ZAYA1-base's, if it is near the budgets, and the nearest one for each hidden width, queries
    and number of experts."""
    base = base_shape(ask)
    if _distance(ask, base) <= NEAR:
        yield base
    for width, part, experts in itertools.product(WIDTHS, PARTS, EXPERTS):
        heads, rest = divmod(width, part * base.head_dim)
        group = next((n for n in GROUPS if heads % n == 0), None)
        if rest or group is None:
            continue
        model = dataclasses.replace(
            base,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=heads // group,
            num_experts=experts,
        )
        nearest = min(_filled(ask, model), key=functools.partial(_distance, ask), default=base)
        if nearest != base and _distance(ask, nearest) <= NEAR:
            yield nearest


def _filled(ask: Ask, model: Model) -> Iterator[Model]:
    """Each depth, with the two widths of experts around the one that meets the total."""
    others, column = _weights(dataclasses.replace(model, moe_intermediate_size=1))
    tile = chips.CHIPS[ask.cluster.chip].tile // 2  # gate and up are one product
    deepest, shallowest = (model.hidden_size / aspect for aspect in ASPECTS)
    for depth in range(math.ceil(shallowest), math.floor(deepest) + 1):
        exact = (ask.total / depth - others) / (model.num_experts * column)
        for tiles in (math.floor(exact / tile), math.ceil(exact / tile)):
            if tiles > 0:
                inner = tiles * tile
                yield dataclasses.replace(
                    model, num_hidden_layers=depth, moe_intermediate_size=inner
                )


def _weights(model: Model) -> tuple[float, float]:
    """Weights of a layer's matrices outside its experts, and of one expert: a sixth of the FLOPs
    that a token of training needs there."""
    flops = chips.flops_by_scope(dataclasses.replace(model, num_hidden_layers=1), 1)
    return (flops["cca"] + flops["router"]) / 6, flops["experts"] / 6


def _distance(ask: Ask, model: Model) -> float:
    """The larger of the relative distances from the budgets."""
    others, expert = _weights(model)
    active, total = others + expert, others + model.num_experts * expert
    pairs = ((active, ask.active), (total, ask.total))
    return max(abs(model.num_hidden_layers * size / budget - 1) for size, budget in pairs)


def ways(ask: Ask, experts: int) -> Iterator[dict[str, Any]]:
    """Ways to train a model, from the fastest to the smallest; where a step has fewer sequences
    than there are devices, several of them share one."""
    sequences = max(TOKENS // ask.context, 1)
    most = max(ask.devices // sequences, 1)
    # Equal numbers of devices share a sequence, and each has two equal parts of it.
    context = next(
        n
        for n in range(most, 0, -1)
        if n == 1 or (ask.devices % n == 0 and ask.context % (2 * n) == 0)
    )
    rows = ask.devices // context
    each = max(round(sequences / rows), 1)
    node = ask.cluster.of_devices(ask.devices).node
    over = (1, node) if experts % node == 0 and rows % node == 0 else (1,)
    at_once = [n for n in range(each, 0, -1) if each % n == 0]
    for expert, micro, remat in itertools.product(over, at_once, REMATS):
        yield {
            "data.seq_len": ask.context,
            "data.global_batch": each * rows,
            "data.micro_batch": micro * rows,
            "mesh.expert": expert,
            "mesh.context": context,
            "remat": remat,
            "hardware.figures": ask.figures,
        }


def settings_of(model: Model, way: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config that trains a model in this way."""
    return {f"model.{key}": getattr(model, key) for key in KEYS} | way


def configured(chosen: Mapping[str, Any]) -> ConfigDict:
    """zaya1_base with its first phase alone, without a ramp, and these settings."""
    c = zaya1_base.get_config()
    c.update_from_flattened_dict(chosen)
    unset = {"seq_len": 0, "global_batch": 0, "ramp_from": 0, "ramp_tokens": 0}
    c.schedule.phases = (dataclasses.replace(c.schedule.phases[0], **unset),)
    return c


def planned(ask: Ask, model: Model) -> Candidate | None:
    """A shape in the first way that fits the chip's memory; None where none does."""
    chip, node = ask.cluster.chip, ask.cluster.node
    for way in ways(ask, model.num_experts):
        chosen = settings_of(model, way)
        config = config_lib.check(configured(chosen))
        (segment,) = schedule.make_plan(config).segments
        phase_config, spread, sequences, micro_batches = recipe.place_segment(
            config, segment, ask.devices
        )
        case = StepCase(phase_config, spread, chip, sequences, micro_batches)
        if footprint.estimate(case).peak <= targets.memory_for_jax(chip):
            figures = sizing.figures_at(ask.figures, chip)
            strains = [advice.rule for advice in sizing.advise(config, chip, ask.devices, figures)]
            uneven = [f"experts over {node}"] if model.num_experts % node else []
            return Candidate(case, chosen, strains + uneven)
    return None


def gains(ask: Ask, case: StepCase, rates: Rates, batch: int) -> Gains:
    """What the front compares, for so many texts at once, as long as the context."""
    speed = case.tokens_per_device / step_time.estimate(case, ask.cluster, rates).seconds
    return case.model.num_hidden_layers, speed, -serving.seconds(case, rates, batch, 1, ask.context)


def front(gains_of: Mapping[int, Gains]) -> list[int]:
    """The shapes for which no other is as good in every gain and better in one."""
    return [
        number
        for number, own_gains in gains_of.items()
        if not any(
            other != own_gains and all(a >= b for a, b in zip(other, own_gains, strict=True))
            for other in gains_of.values()
        )
    ]
