"""Times ways of communicating against each other, over links of a chosen bandwidth.

    python -m tools.network --nodes=4 --rate=100 -- python benchmarks/network.py WHAT [--sizes=...] [--turns=5]

    lasp      LASP-2, LASP-1's ring and softmax attention, forward and backward; sizes are tokens
    tsp       steps of a dense model of two layers under TSP, TP and TP+SP; sizes are tokens
    tree      a new token's attention to a cache in parts, by a tree and by rings; sizes are tokens
    overlap   a sum over the nodes, products of matrices, and both in one program; sizes are MiB
    store     sums over the nodes alone, and while node 0 saves to the store that BENCH_STORE names;
              sizes are MiB of a sum

All forms of a size are compiled first, then timed in turns, forward and backward; a time is that of
the slowest node. Printed are the median with the least and the greatest, and the same of the ratio
to the first form in its turn. Float32 throughout: a CPU's collectives have no bfloat16.
"""

import argparse
import concurrent.futures
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import bench_lasp
import jax
import jax.numpy as jnp
import rivals
import tsp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zaya_jax import config
from zaya_jax.checkpoint import storage
from zaya_jax.cluster import multihost
from zaya_jax.compiled import hlo

MIB = 2**20
# A call that returns its seconds, and the MiB that a node must send in it.
Form = tuple[Callable[[], float], float]


def lasp(tokens: int) -> dict[str, Form]:
    """Attention of one layer of ZAYA1-base's heads."""
    schemes = bench_lasp.SCHEMES.items()
    return {name: prepare(*bench_lasp.program_of(run, tokens)) for name, run in schemes}


def tsp_steps(tokens: int) -> dict[str, Form]:
    """Steps of a model with the proportions of experiments/configs/dense_7b.py."""
    model = dict(
        model_type="dense",
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        intermediate_size=688,
        num_experts=1,
        max_position_embeddings=tokens,
        rope_parameters={"hybrid": {"partial_rotary_factor": 1.0}},
    )
    meshes = {
        "tsp": dict(tensor=4, tsp=True),
        "tp": dict(tensor=4),
        "tp+sp 2x2": dict(tensor=2, context=2),
    }
    forms = {}
    for scheme, mesh in meshes.items():
        keys = {"model": model, "mesh": mesh, "remat": "layer", "data": {"seq_len": tokens}}
        settings = config.check(keys | {"precision": {"compute": "float32"}})
        forms[scheme] = prepare(*tsp.step_of(settings, scheme, tokens, jax.devices()))
    return forms


def tree(tokens: int) -> dict[str, Form]:
    """One layer of ZAYA1-base, one text."""
    mesh, whole = mesh_of_all("context"), PartitionSpec()
    parts = PartitionSpec(None, "context")
    cache = shape(mesh, parts, 1, tokens, bench_lasp.KV, bench_lasp.CHANNELS)
    query = shape(mesh, whole, 1, 1, bench_lasp.HEADS, bench_lasp.CHANNELS)
    valid = shape(mesh, whole, 1, tokens, dtype=jnp.bool)
    forms = {}
    for form in (rivals.tree_attention, rivals.ring_of_parts, rivals.ring_of_keys):
        run = functools.partial(form, scale=0.1, axis="context")
        specs = (whole, parts, parts, whole)
        mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
        forms[form.__name__] = prepare(mapped, (query, cache, cache, valid))
    return forms


def overlap(mib: int) -> dict[str, Form]:
    """Neither needs the other's result, so a backend that overlaps takes as long as the longer."""
    mesh, cut = mesh_of_all("data"), PartitionSpec("data")
    numbers = shape(mesh, cut, jax.device_count() * mib * MIB // 4)
    matrix = shape(mesh, cut, jax.device_count() * 700, 700)

    def add(x: jax.Array) -> jax.Array:
        return lax.psum(x, "data")

    def multiply(m: jax.Array) -> jax.Array:
        for _ in range(40):
            m = jnp.tanh(m @ m)
        return m

    def both(x: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
        return add(x), multiply(m)

    forms = {}
    for form, args in ((both, (numbers, matrix)), (add, (numbers,)), (multiply, (matrix,))):
        mapped = jax.shard_map(form, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
        forms[form.__name__] = prepare(mapped, args)
    return forms


def store(mib: int) -> dict[str, Form]:
    """Twenty sums, and a save that takes longer than they do."""
    add, sent = overlap(mib)["add"]
    place = storage.Storage(os.environ["BENCH_STORE"])
    files = 8 * mib if multihost.is_writer() else 0

    def save() -> float:
        begun = time.perf_counter()
        for number in range(files):
            place.put(str(number), bytes(8 * MIB))
        return time.perf_counter() - begun

    def sums() -> float:
        return sum(add() for _ in range(20))

    def sums_during_a_save() -> float:
        with concurrent.futures.ThreadPoolExecutor(1) as background:
            background.submit(save)
            return sums()

    return {
        "sums": (sums, 20 * sent),
        "sums during a save": (sums_during_a_save, 20 * sent + 8 * files),
        "save": (save, 8 * files),
    }


def mesh_of_all(axis: str) -> jax.sharding.Mesh:
    """All devices along one axis."""
    return jax.make_mesh((jax.device_count(),), (axis,), axis_types=(AxisType.Auto,))


def shape(mesh: Any, spec: PartitionSpec, *sizes: int, dtype: Any = jnp.float32) -> Any:
    """An array on the mesh, not yet made."""
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))


def make(like: Any) -> Any:
    """Arrays of such shapes; their values make no difference to the time."""

    def fill(x: Any) -> jax.Array:
        value = 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else 1
        return jnp.full(x.shape, value, x.dtype)

    shardings = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(lambda: jax.tree.map(fill, like), out_shardings=shardings)()


def prepare(run: Callable, like: Any) -> Form:
    """A program of all nodes, compiled for arguments of such shapes."""
    compiled = jax.jit(run).lower(*like).compile()
    args = make(like)

    def call() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        return time.perf_counter() - begun

    return call, sum(c.wire_bytes * (c.times or 1) for c in hlo.collectives(compiled)) / MIB


def time_in_turns(forms: dict[str, Form], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Of each form and turn the slowest node's seconds and the MiB that left node 0; the first turn
    is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for turn in range(turns + 1):
        for name in list(forms) if turn % 2 else reversed(forms):
            multihost.barrier("begin")
            before = sent_by_now()
            seconds, sent = forms[name][0](), sent_by_now() - before
            every = multihost.gather_to_zero("seconds", seconds)
            if every and turn:
                found[name].append((max(every), sent))
    return found


def sent_by_now() -> float:
    """The MiB that have left this node, headers and all."""
    counters = Path("/proc/net/dev").read_text().split("eth0:")[1].split()
    return int(counters[8]) / MIB


def spread(values: Sequence[float]) -> str:
    """The median, the least and the greatest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> int:
    """Prints a row for each form and size, in node 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=CASES)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if multihost.is_writer():
        print("| size | form | MiB by formula | MiB sent | seconds | times the first |")
        print("|---|---|---|---|---|---|")
    for size in args.sizes:
        forms = CASES[args.what](size)
        found = time_in_turns(forms, args.turns)
        first = [seconds for seconds, _ in found[next(iter(found))]]
        for name in forms if multihost.is_writer() else ():
            seconds, sent = zip(*found[name], strict=True)
            ratios = [own / other for own, other in zip(seconds, first, strict=True)]
            cells = [f"{size:,}", name, f"{forms[name][1]:.3g}", f"{statistics.median(sent):.3g}"]
            cells += [spread(seconds), spread(ratios)]
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0


CASES = {"lasp": lasp, "tsp": tsp_steps, "tree": tree, "overlap": overlap, "store": store}

if __name__ == "__main__":
    sys.exit(multihost.run_distributed(main))
