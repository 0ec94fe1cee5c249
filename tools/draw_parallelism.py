"""Draws the contents of each device and the traffic between devices, for docs/parallelism.md.

    python tools/draw_parallelism.py

The contents are not drawn by hand: they are read from the shardings of a run with this mesh (the
rules for weights, the batch's layout with its zig-zag, the optimizer's buckets). The traffic is
listed next to them, in the order of a layer's forward pass, then backward, then the update; the
tests read the same from compiled programs.
"""

import dataclasses
import html
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax import config
from zaya_jax.model import zaya
from zaya_jax.parallel import sharding
from zaya_jax.parallel.context import zigzag
from zaya_jax.parallel.mesh import batch_spec, make_mesh
from zaya_jax.parallel.spread import spread_of
from zaya_jax.training import state as states

OUT = Path(__file__).resolve().parent.parent / "docs" / "parallelism"
MODEL = config.Model(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=8,
    router_hidden_size=8,
)
SEQUENCES, LENGTH = 8, 32
CELL, GAP, LEFT, TOP, BOX = (92, 46), (22, 12), 96, 58, 560
INK, PALE, FILL, MOVE = "#333", "#ddd", ("#4477aa", "#66a182", "#cc8844", "#8866aa"), "#bb3344"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A mesh and the messages between its devices: (when, how, what), `how` one of the patterns."""

    name: str
    title: str
    devices: int
    sizes: dict
    moves: tuple[tuple[str, str, str], ...]


UPDATE = (
    ("update", "reduce-scatter", "gradients, by whole matrices"),
    ("update", "all-gather", "Muon's directions"),
)
SCHEMES = (
    Scheme("data", "data: ZeRO-1", 4, dict(data=4), UPDATE),
    Scheme(
        "fsdp",
        "data with fsdp",
        4,
        dict(data=4, fsdp=True),
        (
            ("layer, forward", "all-gather", "the layer's matrices"),
            ("layer, backward", "all-gather", "the same again"),
            ("layer, backward", "reduce-scatter", "their gradients"),
            ("update", "all-to-all", "gradients to whole matrices, and back"),
        ),
    ),
    Scheme(
        "expert",
        "expert",
        4,
        dict(data=1, expert=4),
        (
            ("layer, forward", "all-to-all", "tokens to their expert's device"),
            ("layer, forward", "all-to-all", "and back"),
            ("layer, backward", "all-to-all", "the same for gradients"),
            *UPDATE,
        ),
    ),
    Scheme(
        "context",
        "context: all-gather-KV",
        4,
        dict(data=1, context=4),
        (
            ("layer, forward", "neighbours", "the columns before each chunk"),
            ("layer, forward", "all-gather", "keys and values"),
            ("layer, backward", "reduce-scatter", "their gradients"),
            *UPDATE,
        ),
    ),
    Scheme(
        "ring",
        "context: ring",
        4,
        dict(data=1, context=4, ring=True),
        (
            ("layer, forward", "neighbours", "the columns before each chunk"),
            ("layer, forward", "ring", "keys and values, N - 1 times"),
            ("layer, backward", "ring", "they and their gradients, N times"),
            *UPDATE,
        ),
    ),
    Scheme(
        "lasp2",
        "context, linear attention: LASP-2",
        4,
        dict(data=1, context=4),
        (
            ("layer, forward", "neighbours", "the columns before each chunk"),
            ("layer, forward", "all-gather", "each chunk's d x d state"),
            ("layer, backward", "all-gather", "the states' gradients"),
            *UPDATE,
        ),
    ),
    Scheme(
        "tree",
        "context, decoding: tree attention",
        4,
        dict(data=1, context=4),
        (
            ("layer and token", "all-reduce", "greatest log-sum-exp"),
            ("layer and token", "all-reduce", "numerators"),
            ("layer and token", "all-reduce", "denominators"),
        ),
    ),
    Scheme(
        "tensor",
        "tensor",
        4,
        dict(data=1, tensor=4),
        (
            ("layer, forward", "all-reduce", "attention's output, the experts' output"),
            ("layer, backward", "all-reduce", "the gradients of both inputs"),
            *UPDATE,
        ),
    ),
    Scheme(
        "tsp",
        "tensor carrying the sequence: TSP",
        4,
        dict(data=1, tensor=4, tsp=True),
        (
            ("layer, forward", "ring", "each device's attention weights, to all"),
            ("layer, forward", "all-gather", "keys and values of those heads"),
            ("layer, forward", "all-to-all", "tokens to their expert's device and back"),
            ("layer, backward", "ring", "weights again, their gradients home"),
            *UPDATE,
        ),
    ),
    Scheme(
        "combined",
        "data 2 x expert 2 x context 2",
        8,
        dict(data=2, expert=2, context=2),
        (
            ("layer, forward", "neighbours", "within context: the columns before each chunk"),
            ("layer, forward", "all-gather", "within context: keys and values"),
            ("layer, forward", "all-to-all", "within expert: tokens there and back"),
            ("update", "reduce-scatter", "over the axes that a weight leaves"),
            ("update", "all-gather", "over the same"),
        ),
    ),
)


def arrays(scheme: Scheme) -> tuple:
    """(mesh, [(title, rows, columns, {device: indices of a 2-D picture it holds})]) of four telling
    arrays."""
    settings = config.Config(model=MODEL, mesh=config.Mesh(**scheme.sizes))
    mesh = make_mesh(settings.mesh, jax.devices()[: scheme.devices])
    if scheme.name == "tree":
        cache = NamedSharding(mesh, PartitionSpec(None, "context")).devices_indices_map(
            (SEQUENCES, LENGTH)
        )
        parts = {d: (np.arange(SEQUENCES)[i[0]], np.arange(LENGTH)[i[1]]) for d, i in cache.items()}
        query = dict.fromkeys(mesh.devices.flat, (np.arange(1), np.arange(1)))
        return mesh, [
            ("K and V cache", "sequences", "positions", SEQUENCES, LENGTH, parts),
            ("the new query", "sequences", "", 1, 1, query),
        ]
    spread = spread_of(settings.mesh, mesh.shape)
    specs = sharding.param_specs(MODEL, settings.precision, spread)["layers"]
    shapes = zaya.abstract(MODEL)["layers"]
    optimizer = states.build_optimizer(settings, mesh)
    bucket = max(
        (name for name in optimizer.layout.methods if name.startswith("muon")),
        key=lambda name: np.prod(optimizer.layout.state_shapes()[name]),
    )
    order = np.argsort(zigzag(LENGTH, spread.sequence_parts))

    def held(spec, shape, pick):
        found = NamedSharding(mesh, spec).devices_indices_map(shape)
        return {device: pick(index) for device, index in found.items()}

    def tokens(index):
        columns = np.arange(LENGTH)[index[2]]
        return np.arange(SEQUENCES)[index[1]], np.flatnonzero(np.isin(order, columns))

    def pick(rows, columns):
        return lambda index: (np.arange(rows)[index[-2]], np.arange(columns)[index[-1]])

    q, down = shapes["cca"]["q"]["kernel"].shape, shapes["experts"]["down"].shape
    numbers = np.arange(down[2] * down[3]).reshape(down[2:])  # an expert's rows of width, each of D
    experts = lambda index: (np.arange(down[1])[index[1]], numbers[index[2:]].reshape(-1))  # noqa: E731
    rows = optimizer.layout.state_shapes()[bucket][0]
    whole = lambda index: (np.arange(rows)[index[0]], np.arange(1))  # noqa: E731
    return mesh, [
        (
            "tokens",
            "sequences",
            "positions",
            SEQUENCES,
            LENGTH,
            held(batch_spec(spread), (1, SEQUENCES, LENGTH), tokens),
        ),
        ("attention's q", "D", "heads", *q[1:], held(specs["cca"]["q"]["kernel"], q, pick(*q[1:]))),
        (
            "experts",
            "expert",
            "width x D",
            down[1],
            numbers.size,
            held(specs["experts"]["down"], down, experts),
        ),
        (
            "Muon's state",
            "matrix",
            "",
            rows,
            1,
            held(optimizer.layout.spec(bucket), optimizer.layout.state_shapes()[bucket], whole),
        ),
    ]


def text(x, y, words, size=12, anchor="start", color=INK, weight="normal") -> str:
    """One line of words."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
        f'font-weight="{weight}">{html.escape(words)}</text>'
    )


def portion(x, y, rows, columns, index, color) -> str:
    """An array's outline with the part of it that a device has."""
    width, height = CELL
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#fff" stroke="{PALE}"/>'
    ]
    for first, last in runs(index[0]):
        for left, right in runs(index[1]):
            parts.append(
                f'<rect x="{x + width * left / columns:.1f}" y="{y + height * first / rows:.1f}"'
                f' width="{width * (right - left) / columns:.1f}"'
                f' height="{height * (last - first) / rows:.1f}" fill="{color}"/>'
            )
    return "".join(parts)


def runs(numbers) -> list[tuple[int, int]]:
    """(first, last + 1) of each stretch of neighbouring numbers."""
    cuts = np.flatnonzero(np.diff(numbers) > 1)
    pieces = np.split(np.asarray(numbers), cuts + 1)
    return [(int(p[0]), int(p[-1]) + 1) for p in pieces if len(p)]


def pattern(x, y, kind) -> str:
    """Four dots and how they talk."""
    dots = [(x + 26 * i, y) for i in range(4)]
    arrows = {
        "ring": [(0, 1), (1, 2), (2, 3)],
        "neighbours": [(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)],
        "all-to-all": [(0, 2), (1, 3), (2, 0), (3, 1), (0, 3), (3, 0), (1, 2), (2, 1)],
    }.get(kind, [])
    out = []
    for a, b in arrows:
        bend = -9 * (b - a) if kind != "ring" else 0
        (x0, _), (x1, _) = dots[a], dots[b]
        out.append(
            f'<path d="M{x0} {y} Q{(x0 + x1) / 2} {y + bend} {x1} {y}" fill="none" stroke="{MOVE}" '
            'marker-end="url(#tip)"/>'
        )
    if kind == "ring":
        out.append(
            f'<path d="M{x + 78} {y} Q{x + 39} {y - 26} {x} {y}" fill="none" stroke="{MOVE}" '
            'marker-end="url(#tip)"/>'
        )
    if not arrows:  # by way of a common line
        out.append(f'<path d="M{x} {y - 12} H{x + 78}" stroke="{MOVE}" stroke-width="2"/>')
        ends = {"all-gather": "end", "reduce-scatter": "end", "all-reduce": "both"}[kind]
        for dot, _ in dots:
            both = 'marker-start="url(#back)"' if ends == "both" else ""
            out.append(
                f'<path d="M{dot} {y - 12} V{y - 3}" stroke="{MOVE}" marker-end="url(#tip)"'
                f" {both}/>"
            )
    out += [f'<circle cx="{dot}" cy="{y}" r="3.2" fill="{INK}"/>' for dot, _ in dots]
    return "".join(out)


def draw(scheme: Scheme) -> str:
    """The picture of a scheme."""
    mesh, columns = arrays(scheme)
    devices = list(mesh.devices.flat)
    step_x, step_y = CELL[0] + GAP[0], CELL[1] + GAP[1]
    right = LEFT + step_x * len(columns) + 16
    height = max(TOP + step_y * len(devices) + 14, TOP + 46 * len(scheme.moves) + 30)
    width = right + BOX - 150
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="sans-serif"'
            f' role="img"><title>{html.escape(scheme.title)}</title>'
        ),
        (
            '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5"'
            ' markerHeight="5" orient="auto"><path d="M0 0L6 3L0 6z"'
            f' fill="{MOVE}"/></marker><marker id="back" viewBox="0 0 6 6" refX="0" refY="3"'
            ' markerWidth="5" markerHeight="5" orient="auto"><path d="M6 0L0 3L6 6z"'
            f' fill="{MOVE}"/></marker></defs>'
        ),
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(10, 22, scheme.title, 15, weight="bold"),
        text(right, 22, "what moves", 13, weight="bold"),
    ]
    for i, (title, down, across, *_) in enumerate(columns):
        x = LEFT + i * step_x
        parts.append(text(x + CELL[0] / 2, TOP - 20, title, 12, "middle", weight="bold"))
        words = f"{down} ↓  {across} →" if across else f"{down} ↓"
        parts.append(text(x + CELL[0] / 2, TOP - 6, words, 10, "middle", "#777"))
    for row, device in enumerate(devices):
        y = TOP + row * step_y
        parts.append(text(10, y + CELL[1] / 2 + 4, f"device {row}", 12))
        for i, (_, _, _, rows, cols, held) in enumerate(columns):
            parts.append(portion(LEFT + i * step_x, y, rows, cols, held[device], FILL[i]))
    for i, (when, kind, what) in enumerate(scheme.moves):
        y = TOP + 22 + 46 * i
        parts += [
            pattern(right + 4, y, kind),
            text(right + 104, y - 8, f"{when}: {kind}", 12, weight="bold"),
            text(right + 104, y + 8, what, 12),
        ]
    return "".join(parts) + "</svg>\n"


def main() -> None:
    """Writes every picture."""
    OUT.mkdir(exist_ok=True)
    for scheme in SCHEMES:
        (OUT / f"{scheme.name}.svg").write_text(draw(scheme), encoding="utf-8")
        print(OUT / f"{scheme.name}.svg")


if __name__ == "__main__":
    main()
