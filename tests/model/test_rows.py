"""Rows of a batch: each equals itself alone, for any batch, padding, pieces and devices, and what
it is without a cache; arrays that decoding reads and writes in place."""

import functools
import os

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest
from meshes import mesh_of
from refusals import check_refused, refusal
from rows import slow

from benchmarks import absent
from pallas_kernels import chip
from zaya_jax import trees
from zaya_jax.compiled import buffers, hlo
from zaya_jax.config import LAYER_KINDS, Model, Precision
from zaya_jax.hardware import targets
from zaya_jax.model import decode, sampling, zaya
from zaya_jax.model.cca import empty_cache
from zaya_jax.model.decode import Decoder
from zaya_jax.model.placement import CacheInput, TokenRows
from zaya_jax.model.sampling import Sampling
from zaya_jax.parallel.tree import DecodeDevices

FULL, SLIDING, LINEAR = LAYER_KINDS
EXACT = model_helpers.EXACT
PROMPTS = [[(5 * i + 3 * n) % 32 for i in range(n)] for n in (1, 20, 37, 5)]


@pytest.fixture(scope="module")
def weights():
    """A model with a window and a linear layer, taps that reach over several tokens, and biases
    everywhere."""
    model = model_helpers.small(
        layer_types=(SLIDING, LINEAR), cca_time0=3, cca_time1=2, max_position_embeddings=64
    )
    return model, *model_helpers.weights(model)


@pytest.mark.parametrize(
    "options",
    [
        Sampling(1.2, top_k=20, top_p=0.9, min_p=0.01),
        *(slow(options) for options in (Sampling(0.8), Sampling())),
    ],
)
def test_a_row_is_what_it_is_alone(weights, options, monkeypatch):
    monkeypatch.setattr(decode, "PIECE", 16)
    seeds = [7, 8, 9, 10]
    run = functools.partial(
        decode.generate, Decoder(*weights, EXACT), num_tokens=9, sampling=options
    )
    together = run(prompts=PROMPTS, seeds=seeds)
    assert run(prompts=PROMPTS[::-1], seeds=seeds[::-1]) == together[::-1]
    assert run(prompts=PROMPTS[1:2], seeds=seeds[1]) == together[1:2]
    assert len({tuple(row) for row in together}) == 4


def test_a_row_ends_and_the_others_go_on(weights):
    free = decode.generate(Decoder(*weights, EXACT), PROMPTS, 20)
    end = free[1][3]
    assert decode.generate(Decoder(*weights, EXACT), PROMPTS, 0) == [[]] * 4
    ended = decode.generate(Decoder(*weights, EXACT), PROMPTS, 20, ends=[end])
    for row, until in zip(free, ended, strict=True):
        assert until == (row[: row.index(end)] if end in row else row)
    rows = decode.Continuation(Decoder(*weights, EXACT), PROMPTS, 20, ends=[free[0][0]])
    assert rows.more()[0] == [] and not rows.ended  # it ends at once
    for row in (1, 2, 3):
        rows.end(row)
    assert rows.ended
    rows = decode.Continuation(Decoder(*weights, EXACT), PROMPTS, 20)
    rows.more()
    rows.end(2)
    new = rows.more()
    assert new[2] == [] and [new[i] for i in (0, 1, 3)] == [free[i][1:17] for i in (0, 1, 3)]


@pytest.mark.slow
def test_a_long_prompt_takes_the_cache_and_a_piece():
    """Of 131,072 tokens neither scores (4 GiB of this model's) nor logits, nor those of a whole
    piece (32 MiB)."""
    model, length = model_helpers.small(vocab_size=4096, layer_types=(FULL, FULL)), 131_072
    arguments, (_, cache) = piece(model, EXACT, 1, 2048), token(model, EXACT, 1, length)
    taken = (
        decode._prefill_piece.lower(arguments, cache, length, model, EXACT, decode.ONE_DEVICE)
        .compile()
        .memory_analysis()
    )
    held = decode.cache_bytes(model, EXACT, 1, length).total
    assert taken.alias_size_in_bytes == held  # it is filled in place
    assert taken.temp_size_in_bytes < 2 * held + (16 << 20)


@pytest.mark.parametrize("kinds", [(FULL, SLIDING), (LINEAR, FULL), "dense"])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_cache_takes_the_bytes_that_are_said(kinds, devices):
    model = model_helpers.of_kinds(kinds)
    where = DecodeDevices(mesh_of(context=devices))
    sizes = decode.cache_bytes(model, EXACT, 3, 40, where)
    held = decode._empty_cache(model, EXACT, 3, where.cache_layout().local_length(40))
    assert sizes.total == sum(x.nbytes for x in held.values())
    assert sizes.total == 3 * (
        sizes.per_row + sizes.per_token * where.cache_layout().local_length(40)
    )
    # K and V, float32, 2 heads of 8, layers
    assert sizes.per_token == 2 * 4 * 2 * 8 * (1 if LINEAR in kinds else 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompts": [[1], []]}, "prompt 2 of 2 is empty"),
        ({"prompts": [[1, 32]]}, "prompt 1 of 1: token 32 must be an integer from 0 to 31"),
        (
            {"prompts": [[1] * 60]},
            "has 60 tokens; with num_tokens=5 that exceeds the model's max_position_embeddings=64",
        ),
        ({"num_tokens": -1}, "num_tokens=-1 must be an integer from 0 to 64"),
        ({"num_tokens": 2.5}, "num_tokens=2.5 must be an integer"),
        ({"prompts": [["a"]]}, "prompt 1 of 1: token 'a' must be an integer"),
        ({"ends": ["a"]}, "ends: 'a' must be an integer from 0 to 2147483647"),
        ({"seeds": None}, "seed None must be an integer from 0 to 4294967295"),
        ({"seeds": [1, 2]}, "seeds has 2 numbers for 1 prompts"),
        ({"mask": np.ones((1, 2), int)}, "mask must be as the prompts"),
        ({"prompts": [[1, 2]], "mask": [[1, 0]]}, "zeros for the padding at its left, then ones"),
        ({"prompts": [[1, 2, 3]], "mask": [[1, 0, 1]]}, "mask must be"),
    ],
)
def test_bad_input_is_one_line(weights, given, says):
    given = {"prompts": [[1]], "num_tokens": 5} | given
    assert says in refusal(decode.generate, Decoder(*weights, EXACT), **given)


@pytest.mark.parametrize(
    "given", [{"temperature": -1}, {"top_k": 1.5}, {"top_p": 1.5}, {"min_p": 1.1}]
)
def test_nonsense_is_refused(given):
    check_refused(f"^{next(iter(given))}=", Sampling, **given)


def kept(logits, options):
    """Which tokens may be drawn, by sorting; the definition."""
    weights = np.exp(np.float32(logits) / np.float32(options.temperature))
    order = np.argsort(-weights)
    stays = weights >= weights[order[min(options.top_k or len(weights), len(weights)) - 1]]
    weights = np.where(stays, weights, 0)
    sums = np.cumsum(weights[order])
    if options.top_p < 1:
        stays &= (
            weights >= weights[order[np.searchsorted(sums, options.top_p * sums[-1] * (1 - 1e-6))]]
        )
    return stays & (weights >= options.min_p)


@pytest.mark.parametrize(
    "options",
    [
        Sampling(1.0, top_k=5),
        Sampling(0.7, top_k=1),
        Sampling(1, top_k=10**9),
        Sampling(1.0, top_p=0.5),
        Sampling(2.0, top_p=1e-9),
        Sampling(1.0, top_p=0.999),
        Sampling(1.5, min_p=0.2),
        Sampling(1.0, min_p=1.0),
        Sampling(0.9, top_k=30, top_p=0.8, min_p=0.05),
        Sampling(1e-9, top_p=0.9),
    ],
)
def test_what_may_be_drawn(options):
    logits = np.random.default_rng(0).standard_normal((6, 100)).astype(np.float32) * 3
    logits[5] = np.repeat(logits[5, :10], 10)  # equally likely ones stay or go together
    logits -= logits.max(-1, keepdims=True)
    found = np.asarray(
        sampling.allowed(jnp.asarray(logits / np.float32(options.temperature)), options.arrays())
    )
    np.testing.assert_array_equal(found, [kept(row, options) for row in logits])


def test_what_is_drawn_has_the_probabilities():
    """20,000 draws among three tokens; one is cut."""
    rows = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray([0.6, 0.3, 0.1])), (rows, 3))
    options = Sampling(1.0, top_k=2)
    pick = jax.jit(sampling.pick, static_argnums=1)
    token = pick(
        logits, options.variant, options.arrays(), np.arange(rows, dtype=np.uint32), np.int32(4)
    )
    share = np.bincount(np.asarray(token), minlength=3) / rows
    np.testing.assert_allclose(share, [2 / 3, 1 / 3, 0], atol=0.015)


BOTH, MIXED = (FULL, SLIDING), (LINEAR, FULL, LINEAR, SLIDING)
FAST = [((3, 4), 6, BOTH), ((2, 2), 5, MIXED)]
SLOW = [(taps, prompt, BOTH) for taps in ((2, 2), (3, 4), (1, 1)) for prompt in (1, 6)]
SLOW += [((2, 2), 5, (LINEAR, LINEAR)), ((2, 2), 5, "dense")]


@pytest.mark.parametrize(
    ("taps", "prompt", "kinds"), [*FAST, *(slow(*case) for case in SLOW if case not in FAST)]
)
def test_every_step_with_the_cache_equals_the_whole_pass(taps, prompt, kinds):
    model = model_helpers.of_kinds(kinds, cca_time0=taps[0], cca_time1=taps[1])
    params, bias = model_helpers.weights(model)
    length, padded = 14, min(prompt - 1, 3)
    ids = np.random.default_rng(1).integers(0, model.vocab_size, (2, length)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, :padded] = 0
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    run = functools.partial(zaya.apply, model, params, bias, precision=EXACT)
    with jax.default_matmul_precision("highest"):
        whole = jax.jit(run)(TokenRows(ids, positions=positions, mask=mask)).hidden
        cache = empty_cache(model, EXACT, 2, length)
        first = jax.jit(run)(
            TokenRows(ids[:, :prompt], positions=positions[:, :prompt], mask=mask[:, :prompt]),
            cached=CacheInput(cache, jnp.int32(0)),
        )
        step, cache, hidden = jax.jit(run), first.cache, [first.hidden]
        for i in range(prompt, length):
            valid = (np.arange(length) <= i) & (mask > 0)
            out = step(
                TokenRows(ids[:, i : i + 1], positions=positions[:, i : i + 1]),
                cached=CacheInput(cache, jnp.int32(i), valid=valid),
            )
            cache = out.cache
            hidden.append(out.hidden)
    real = mask > 0
    np.testing.assert_allclose(jnp.concatenate(hidden, 1)[real], whole[real], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "kinds"),
    [*((size, (FULL, LINEAR, SLIDING, LINEAR)) for size in (2, 3, 8)), (4, "dense")],
)
def test_prompts_in_pieces_are_continued_as_on_one_device(size, kinds, monkeypatch):
    """All kinds of layers; pieces that no power of two divides, rows that end in each of them,
    windows over their borders."""
    model = model_helpers.of_kinds(kinds)
    params, bias = model_helpers.weights(model)
    prompts = [[(7 * i + n) % 32 for i in range(n)] for n in (50, 1, 20)]
    ours = decode.Decoder(model, params, bias, EXACT, DecodeDevices(mesh_of(context=size)))
    theirs = ours._replace(devices=decode.ONE_DEVICE)
    options = {"ends": [3], "sampling": Sampling(0.8, top_p=0.9), "seeds": 3}
    whole = decode.generate(theirs, prompts, 8, **options)
    monkeypatch.setattr(decode, "PIECE", 16)
    assert decode.generate(ours, prompts, 8, **options) == whole


def test_a_step_of_the_model_sends_nothing_else():
    """Three arrays are reduced a layer and step, and a device's cache has its part of the
    columns."""
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    rows = decode.Continuation(
        decode.Decoder(model, params, bias, EXACT, DecodeDevices(mesh_of(context=8))), [[0] * 20], 5
    )
    sizes = decode.cache_bytes(
        model, EXACT, 1, rows.cache_length, DecodeDevices(mesh_of(context=8))
    )
    assert model_helpers.cache_bytes(rows) == 8 * sizes.total
    rows.more()
    program = decode._next_tokens.lower(*rows.arguments(1))
    assert program.as_text().count("stablehlo.all_reduce") == 3
    program = program.compile()
    found = hlo.collectives(program)
    assert {c.kind for c in found} == {"all-reduce"}
    reduced = [a.shape for c in found for a in c.operands]
    heads, channels = model.num_attention_heads, model.head_dim
    assert sorted(reduced) == [(1, heads), (1, heads), (1, heads, channels)]
    assert f"f32[2,1,{rows.cache_length // 8},2,8]" in program.as_text()
    assert f"f32[2,1,{rows.cache_length},2,8]" not in program.as_text()


DENSE = model_helpers.DENSE | {"layer_types": ()}


def token(model, precision, rows, length):
    """The arguments of the program of further tokens, as shapes, and its cache."""
    shape = jax.ShapeDtypeStruct
    params, head = jax.eval_shape(
        lambda p: zaya.cast_for_products(model, p, precision), zaya.abstract(model, precision)
    )
    balance = shape((model.num_hidden_layers, model.num_experts + 1), jnp.float32)
    each, one = shape((rows,), jnp.int32), shape((), jnp.int32)
    seeds, ends = shape((rows,), jnp.uint32), shape((4,), jnp.int32)
    options = jax.eval_shape(Sampling().arrays)
    drawing = decode.Drawing(options, seeds, ends)
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


def compiled(model, precision, rows, length, on=lambda run: run):
    """The program of further tokens, its memory, and its cache."""
    arguments, cache = token(model, precision, rows, length)

    def run(arguments, cache):
        options = model, precision, decode.ONE_DEVICE, Sampling().variant
        return decode._next_tokens(arguments, cache, *options)

    program = jax.jit(on(run), donate_argnums=1).lower(arguments, cache).compile()
    return program, program.memory_analysis(), cache


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
    program, taken, cache = compiled(model, EXACT, rows, 8192)
    held = {name: x.size * x.dtype.itemsize for name, x in cache.items()}
    assert taken.alias_size_in_bytes == sum(held.values())
    assert taken.temp_size_in_bytes < 0.8 * held["k"]
    stacks = {f"f32[{','.join(map(str, x.shape))}]" for x in cache.values()}
    lines = [line for lines in hlo.parse(program.as_text()).values() for line in lines]
    # so this is how the program has them
    assert stacks <= {line.shape.split("{")[0] for line in lines}
    assert not [line for line in lines if line.op == "copy" and line.shape.split("{")[0] in stacks]


@pytest.mark.parametrize(("rows", "size"), [(1, 16), slow(4, 64)])
def test_no_program_has_a_copy_of_a_layers_experts(rows, size):
    """Both the program of tokens and that of prompts read only experts that a token chose."""
    model = model_helpers.small(hidden_size=128, moe_intermediate_size=128, num_experts=16)
    a_layer = 16 * 3 * 128 * 128 * 4
    _, taken, _ = compiled(model, EXACT, rows, size)
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
    with buffers.uncached(), chip.making(chip.made_for(absent.mesh_of_one(name))):
        on = functools.partial(absent.alone, name)
        _, taken, cache = compiled(model, precision, 4, 4096, on)
    held = sum(x.size * x.dtype.itemsize for x in cache.values())
    assert taken.alias_size_in_bytes == held
    # in the products' layout while tokens come; the head's is not rounded
    assert taken.temp_size_in_bytes < 1.2 * held


@pytest.mark.parametrize("kind", ["zaya", "dense"])
def test_rounding_once_changes_no_bit(kind):
    model = model_helpers.small(**(DENSE if kind == "dense" else {}))
    params, bias = model_helpers.weights(model)
    precision = Precision(compute="bfloat16")
    once, head = zaya.cast_for_products(model, params, precision)
    rounded = {path for path, x in trees.flat(once, "/").items() if x.dtype == jnp.bfloat16}
    assert {tuple(path.split("/")[1:3]) for path in rounded} == {
        (block, name)
        for block, names in zaya.PRODUCT_WEIGHTS.items()
        for name in names
        if block in params["layers"]
    }
    ids = np.arange(10, dtype=np.int32)[None]
    run = jax.jit(
        lambda params, head: (
            out := zaya.apply(model, params, bias, TokenRows(ids), precision=precision).hidden,
            zaya.logits(model, head, out, precision),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, run(once, head), run(params, params))
    same, head = zaya.cast_for_products(model, params, EXACT)
    assert [*map(id, jax.tree.leaves(same))] == [*map(id, jax.tree.leaves(params))]
    assert head["embed"]["embedding"] is params["embed"]["embedding"]
