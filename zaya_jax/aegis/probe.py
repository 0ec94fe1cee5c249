"""The tests of `preflight` that may hang or crash, run in a separate process.

    python -m zaya_jax.aegis.probe devices
    python -m zaya_jax.aegis.probe link COORDINATOR INDEX SECONDS

Each part prints a line of JSON with its name when it ends, so that the parent knows which part gave no answer.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZE = {"cpu": 128}  # of a matrix's side
SIZE_ELSEWHERE = 2048  # fills every compute unit of a GPU
ROUNDS = 4  # of products, with other numbers each
STREAM = {"cpu": 1 << 24}  # bytes that are copied
STREAM_ELSEWHERE = 1 << 28  # beyond every cache, MI300X's 256 MiB together with its copy included
SECONDS = 0.2  # of copying, on a device
SENT = {"cpu": 1 << 22}  # bytes that each device sends its partner
SENT_ELSEWHERE = 1 << 26
SENDS = 8


def say(part: str, **given: Any) -> None:
    """A part has ended."""
    print(json.dumps({"part": part, **given}), flush=True)


def matrices(side: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers from -3 to 3, other ones each turn: sums of their products are exact in float32 in any order."""
    assert 9 * side < 2**24
    i, j = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    a, b = ((i * 7 + j * 3 + i * j + turn) % 7 - 3), ((i * 5 + j * 11 + i * j // 3 + 2 * turn) % 7 - 3)
    return a, b


def products(devices: list, wanted: Callable = np.matmul) -> list[str]:
    """Multiplies on every device in bfloat16 and float32, and compares with NumPy: the differences in words."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    platform, count = devices[0].platform, len(devices)
    side = SIZE.get(platform, SIZE_ELSEWHERE)
    mesh = Mesh(np.array(devices), ("devices",))
    own = NamedSharding(mesh, P("devices"))

    # One program for all: every device multiplies the same matrices, and compares by itself.
    def multiply(a, b):
        return jnp.matmul(a, b, precision="highest", preferred_element_type=jnp.float32)

    program = jax.jit(multiply, in_shardings=(own, own), out_shardings=own)
    wrong = []
    for turn in range(ROUNDS):
        a, b = matrices(side, turn)
        # NumPy multiplies whole numbers slowly; float64 holds them exactly and goes through BLAS.
        right = wanted(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
        for kind in (jnp.bfloat16, jnp.float32):
            each = [jax.device_put(np.broadcast_to(m.astype(kind), (count, side, side)), own) for m in (a, b)]
            for shard in program(*each).addressable_shards:
                out = np.asarray(shard.data)[0]
                bad = int((out != right).sum())
                if bad:
                    where = np.argwhere(out != right)[0]
                    got, should = out[tuple(where)], right[tuple(where)]
                    wrong.append(
                        f"device {shard.device.id}: {bad} of {out.size} sums of a {np.dtype(kind).name} product are "
                        f"wrong, such as {got:g} in place of {should:g}"
                    )
    return wrong


def bandwidth(device: Any) -> float:
    """Bytes read and written in a second by a copy on one device."""
    import jax

    from pallas_kernels import timing
    from zaya_jax.hardware.measure import memory_copies

    size = STREAM.get(device.platform, STREAM_ELSEWHERE)
    x = jax.device_put(np.ones(size // 4, np.float32), device)
    compiled = jax.jit(memory_copies.copied).lower(x).compile()
    taken = timing.time_call(lambda: compiled(x), SECONDS, device.platform != "cpu")
    return 2 * size / taken.median


def devices() -> None:
    """All devices of this process."""
    import jax

    here = jax.local_devices()
    say("devices", count=len(here), platform=here[0].platform, kinds=sorted({d.device_kind for d in here}))
    say("products", wrong=products(here))
    say("bandwidth", rates={str(d.id): bandwidth(d) for d in here})


def link(coordinator: str, index: int, seconds: int) -> None:
    """One of two nodes: every device sends known numbers to its partner on the other one, and checks its own."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.distributed.initialize(
        coordinator, 2, index, initialization_timeout=seconds, cluster_detection_method="deactivate",
        shutdown_timeout_seconds=10,
    )  # fmt: skip
    here, everything = len(jax.local_devices()), jax.devices()
    say("joined", devices=here)
    if len(everything) != 2 * here:
        raise RuntimeError(f"{here} devices here, {len(everything) - here} on the other node")
    numbers = SENT.get(everything[0].platform, SENT_ELSEWHERE) // 4
    mesh = Mesh(np.array(everything), ("devices",))
    own = NamedSharding(mesh, P("devices"))
    count = len(everything)
    pairs = [(i, (i + here) % count) for i in range(count)]

    def values(rank):
        return jnp.arange(numbers, dtype=jnp.uint32) * jnp.uint32(2654435761) + rank[0].astype(jnp.uint32)

    def over(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"), check_vma=False))

    ranks = jax.jit(lambda: jnp.arange(count), out_shardings=own)()
    x = over(values)(ranks)
    send = over(lambda x: lax.ppermute(x, "devices", pairs)).lower(x).compile()
    came = jax.block_until_ready(send(x))
    expected = np.arange(numbers, dtype=np.uint32) * np.uint32(2654435761)
    place = {device: i for i, device in enumerate(everything)}
    wrong = []
    for shard in came.addressable_shards:
        sender = (place[shard.device] - here) % count
        bad = int((np.asarray(shard.data) != expected + np.uint32(sender)).sum())
        if bad:
            wrong.append(f"device {shard.device.id}: {bad} of {numbers} numbers came wrong")
    say("exchanged", wrong=wrong)
    begin = time.perf_counter()
    for _ in range(SENDS):
        x = send(x)
    jax.block_until_ready(x)
    taken = time.perf_counter() - begin
    say("measured", bandwidth=SENDS * numbers * 4 * here / taken)  # of the node, in one direction
    jax.distributed.shutdown()


def main(arguments: list[str]) -> None:
    """See the module."""
    what, *rest = arguments
    if what == "devices":
        devices()
    else:
        link(rest[0], int(rest[1]), int(rest[2]))
    say("end")


if __name__ == "__main__":
    main(sys.argv[1:])
