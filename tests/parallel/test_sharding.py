"""What a mesh cannot divide is refused in one line that names both sides and the nearest size that fits."""

import dataclasses
import itertools
import json
import re

import mesh_helpers as helpers
import pytest

from zaya_jax.config import Config, Mesh, Model, UserError
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import shape_of
from zaya_jax.parallel.spread import Spread, spread_of


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        (
            Spread(expert=3),
            r"num_experts=8 does not divide over config\.mesh\.expert=3; set config\.mesh\.expert=1 with",
        ),
        (
            Spread(expert=4, tensor=4, tsp=True),
            r"num_experts=8 .*mesh\.expert x tensor=16; set config\.mesh\.tensor=2 with config\.mesh\.data=-1",
        ),
        (
            Spread(data=2, tensor=3),
            r"num_attention_heads=8 .*mesh\.tensor=3; set config\.mesh\.tensor=2 with",
        ),
        (
            Spread(data=5, fsdp=True),
            r"hidden_size=32 .*mesh\.data \(with config\.mesh\.fsdp\)=5; .*set config\.mesh\.fsdp=False",
        ),
    ],
)
def test_sizes_that_do_not_divide(spread, words):
    with pytest.raises(UserError, match=words):
        sharding.check(helpers.SETTINGS, spread)


def test_key_value_heads_must_fit_the_tensor_axis():
    model = dataclasses.replace(helpers.SETTINGS.model, num_attention_heads=12, num_key_value_heads=4)
    with pytest.raises(
        UserError, match=r"tensor=6 neither divides nor is a multiple of model\.num_key_value_heads=4"
    ):
        sharding.check(Config(model=model), Spread(tensor=6))


@pytest.mark.parametrize(
    ("spread", "length", "words"),
    [
        (
            Spread(context=4),
            60,
            r"seq_len=60 does not divide into 2 x 4 pieces \(config\.mesh\.context = 4\); .*set seq_len=64",
        ),
        (
            Spread(context=8),
            16,
            r"pieces of 1 tokens, but the convolutions look 2 tokens back; .*set seq_len=32",
        ),
        (
            Spread(context=2, tensor=8),
            36,
            r"seq_len=36 over 2 devices does not divide by config\.mesh\.tensor=8",
        ),
    ],
)
def test_sequences_that_do_not_divide(spread, length, words):
    with pytest.raises(UserError, match=words):
        sharding.check(Config(), spread, lengths={"seq_len": length})


def test_what_is_advised_fits_whatever_the_mesh():
    """Every mesh over up to 12 devices: where it is refused, each alternative passes, with the flags that it has."""
    tried = 0
    sizes = [1, 2, 3, 4, 6]
    for model in (Model(num_experts=6), DENSE):
        for data, expert, context, tensor in itertools.product(sizes, repeat=4):
            devices = data * expert * context * tensor
            if devices > 12:
                continue
            for fsdp, tsp, ring in itertools.product((False, True), repeat=3):
                mesh = Mesh(data, expert, context, tensor, fsdp, tsp, ring)
                settings = Config(model=model, mesh=mesh)
                message = refusal(settings, devices)
                if not message:
                    continue
                found = [
                    way
                    for way in re.split(r", or (?=set |before )", message.partition("; ")[2])
                    if "set" in way
                ]
                assert found or "no mesh over" in message or "number of devices" in message, message
                for way in found:
                    keys = {
                        key: json.loads(value.lower())
                        for key, value in re.findall(r"mesh\.(\w+)=([-\w]+)", way)
                    }
                    if keys:
                        again = refusal(
                            dataclasses.replace(settings, mesh=dataclasses.replace(mesh, **keys)), devices
                        )
                        # Leaving fsdp or ring off mends that alone; another mesh mends everything.
                        assert not again or keys.keys() <= {"fsdp", "ring"}, (message, again)
                        tried += 1
    assert tried > 500


DENSE = Model(
    model_type="dense", hidden_size=36, num_attention_heads=12, num_key_value_heads=12, intermediate_size=72,
    num_experts=1,
)  # fmt: skip
ROWS, LENGTH = 24, 96


def refusal(settings, devices):
    """Why a start on so many devices is refused; "" where it is not."""
    lengths = {"config.data.seq_len": LENGTH}
    try:
        spread = spread_of(settings.mesh, shape_of(settings.mesh, devices))
        sharding.check(settings, spread, lengths=lengths, rows=ROWS)
        shards = spread.data * spread.expert
        if ROWS % shards:
            sharding.check_batch(settings, spread, (ROWS,), ROWS, lengths=lengths)
    except UserError as error:
        return str(error)
    return ""
