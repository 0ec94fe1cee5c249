"""Sequences cut over devices: traffic, skipped blocks, balance of work, a new token's attention to
a cache in parts, and LASP-2; test_axes.py has loss and gradients."""

import dataclasses
import functools

import formulas
import jax
import jax.numpy as jnp
import mesh_helpers
import numpy as np
import pytest
from compared import assert_norms_close, values_and_gradients
from flax import nnx
from jax.sharding import PartitionSpec
from meshes import mesh_of
from rows import slow

from pallas_kernels import chip
from pallas_kernels.attention import SAVED, decode_attention
from pallas_kernels.attention.reference import attention as reference_attention
from pallas_kernels.linear_attention import linear_attention
from pallas_kernels.rotary import rope_table
from zaya_jax import config
from zaya_jax.compiled import buffers, hlo, launches
from zaya_jax.model.cca import CCA
from zaya_jax.model.placement import Weights
from zaya_jax.parallel import context, linear, ring, tree
from zaya_jax.parallel.spread import Spread

BATCH, LENGTH = 2, 64


def on_sequence(spread, body, out_specs, replicated=0):
    """body on devices, its first arguments whole and the others' columns cut."""
    mesh = mesh_of(**{axis: getattr(spread, axis) for axis in spread.sequence_axes})

    def run(*args):
        specs = [PartitionSpec()] * replicated + [cut(spread)] * (len(args) - replicated)
        with jax.default_matmul_precision("highest"):
            return jax.shard_map(
                body, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False
            )(*args)

    return jax.jit(run)


def cut(spread):
    return PartitionSpec(None, spread.sequence_axes)


def placed(spread, x, segments, **of_layer):
    """The placement of a device's tokens."""
    placement = context.zigzag_placement(spread, x.shape[1], segments, None, Weights())
    return dataclasses.replace(placement, **of_layer)


def attend(place, *qkv):
    """Attention of a device's tokens, which are contiguous."""
    return place.joined(place.attend(*map(place.rows, qkv))[0])


# What travels


def compiled_layer(spread, batch=BATCH, length=LENGTH, gradient=True, again=False, channels=8):
    """Halo of x and attention of q, k, v, compiled; with gradients, and computed again but for the
    attention."""

    def body(x, q, k, v, segments):
        place = placed(spread, x, segments)

        def loss(x, q, k, v):
            edges, out = context.halo(x, 2, place), attend(place, q, k, v)
            return jnp.sum(jnp.sin(edges)) + jnp.sum(jnp.sin(out))

        if again:
            loss = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(SAVED))
        return (jax.value_and_grad(loss, argnums=(0, 1, 2, 3)) if gradient else loss)(x, q, k, v)

    out_specs = (PartitionSpec(), cut(spread)) if gradient else PartitionSpec()
    shapes = [(16,), (4, channels), (2, channels), (2, channels)]
    args = [jax.ShapeDtypeStruct((batch, length, *rest), jnp.float32) for rest in shapes]
    args.append(jax.ShapeDtypeStruct((batch, length), jnp.int32))
    return on_sequence(spread, body, out_specs).lower(*args).compile()


def sent(found, kinds):
    """Bytes a device sends in collectives of these kinds."""
    return sum(c.wire_bytes * (c.times or 1) for c in found if c.kind in kinds)


# In a ring of two this small program's forward and backward pass share the one exchange of keys and
# values.
@pytest.mark.parametrize(
    ("parts", "by_ring"), [(2, False), (4, True), *(slow(8, by_ring) for by_ring in (False, True))]
)
def test_what_travels_is_what_the_docstring_says(parts, by_ring):
    spread = Spread(context=parts, ring=by_ring)
    formula = formulas.of_context(
        BATCH, LENGTH, parts, num_kv=2, channels=8, width=16, reach=2, size=4, ring=by_ring
    )
    forward, both = (hlo.collectives(compiled_layer(spread, gradient=g)) for g in (False, True))
    segments = 4 * BATCH * LENGTH * (parts - 1) / parts  # once a step, not a layer
    every = ("all-gather", "reduce-scatter", "collective-permute", "all-to-all", "all-reduce")
    assert sent(forward, every) == formula["forward"] + segments
    assert sent(both, every) == formula["forward"] + formula["backward"] + segments
    if parts < 8:
        again = sent(hlo.collectives(compiled_layer(spread, again=True)), every)
        assert again == sum(formula.values()) + segments

    halo = BATCH * 2 * 16 * 4
    permutes = [c for c in both if c.kind == "collective-permute"]
    assert sum(c.bytes == halo and not c.in_loop for c in permutes) == 4  # one each way, and back
    gathers = [
        c for c in both if c.kind == "all-gather" and "s32" not in {a.dtype for a in c.operands}
    ]
    scatters = [c for c in both if c.kind == "reduce-scatter"]
    assert (len(gathers), len(scatters)) == ((0, 0) if by_ring else (1, 1))
    assert by_ring or len(permutes) == 4


def test_the_projection_does_not_wait_for_the_halo(monkeypatch):
    """What depends on the exchange is NaN here: the block's result, but not its projection."""
    spread, seen = Spread(context=4), set()
    model = config.Model(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
    )
    block = CCA(nnx.Rngs(0), model, config.Precision(compute="float32", matmul="highest"))
    graph, state = nnx.split(block, nnx.Param)
    halo, project = context.halo, CCA._project

    def watched(block, weights, x):
        y = project(block, weights, x)
        jax.debug.callback(lambda y: seen.add((y.shape[1], bool(np.isnan(y).all()))), y)
        return y

    monkeypatch.setattr(context, "halo", lambda *given: jnp.nan * halo(*given))
    monkeypatch.setattr(CCA, "_project", watched)

    def body(state, x):
        placement = placed(spread, x, None)
        rope = [(None, rope_table(placement.positions(2 * len(x), x.shape[1] // 2), 1e4, 4))]
        y, _ = nnx.merge(graph, state)(placement.rows(x), rope, placement)
        return placement.joined(y)

    x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, 16), np.float32)
    y = on_sequence(spread, body, cut(spread), replicated=1)(state, x)
    jax.effects_barrier()
    assert np.isnan(y).all() and seen == {(LENGTH // 8, False), (2, True)}


@pytest.mark.slow
def test_the_ring_needs_no_more_memory_on_more_devices():
    """1024 tokens per device: gathered keys and values grow with the number of devices, a ring's
    don't."""

    @functools.cache
    def temporaries(parts, by_ring):
        spread = Spread(context=parts, ring=by_ring)
        compiled = compiled_layer(spread, batch=1, length=1024 * parts, channels=32)
        return compiled.memory_analysis().temp_size_in_bytes

    own = 2 * 1024 * 2 * 32 * 4  # a device's keys and values
    assert temporaries(8, True) < temporaries(4, True) + own / 10
    assert temporaries(8, False) > temporaries(4, False) + 4 * own
    assert temporaries(8, True) < temporaries(8, False) / 3


# Skipped blocks, and the balance of work


def over_chunks(spread, q, k, v, segments, window=None):
    """Attention's output in the sequence's order, by devices with chunks of it."""

    def body(q, k, v, segments):
        return attend(placed(spread, q, segments, window=window), q, k, v)

    order = context.zigzag(LENGTH, spread.context)
    out = on_sequence(spread, body, cut(spread))(*(x[:, order] for x in (q, k, v, segments)))
    return out[:, context.natural(LENGTH, spread.context)]


def run_ring(parts, *arrays, monkeypatch):
    """The ring's output, and how many pairs of chunks each device attended to."""
    visits = []

    def counted(*args, **options):
        jax.debug.callback(lambda device: visits.append(int(device)), jax.lax.axis_index("context"))
        return attention(*args, **options)

    attention = ring.attention
    monkeypatch.setattr(ring, "attention", counted)

    out = over_chunks(Spread(context=parts, ring=True), *arrays)
    jax.effects_barrier()
    return out, np.bincount(visits, minlength=parts).tolist()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("whole", [9, 9, 9, 9]),  # of 4 x 4 pairs of chunks, half above the diagonal; 2 N + 1
        # of 9 tokens: each chunk of 8 sees itself and, but for the first, its neighbour
        ("window", [3, 4, 4, 4]),
        ("documents", [2, 2, 2, 2]),  # of a chunk each
        ("two documents", [5, 5, 5, 5]),  # of half the sequence each
    ],
)
def test_the_ring_computes_only_pairs_that_see_each_other(case, expected, monkeypatch):
    """Counted as the program runs; the gradients of the same pairs are compared above."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, LENGTH, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    chunk = {"documents": 8, "two documents": 32}.get(case, LENGTH)
    segments = (1 + np.arange(LENGTH)[None] // chunk).astype(np.int32)
    window = np.int32(9) if case == "window" else None
    out, visits = run_ring(4, q, k, v, segments, window, monkeypatch=monkeypatch)
    assert visits == expected
    np.testing.assert_allclose(
        out, reference_attention(q, k, v, segments, segments, window, scale=8**-0.5)[0], atol=2e-5
    )


@pytest.mark.parametrize("by_ring", [slow(False), True])
def test_bfloat16(by_ring):
    rng, one_document = np.random.default_rng(0), np.ones((1, LENGTH), np.int32)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, LENGTH, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2)
    )
    out = over_chunks(Spread(context=4, ring=by_ring), q, k, v, one_document)
    assert out.dtype == jnp.bfloat16
    exact = reference_attention(*(x.astype(jnp.float32) for x in (q, k, v)), scale=8**-0.5)[0]
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)


@pytest.mark.parametrize("ring", [slow(False), True])
@pytest.mark.parametrize("windows", [slow((None,)), (None, 700)])
def test_what_is_read_of_a_program_is_the_work_that_masks_leave(ring, windows):
    """Products of a layer's attention, forward and backward, as if it were any of two kinds; the
    mean over devices."""
    length, parts, block, heads, channels = 4096, 2, 512, 2, 8
    spread = Spread(context=parts, ring=ring)

    def body(x, window):
        window = None if windows == (None,) else window[0, 0]
        place = placed(spread, x, None, window=window, windows=windows)
        with chip.making(chip.Chip("gpu", "gfx942", kernels=())):
            out, pull = jax.vjp(lambda *qkv: attend(place, *qkv), x, x, x)
            return pull(out)

    x = jax.ShapeDtypeStruct((1, length, heads, channels), jnp.float32)
    lowered = on_sequence(spread, body, cut(spread)).lower(
        x, jax.ShapeDtypeStruct((1, parts), jnp.int32)
    )
    # without JAX's cache, whose programs may bear the scopes of another day
    with buffers.uncached():
        program = launches.read_program(lowered.compile())
    blocks = np.mean([formulas.blocks_visited(length, parts, block, window) for window in windows])
    assert not program.unknown
    assert program.flops == pytest.approx(7 * blocks * 2 * block**2 * heads * channels)


B, H, K, C = 2, 4, 2, 8


def lay_out(x, size):
    """[B, T, ..] as the devices hold it: one device's columns after the other's."""
    return jnp.concatenate([x[:, i::size] for i in range(size)], axis=1)


@pytest.mark.parametrize("size", [2, 8])
def test_equal_to_one_device(size):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, 1, H, C))
    k, v = (jax.random.normal(key, (B, 16, K, C)) for key in keys[1:])
    # Left padding; and a row with a single key, so that most devices have none.
    valid = jnp.stack([(jnp.arange(16) > 2) & (jnp.arange(16) < 13), jnp.arange(16) == 4])

    def read(q, valid, k, v):
        return tree.SplitCache(size).read(q, k, v, valid, scale=0.3)

    run = on_sequence(Spread(context=size), read, PartitionSpec(), replicated=2)
    out = run(q, valid, lay_out(k, size), lay_out(v, size))
    np.testing.assert_allclose(out, decode_attention(q, k, v, valid, scale=0.3), atol=1e-6)


def inputs(length):
    """q, k and v."""
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (B, length, heads, C))
        for key, heads in zip(keys, (H, K, K), strict=True)
    ]


def documents(length):
    """One row whose documents are long and short, begin on a piece's edge or not; one with a single
    long document."""
    ids = np.ones((B, length), np.int32)
    for start in (3, 16, 17, 40, 41, length // 2, length - 9):
        ids[0, start:] += 1
    ids[:, length - 5 :] = 0
    return jnp.asarray(ids)


def lasp2(spread, **options):
    """LASP-2 on whole arrays: cut over devices, put together again."""
    body = functools.partial(linear.lasp2, axis=spread.sequence_axes, **options)
    mapped = on_sequence(spread, body, cut(spread))

    def run(*arrays):
        columns = context.zigzag(arrays[0].shape[1], spread.context * spread.tensor)
        out = mapped(*(x[:, columns] for x in arrays))
        return out[:, np.argsort(columns)]

    return run


CPU, MI300X = chip.Chip("cpu", "cpu"), chip.Chip("cpu", "gfx942", ("linear_attention",))


@pytest.mark.parametrize(
    ("spread", "made_for", "chunk"),
    [
        slow(Spread(context=2), CPU, 4),
        (Spread(context=4), CPU, 4),
        slow(Spread(context=8), CPU, 4),
        # As with TSP, where the tensor axis carries the sequence too.
        (Spread(context=2, tensor=2, tsp=True), CPU, None),
        (Spread(context=2), MI300X, 16),  # kernels, interpreted
    ],
)
def test_linear_attention_is_that_of_one_device(spread, made_for, chunk):
    arrays, given = inputs(96), (documents(96),)
    with chip.making(made_for):
        ours = values_and_gradients(lasp2(spread, chunk=chunk), arrays, given)
    theirs = values_and_gradients(functools.partial(linear_attention, chunk=16), arrays, given)
    assert_norms_close(ours, theirs, 1e-5)


def test_a_row_of_one_document_needs_no_segments():
    q, k, v = inputs(32)
    out = lasp2(Spread(context=4))(q, k, v)
    np.testing.assert_allclose(out, linear_attention(q, k, v), atol=1e-6)


def compiled_linear(length, gradient=False):
    """One call on eight devices, compiled for shapes alone."""
    spread = Spread(context=8)
    mapped = on_sequence(spread, functools.partial(linear.lasp2, axis="context"), cut(spread))

    def backward(q, k, v, segments, d_out):
        return jax.vjp(lambda *a: mapped(*a, segments), q, k, v)[1](d_out)

    q, k = (jax.ShapeDtypeStruct((1, length, heads, C), jnp.float32) for heads in (H, K))
    args = q, k, k, jax.ShapeDtypeStruct((1, length), jnp.int32)
    return (jax.jit(backward).lower(*args, q) if gradient else mapped.lower(*args)).compile()


@pytest.mark.parametrize("length", [8 * 1024, 512 * 1024])
def test_one_all_gather_each_way_whatever_the_length(length):
    forward, backward = formulas.gathered_bytes(8, 1, K, C)
    for gradient, sizes in ((False, [forward]), (True, [forward, backward])):
        found = hlo.collectives(compiled_linear(length, gradient))
        assert [(c.kind, c.bytes, c.times) for c in found] == [("all-gather", n, 1) for n in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "attention"])
def test_linear_layers_of_a_model_gather_states_alone(remat):
    """Besides the halo's traffic, each layer gathers once forward and once backward, repeated or
    not."""
    settings = mesh_helpers.with_model(layer_types=("hybrid_linear",) * 2, sliding_window=None)
    settings = dataclasses.replace(settings, mesh=config.Mesh(context=4), remat=remat)
    found = hlo.collectives(mesh_helpers.compiled(settings, 4))
    gathers = [(c.bytes, c.times) for c in found if c.kind == "all-gather" and c.in_loop]
    model, rows = settings.model, mesh_helpers.ROWS
    expected = formulas.gathered_bytes(4, rows, model.num_key_value_heads, model.head_dim)
    assert gathers == [(n, model.num_hidden_layers) for n in expected]


def test_the_states_do_not_wait_for_the_work_within_a_device():
    """The all-gather's operand does not come from the loop over chunks, so both can run at once."""
    program = hlo.parse(compiled_linear(8 * 1024).as_text())
    made = {i.name: i for instructions in program.values() for i in instructions}
    pending, seen = [i for i in made.values() if i.op == "all-gather"], {}
    while pending:
        i = pending.pop()
        if i.name not in seen:
            seen[i.name] = i.op
            pending += [made[name] for name in i.operands]
    assert len(seen) > 2 and "while" not in seen.values()
