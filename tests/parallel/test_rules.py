"""What a mesh cannot divide is refused in one line that names both sides and the nearest size that fits."""

import dataclasses

import mesh_helpers as helpers
import pytest

from zaya_jax.config import Config, Model, UserError
from zaya_jax.parallel import rules
from zaya_jax.parallel.spread import Spread


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        (
            Spread(expert=3),
            r"num_experts=8 does not divide over config\.mesh\.expert=3; the nearest that does is 2",
        ),
        (
            Spread(expert=4, tensor=4, tsp=True),
            r"num_experts=8 .*mesh\.expert x tensor=16; the nearest that does is 8",
        ),
        (Spread(tensor=3), r"num_attention_heads=8 .*mesh\.tensor=3; the nearest that does is 2"),
        (
            Spread(data=5, fsdp=True),
            r"hidden_size=32 .*mesh\.data \(with mesh\.fsdp\)=5; the nearest that does is 4",
        ),
    ],
)
def test_sizes_that_do_not_divide(spread, words):
    with pytest.raises(UserError, match=words):
        rules.check(helpers.SETTINGS, spread)


def test_key_value_heads_must_fit_the_tensor_axis():
    model = dataclasses.replace(helpers.SETTINGS.model, num_attention_heads=12, num_key_value_heads=4)
    with pytest.raises(
        UserError, match=r"tensor=6 neither divides nor is a multiple of model\.num_key_value_heads=4"
    ):
        rules.check(Config(model=model), Spread(tensor=6))


@pytest.mark.parametrize(
    ("spread", "length", "words"),
    [
        (
            Spread(context=4),
            60,
            r"seq_len=60 does not divide into 2 x 4 pieces \(mesh\.context = 4\); .* to 64",
        ),
        (
            Spread(context=8),
            16,
            r"pieces of 1 tokens, but the convolutions look 2 tokens back; .* at least 32",
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
        rules.check_sequence(Model(), spread, length)
