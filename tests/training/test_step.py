"""The compiled training step: what crosses devices and when, pieces of a batch add up to the batch;
for GPUs that are not here float32 is float32, and sums have a fixed order."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType
from rows import slow

from zaya_jax import config
from zaya_jax.compiled import hlo
from zaya_jax.compiled.measure import batch_like
from zaya_jax.hardware import targets
from zaya_jax.model import zaya
from zaya_jax.model.layer import Layer
from zaya_jax.model.own_parts import customized
from zaya_jax.model.weights import TokenSum
from zaya_jax.parallel.mesh import make_mesh, shape_of
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

SETTINGS = config.check(
    {
        "model": dict(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=4,
            router_hidden_size=8,
            pad_token_id=None,
        ),
        "precision": {"compute": "float32", "newton_schulz": "float32", "matmul": "highest"},
        "data": {"seq_len": 16},
        "optim": {"newton_schulz_steps": 1},  # five compile longer
    }
)
ROWS, LENGTH = 16, 16


def batch(rng):
    """Rows of documents of uneven lengths, and very uneven numbers of real targets."""
    tokens = rng.integers(0, 64, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = (1 + np.cumsum(rng.random((ROWS, LENGTH)) < 0.15, 1)).astype(np.int32)
    mask = (np.arange(LENGTH) < rng.integers(0, LENGTH + 1, (ROWS, 1))).astype(np.float32)
    mask[3] = 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segments,
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "loss_mask": mask,
    }


class Noted(Layer):
    """With a figure of its own."""

    def __call__(self, h, router_state, balance, rope, placement):
        out = super().__call__(h, router_state, balance, rope, placement)
        squares = jnp.mean(jnp.square(out.h), axis=-1)
        self.square = TokenSum(jnp.sum(squares * placement.real(h)))
        return out


@functools.cache
def program(num_devices):
    setup = states.set_up(SETTINGS, make_mesh(SETTINGS.mesh, jax.devices()[:num_devices]))
    noted = dataclasses.replace(SETTINGS, model=customized(SETTINGS.model, layer=Noted))
    return setup, steps.make_train_step(noted, setup)


def run(num_devices, micro_batches):
    setup, step = program(num_devices)
    state = states.init(SETTINGS, setup)
    rng, figures = np.random.default_rng(0), []
    for _ in range(2):
        rows = steps.put_batch(setup.mesh, batch(rng), micro_batches)
        state, found = step(state, rows, np.float32(1e-3))
        figures.append(jax.device_get(found))
    return jax.device_get(state["params"]), figures


@pytest.mark.parametrize(
    ("pieces", "whole"), [((8, 2), (8, 1)), pytest.param((2, 4), (1, 1), marks=pytest.mark.slow)]
)
def test_micro_batches_add_up_to_the_batch(pieces, whole):
    """On the devices, and with the programs, of the tests below; tests/parallel compares devices
    with one."""
    (params, figures), whole = run(*pieces), run(*whole)
    for ours, theirs in zip(figures, whole[1], strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-5)
        np.testing.assert_array_equal(ours["target_tokens"], theirs["target_tokens"])
        np.testing.assert_allclose(ours["load"], theirs["load"], atol=1e-6)
        np.testing.assert_allclose(ours["square"], theirs["square"], rtol=1e-5)
    assert figures[0]["square"].shape == (2,)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(whole[0]), strict=True):
        # AdamW moves by the learning rate however tiny a gradient is, so there rounding shows.
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_shapes_are_known_without_a_program_of_fresh_weights(monkeypatch):
    """That program has a compiler option of its own where XLA_FLAGS has none; a traced one may have
    none."""
    monkeypatch.setenv("XLA_FLAGS", "")
    setup, _ = program(1)
    like, made = states.abstract(SETTINGS, setup), states.init(SETTINGS, setup)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), like) == jax.tree.map(
        lambda x: (x.shape, x.dtype), made
    )


@pytest.fixture(scope="module")
def compiled():
    """(optimizer, the step's program on eight devices by its number of micro-batches): those that
    run above."""
    setup, step = program(8)
    state = states.init(SETTINGS, setup)
    likes = {n: steps.put_batch(setup.mesh, batch(np.random.default_rng(0)), n) for n in (2, 1)}
    return setup.optimizer, {
        n: step.lower(state, x, np.float32(1e-3)).compile() for n, x in likes.items()
    }


def test_every_product_and_every_transfer_says_what_it_belongs_to(compiled):
    found: dict[str, collections.Counter] = {}
    for instructions in hlo.parse(compiled[1][1].as_text()).values():
        for i in instructions:
            scope = hlo.scope_of(i.op_name) if i.op_name else "?"  # the compiler's own
            found.setdefault(scope, collections.Counter())[i.op] += 1
    heavy = {
        "dot",
        "convolution",
        "custom-call",
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
    }
    kinds = {scope: heavy & ops.keys() for scope, ops in found.items()}
    for scope in ("embed", "cca", "router", "experts", "head", "optimizer", "balance"):
        assert any(name.split("/")[0] == scope for name in found), scope
    for scope in ("cca", "router", "experts", "head", "optimizer"):
        assert kinds[scope], scope
    assert {"reduce-scatter", "all-gather", "all-reduce"} <= kinds["optimizer/exchange"]
    # Of the step itself there are the sums of the loss, of the counts and of the number of targets.
    assert kinds[""] <= {"all-reduce"} and found[""]["all-reduce"] <= 3


def test_no_weight_crosses_devices_inside_the_accumulation(compiled):
    optimizer, programs = compiled
    found = {}
    for micro_batches, program in programs.items():
        collectives = hlo.collectives(program)
        assert not [c for c in collectives if c.in_loop and not c.scalar], (
            "a weight is reduced once a micro-batch"
        )
        found[micro_batches] = sorted((c.kind, c.bytes) for c in collectives if not c.scalar)
    # The compiler sums scalars together with other small arrays, and two micro-batches have ten
    # scalars more.
    assert [kind for kind, _ in found[1]] == [kind for kind, _ in found[2]]
    assert all(abs(a - b) < 256 for (_, a), (_, b) in zip(found[1], found[2], strict=True)), found
    # One reduce-scatter and one all-gather a bucket that is not small, and the small ones together
    # in one sum each way.
    travel = [b for b in optimizer.layout.matrices.values() if not b.summed_whole]
    for kind in ("reduce-scatter", "all-gather"):
        assert sum(k == kind for k, _ in found[1]) == len(travel) + 1


def test_a_figure_of_a_layer_is_its_mean_over_the_tokens():
    setup, step = program(8)
    state = states.init(SETTINGS, setup)
    rows = batch(np.random.default_rng(0))
    params, bias = jax.device_get((state["params"], state["balance"].bias))
    out = zaya.apply(
        SETTINGS.model,
        params,
        bias,
        zaya.TokenRows(rows["tokens"], rows["segment_ids"], rows["positions"]),
        precision=SETTINGS.precision,
        trace=True,
    )
    _, figures = step(state, steps.put_batch(setup.mesh, rows, 1), np.float32(1e-3))
    wanted = np.mean(np.square(out.hidden_states), axis=(1, 2, 3))
    np.testing.assert_allclose(figures["square"], wanted, rtol=1e-5)


PLATFORMS = ("cuda", "rocm")  # lowered for both at once
H200, MI300X = (
    AbstractDevice("NVIDIA H200", 132, "cuda"),
    AbstractDevice("AMD Instinct MI300X", 304, "rocm"),
)
WHOLE = "tf32 x 3"  # float32 on an H200, all its bits
MODELS = {
    "zaya": {"layer_types": ("hybrid", "hybrid_sliding"), "sliding_window": 9},
    "linear": {"layer_types": ("hybrid", "hybrid_linear")},
    "dense": {
        "model_type": "dense",
        "num_experts": 1,
        "intermediate_size": 32,
        "attention_bias": False,
    },
}
MESHES = {
    "one device": ("zaya", 1, {}, H200),
    "fsdp and experts": ("zaya", 8, {"expert": 4, "fsdp": True}, H200),
}
MORE_MESHES = {
    "MI300X": ("zaya", 1, {}, MI300X),
    "linear": ("linear", 1, {}, H200),
    "context and tensor": ("zaya", 4, {"context": 2, "tensor": 2}, H200),
    "ring": ("zaya", 2, {"context": 2, "ring": True}, H200),
    "linear over context": ("linear", 2, {"context": 2}, H200),
    "dense TSP": ("dense", 2, {"tensor": 2, "tsp": True}, H200),
}
CASES = [pytest.param(*case, id=name) for name, case in MESHES.items()]
CASES += [slow(*case, id=name) for name, case in MORE_MESHES.items()]
NAMES = ("model", "devices", "mesh", "device")


def settings(model: str = "zaya", mesh: dict | None = None, **precision) -> config.Config:
    return config.check(
        {
            "model": dict(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=8,
                moe_intermediate_size=16,
                router_hidden_size=8,
                pad_token_id=None,
                lm_head_bias=True,
                **{"num_experts": 8, "attention_bias": True, **MODELS[model]},
            ),
            "precision": precision,
            "data": {"seq_len": 32},
            "mesh": mesh or {},
        }
    )


@functools.cache
def trace(of: config.Config, devices: int, device: AbstractDevice = H200):
    """The step, traced for so many devices that are not here."""
    shape = shape_of(of.mesh, devices)
    mesh = AbstractMesh(
        tuple(shape.values()), tuple(shape), (AxisType.Auto,) * 4, abstract_device=device
    )
    setup = states.set_up(of, mesh)
    step, state = steps.make_train_step(of, setup), states.abstract(of, setup)
    return step.trace(state, batch_like(of, setup, 8, 1), np.float32(1e-3))


@functools.cache
def lowered(of: config.Config, devices: int, device: AbstractDevice = H200) -> list:
    """The operations of the step's StableHLO."""
    targets.tell_pallas()
    module = trace(of, devices, device).lower(lowering_platforms=PLATFORMS).compiler_ir("stablehlo")
    return list(walk(module.operation))


def walk(operation) -> Iterator:
    yield operation
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from walk(inner.operation)


def element(value) -> str:
    return str(value.type.element_type)


def kernels(operations: list) -> set[str]:
    """Names of the Pallas kernels."""
    calls = [op for op in operations if op.name == "stablehlo.custom_call"]
    found = [
        re.search(r'\bname = "(\w+)"', str(op.attributes.get("mhlo.backend_config", "")))
        for op in calls
    ]
    return {match[1] for match in found if match}


KERNELS = {"experts_gate_up", "experts_down", "experts_d_x"}


def weights_of_experts(operations: list) -> dict:
    """The weights that the experts' kernels read, by the kernel's name."""
    return {name: op.operands[2] for op in operations for name in kernels([op]) & KERNELS}


def products(operations: list) -> list[tuple[str, str, str]]:
    """Format of the operands, precision, and shape of the result, of every matrix product.

    A precision is a word, or "tf32 x 3": three products of operands in TF32.
    """
    found = []
    for op in operations:
        if op.name in ("stablehlo.dot_general", "chlo.ragged_dot"):
            both = {
                str(p).split("precision ")[1].rstrip(">") for p in op.attributes["precision_config"]
            }
            if "algorithm" in op.attributes:
                said = re.search(
                    r"lhs_precision_type = (\w+), rhs_precision_type = \1.*num_primitive_operations = (\d)",
                    str(op.attributes["algorithm"]),
                )
                assert both == {"DEFAULT"} and said, op
                both = {f"{said[1]} x {said[2]}"}
            kinds = {element(op.operands[i]) for i in (0, 1)}
            assert len(kinds) == len(both) == 1
            found.append((kinds.pop(), both.pop(), str(op.results[0].type)))
    return found


def equations(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def tricks_of_cpus(traced) -> collections.Counter:
    """Operations that only algorithms for CPUs have: barriers, orders in memory, choices among
    blocks.

    The barriers with which `jax.checkpoint` keeps repeated work apart come with lowering, and are
    no part of this; nor is the optimizer's one barrier, between reading the weights for their norms
    and writing them.
    """
    found: collections.Counter = collections.Counter()
    for equation in equations(traced.jaxpr.jaxpr):
        name = equation.primitive.name
        found[name] += name in ("optimization_barrier", "layout_constraint")
        found[name] -= name == "optimization_barrier" and "optimizer" in str(
            equation.source_info.name_stack
        )
        found[name] += name == "cond" and len(equation.params["branches"]) > 2
    return +found


@pytest.mark.parametrize(NAMES, CASES)
def test_a_step_for_an_absent_chip_has_nothing_of_the_cpus(model, devices, mesh, device):
    of = dataclasses.replace(settings(model), mesh=config.Mesh(**mesh))
    assert not tricks_of_cpus(trace(of, devices, device))
    assert ("experts_gate_up" in kernels(lowered(of, devices, device))) == (model != "dense")


def test_the_cpus_own_step_has_it():
    cpu = AbstractDevice("cpu", None, "cpu")
    assert set(tricks_of_cpus(trace(settings(), 1, cpu))) == {
        "optimization_barrier",
        "layout_constraint",
        "cond",
    }
    assert not kernels(lowered(settings(), 1, cpu))


@pytest.mark.parametrize(
    ("model", "kinds", "device", "whole"),
    [
        ("zaya", 1, H200, WHOLE),
        slow("linear", 2, H200, WHOLE),
        slow("dense", 0, H200, WHOLE),
        slow("zaya", 1, MI300X, "HIGHEST"),
    ],
)
def test_float32_of_the_table_is_float32(model, kinds, device, whole):
    """With bfloat16 products, all that is left of float32 keeps its bits."""
    found = products(lowered(settings(model), 1, device))
    exact = [p for p in found if p[0] == "f32"]
    # For each kind of layer that is traced: the router's four matrices, three products each; the
    # convolutions' biases.
    assert [p[1] for p in exact] == [whole] * 15 * kinds
    assert {p[:2] for p in found} - {("f32", whole)} == {("bf16", "DEFAULT")}


@pytest.mark.parametrize("weights", ["compute", slow("float32")])
def test_a_step_rounds_the_experts_weights_before_its_kernels_read_them(weights):
    """The products of an NVIDIA GPU take their second operand from shared memory: weights that are
    rounded in their loops go there twice."""
    read = weights_of_experts(lowered(settings(weights=weights), 1))
    formats = {name: element(weights) for name, weights in read.items()}
    assert formats == dict.fromkeys(KERNELS, "bf16" if weights == "compute" else "f32")


@pytest.mark.parametrize(("layer", "stacked"), [(None, [2, 8]), (Noted, [8])])
def test_experts_are_read_in_the_stack_of_all_layers_but_in_the_users_own_layers(layer, stacked):
    """Such a layer may compute with other weights than those in the stack, or have no experts."""
    of = settings()
    if layer:
        of = dataclasses.replace(of, model=customized(of.model, layer=layer))
    read = weights_of_experts(lowered(of, 1))
    assert read.keys() == KERNELS
    for weights in read.values():
        assert weights.type.shape[:-2] == stacked


@pytest.mark.parametrize("matmul", ["default", slow("highest")])
def test_float32_products_follow_the_matmul_key_and_the_declared_ones_do_not(matmul):
    found = products(lowered(settings(compute="float32", matmul=matmul, router="float32"), 1))
    assert {p[0] for p in found} == {"f32"}
    assert {p[1] for p in found} == {matmul.upper(), WHOLE}
    if matmul != "highest":
        # logits, narrow stream
        router = [p for p in found if p[2] in ("tensor<256x9xf32>", "tensor<256x8xf32>")]
        assert len(router) >= 4 and {p[1] for p in router} == {WHOLE}


@pytest.mark.parametrize(NAMES, CASES)
def test_no_scatter_adds_numbers_in_an_order_of_its_own(model, devices, mesh, device):
    """A GPU does several additions to one place in the order in which they come."""
    of = dataclasses.replace(settings(model), mesh=config.Mesh(**mesh))
    operations = lowered(of, devices, device)
    scatters = [op for op in operations if op.name == "stablehlo.scatter"]
    assert any(element(op.results[0]) == "f32" for op in scatters)  # the embedding's gradient
    for op in scatters:
        body = [inner.operation.name for inner in op.regions[0].blocks[0]]
        assert body == ["stablehlo.return"], op  # puts a number, adds none
        assert str(op.attributes["unique_indices"]) == "true", op
    assert not [op for op in operations if op.name == "stablehlo.select_and_scatter"]
