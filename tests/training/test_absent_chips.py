"""The training step as it is lowered for GPUs that are not here: float32 that is float32, sums in a
fixed order."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice  # in jax.sharding from 0.12 on
from jax.sharding import AbstractMesh, AxisType
from rows import slow

from zaya_jax import config
from zaya_jax.hardware import targets
from zaya_jax.parallel.mesh import shape_of
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

PLATFORMS = ("cuda", "rocm")  # lowered for both at once
H200, MI300X = (
    AbstractDevice("NVIDIA H200", 132, "cuda"),
    AbstractDevice("AMD Instinct MI300X", 304, "rocm"),
)
WHOLE = "tf32 x 3"  # float32 on an H200, all its bits
SHAPE = {"sequences": 8, "length": 32}
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
            "data": {"seq_len": SHAPE["length"]},
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
    like = jax.ShapeDtypeStruct((1, SHAPE["sequences"], SHAPE["length"]), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), like)
    batch["loss_mask"] = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    return step.trace(state, batch, np.float32(1e-3))


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
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


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
    operations = lowered(settings(weights=weights), 1)
    read = {
        name: element(op.operands[2])
        for op in operations
        for name in kernels([op]) & {"experts_gate_up", "experts_down", "experts_d_x"}
    }
    assert read == dict.fromkeys(
        ("experts_gate_up", "experts_down", "experts_d_x"),
        "bf16" if weights == "compute" else "f32",
    )


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
