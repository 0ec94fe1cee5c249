"""Arrays that decoding reads and writes in place, from the compiled programs; weights that are
rounded once."""

import os

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest
from rows import slow

from benchmarks import absent
from pallas_kernels import chip
from zaya_jax.compiled import buffers, hlo
from zaya_jax.config import LAYER_KINDS, Model, Precision
from zaya_jax.hardware import targets
from zaya_jax.model import decode, zaya
from zaya_jax.model.placement import TokenRows
from zaya_jax.model.sampling import Sampling

FULL, SLIDING, LINEAR = LAYER_KINDS
EXACT = model_helpers.EXACT
DENSE = model_helpers.DENSE | {"layer_types": ()}


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)


def token(model, precision, rows, length):
    """The arguments of the program of further tokens, as shapes, and its cache."""
    shape = jax.ShapeDtypeStruct
    params, head = jax.eval_shape(
        lambda p: zaya.cast_for_products(model, p, precision), zaya.abstract(model, precision)
    )
    balance = shape((model.num_hidden_layers, model.num_experts + 1), jnp.float32)
    each, one = shape((rows,), jnp.int32), shape((), jnp.int32)
    seeds, ends = shape((rows,), jnp.uint32), shape((4,), jnp.int32)
    drawing = decode.Drawing(like(Sampling().arrays()), seeds, ends)
    cache = jax.eval_shape(lambda: decode._empty_cache(model, precision, rows, length))
    carry = decode.Carry(each, each, each, one)
    return (params, balance, head, carry, drawing, shape((rows,), bool), one), cache


def piece(model, precision, rows, size):
    """The arguments of the program of the prompts' first piece, as shapes."""
    (params, balance, *_), _ = token(model, precision, rows, size)
    shape = jax.ShapeDtypeStruct
    ids, hidden = shape((rows, size), jnp.int32), shape((rows, model.hidden_size), jnp.float32)
    counts, start = shape((rows,), jnp.int32), shape((), jnp.int32)
    return params, balance, ids, None, counts, hidden, start


def go_on(arguments, cache, model, precision):
    return decode._next_tokens(
        arguments, cache, model, precision, decode.ONE_DEVICE, Sampling().variant
    )


@pytest.mark.parametrize(
    ("kinds", "rows"),
    [
        ((FULL, SLIDING), 3),
        ((LINEAR, FULL), 1),
        slow((FULL, FULL), 1),
        slow((LINEAR, FULL), 3),
        slow("dense", 3),
    ],
)
def test_a_token_copies_nothing_of_the_cache_but_its_layers_columns(kinds, rows):
    """A layer's keys and values are laid out for their products, an eighth of each stack; no stack
    is rewritten."""
    model = model_helpers.small(
        num_hidden_layers=8, **(DENSE if kinds == "dense" else {"layer_types": kinds * 4})
    )
    arguments, cache = token(model, EXACT, rows, 8192)
    compiled = (
        jax.jit(lambda a, c: go_on(a, c, model, EXACT), donate_argnums=1)
        .lower(arguments, cache)
        .compile()
    )
    held = {name: x.size * x.dtype.itemsize for name, x in cache.items()}
    taken = compiled.memory_analysis()
    assert taken.alias_size_in_bytes == sum(held.values())
    assert taken.temp_size_in_bytes < 0.8 * held["k"]
    stacks = {f"f32[{','.join(map(str, x.shape))}]" for x in cache.values()}
    lines = [line for lines in hlo.parse(compiled.as_text()).values() for line in lines]
    # so this is how the program has them
    assert stacks <= {line.shape.split("{")[0] for line in lines}
    assert not [line for line in lines if line.op == "copy" and line.shape.split("{")[0] in stacks]


@pytest.mark.parametrize(("rows", "size"), [(1, 16), slow(4, 64)])
def test_no_program_has_a_copy_of_a_layers_experts(rows, size):
    """Both the program of tokens and that of prompts read only experts that a token chose."""
    model = model_helpers.small(hidden_size=128, moe_intermediate_size=128, num_experts=16)
    a_layer = 16 * 3 * 128 * 128 * 4
    arguments, cache = token(model, EXACT, rows, size)
    taken = (
        jax.jit(lambda a, c: go_on(a, c, model, EXACT))
        .lower(arguments, cache)
        .compile()
        .memory_analysis()
    )
    assert taken.temp_size_in_bytes < a_layer / 4
    prompt = decode._prefill_piece.lower(
        piece(model, EXACT, rows, size), None, size, model, EXACT, decode.ONE_DEVICE
    )
    assert prompt.compile().memory_analysis().temp_size_in_bytes < a_layer / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mi300x", "h200"])
def test_nor_has_a_gpus(name, monkeypatch):
    """ZAYA1's sizes, four of its layers: 403 MB of experts each, 537 MB of the head's matrix, 67 MB
    of cache."""
    if not targets.FOLDER.exists():
        pytest.skip("make setup-targets installs the compilers")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    model, precision = Model(num_hidden_layers=4), Precision()
    arguments, cache = token(model, precision, 4, 4096)
    held = sum(x.size * x.dtype.itemsize for x in cache.values())
    with buffers.uncached(), chip.making(chip.made_for(absent.mesh_of_one(name))):
        program = absent.alone(name, lambda a, c: go_on(a, c, model, precision))
        taken = (
            jax.jit(program, donate_argnums=1).lower(arguments, cache).compile().memory_analysis()
        )
    assert taken.alias_size_in_bytes == held
    # in the products' layout while tokens come; the head's is not rounded
    assert taken.temp_size_in_bytes < 1.2 * held


@pytest.mark.parametrize("kind", ["zaya", "dense"])
def test_rounding_once_changes_no_bit(kind):
    model = model_helpers.small(**(DENSE if kind == "dense" else {}))
    params, bias = model_helpers.weights(model)
    precision = Precision(compute="bfloat16")
    once, head = zaya.cast_for_products(model, params, precision)
    names = {
        path[-2].key if path[-1].key in ("kernel", "bias") else path[-1].key
        for path, x in jax.tree.leaves_with_path(once)
        if x.dtype == jnp.bfloat16
    }
    assert names == set(
        sum(
            (
                zaya.PRODUCT_WEIGHTS[block]
                for block in zaya.PRODUCT_WEIGHTS
                if block in params["layers"]
            ),
            (),
        )
    )
    ids = np.arange(10, dtype=np.int32)[None]
    run = jax.jit(
        lambda params, head: (
            out := zaya.apply(model, params, bias, TokenRows(ids), precision=precision).hidden,
            zaya.logits(model, head, out, precision),
        )
    )
    for a, b in zip(run(once, head), run(params, params), strict=True):
        np.testing.assert_array_equal(a, b)
    same, head = zaya.cast_for_products(model, params, EXACT)
    assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(params), strict=True))
    assert head["embed"]["embedding"] is params["embed"]["embedding"]
