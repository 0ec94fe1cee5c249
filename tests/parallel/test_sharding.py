"""Sizes that a mesh cannot divide are refused in one line that names both sides and a way out."""

import dataclasses
import re

import jax
import mesh_helpers as helpers
import pytest
from refusals import check_refused, refusal

from zaya_jax.config import Config, Mesh
from zaya_jax.parallel import mesh as meshes
from zaya_jax.parallel import sharding
from zaya_jax.parallel.spread import Spread, spread_of

ZAYA, LARGE = helpers.SETTINGS, Config()
TWELVE_HEADS = dataclasses.replace(
    LARGE, model=dataclasses.replace(ZAYA.model, num_attention_heads=12, num_key_value_heads=4)
)
NARROW = dataclasses.replace(
    helpers.DENSE, model=dataclasses.replace(helpers.DENSE.model, intermediate_size=50)
)


@pytest.mark.parametrize(
    ("settings", "spread", "seq_len", "words"),
    [
        (
            ZAYA,
            Spread(expert=3),
            64,
            r"num_experts=8 does not divide over config\.mesh\.expert=3; .* divisor of 8",
        ),
        (
            ZAYA,
            Spread(expert=4, tensor=4, tsp=True),
            64,
            r"num_experts=8 .*mesh\.expert x tensor=16; ",
        ),
        (ZAYA, Spread(data=2, tensor=3), 64, r"num_attention_heads=8 .*mesh\.tensor=3; "),
        (
            ZAYA,
            Spread(data=5, fsdp=True),
            64,
            r"hidden_size=32 .*mesh\.data=5; .*set config\.mesh\.fsdp=False",
        ),
        (
            TWELVE_HEADS,
            Spread(tensor=6),
            64,
            r"tensor=6 neither divides nor is a multiple of .*num_key_value_heads=4",
        ),
        (
            LARGE,
            Spread(context=4),
            60,
            r"seq_len=60 does not divide into 2 x 4 pieces .*; .*set seq_len=64",
        ),
        (
            LARGE,
            Spread(context=8),
            16,
            r"pieces of 1 tokens, but the convolutions look 2 .*; .*set seq_len=32",
        ),
        (
            LARGE,
            Spread(context=2, tensor=8),
            36,
            r"seq_len=36 over 2 devices does not divide by config\.mesh\.tensor=8",
        ),
        (
            helpers.DENSE,
            Spread(tensor=3, tsp=True),
            96,
            r"num_key_value_heads=8 .*mesh\.tensor=3; .* divisor of 8",
        ),
        (
            helpers.DENSE,
            Spread(expert=2),
            64,
            r"mesh\.expert=2, but a dense model has no experts; set .*expert=1",
        ),
        (
            helpers.DENSE,
            Spread(context=2, tensor=2, tsp=True, ring=True),
            64,
            r"set config\.mesh\.ring=False",
        ),
        (
            NARROW,
            Spread(tensor=4),
            64,
            r"intermediate_size=50 does not divide over config\.mesh\.tensor=4",
        ),
    ],
)
def test_what_does_not_divide_is_refused(settings, spread, seq_len, words):
    said = refusal(sharding.check, settings, spread, lengths={"seq_len": seq_len})
    assert re.search(words, said), said


def test_a_batch_that_does_not_divide_names_the_nearest_that_does():
    sharding.check_batch(Spread(data=2, expert=2), (12, 24), 4)
    check_refused(
        r"6 sequences .* over 4 devices .*; set config\.data\.micro_batch=4",
        lambda: sharding.check_batch(Spread(data=2, expert=2), (12,), 6),
    )
    check_refused(
        r"over 5 devices .*neither does a step's batch of 12 sequences; .* divide 12",
        lambda: sharding.check_batch(Spread(data=5), (12,), 6),
    )


def test_context_goes_over_nodes_where_it_is_asked_to(monkeypatch):
    monkeypatch.setattr(meshes, "_node_size", lambda devices: 4)
    asked = Mesh(context=2, tensor=2, across=True)
    mesh = meshes.make_mesh(asked)
    numbers = [[jax.devices().index(d) for d in row] for row in mesh.devices.reshape(-1, 2)]
    assert numbers == [[0, 1], [4, 5], [2, 3], [6, 7]]  # data x context, with tensor inside
    assert spread_of(asked, mesh.shape) != spread_of(Mesh(context=2, tensor=2), mesh.shape)
    check_refused(
        "there are 2 nodes of 4 devices; context must divide",
        lambda: meshes.make_mesh(Mesh(context=4, across=True)),
    )


def test_a_ring_goes_wherever_devices_share_a_sequence():
    """With TSP the tensor axis splits it, too; a dense model's keys do not go round then."""
    sizes = dict(data=1, expert=1, context=1, tensor=2)
    both = spread_of(Mesh(tensor=2, tsp=True, ring=True), sizes)
    assert both.ring and not spread_of(Mesh(tensor=2, ring=True), sizes).ring
    check_refused("a few heads at a time", sharding.check, helpers.DENSE, both)


def test_a_process_without_a_device_is_told():
    mesh = meshes.make_mesh(Mesh(data=2), jax.devices()[:2])
    check_refused("process 1 has no device of the mesh", meshes.rows_of_process, mesh, process=1)
