"""What a machine can do, measured, and what follows from it for a run.

    python -m experiments.characterize collectives|matmul|memory --out=DIR [--config=FILE] [--chip=NAME] [--devices=N]
    python -m experiments.characterize storage --data=DIR --out=DIR [--iops_budget=70000]
    python -m experiments.characterize all --out=DIR [--data=DIR]

`collectives` sends messages of 1 KiB to GiBs over every power of two of the devices, in a node and across; `matmul` and
`memory` measure one device. Each writes DIR/NAME.json, .csv and .html: figures, and the sizing rules that they give for
the config's model; docs/hardware.md says how to read them. Several processes measure as one, started as pretrain is.

`storage` reads a prepared directory as training would, with a cold and with a warm page cache, and says what
the storage behind a run must give: by default for ZAYA1's batch of 4096 sequences of 4096 tokens every 2.5
seconds.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from zaya_jax import cli
from zaya_jax import config as config_lib
from zaya_jax.checkpoint import writing
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, Precision, UserError, fields, files
from zaya_jax.data import sizing, storage
from zaya_jax.data.tokens import PAGE_BYTES
from zaya_jax.hardware import chips, host, sizing_rules
from zaya_jax.hardware.measure import collectives, figures, memory, products
from zaya_jax.report import hardware as page

COLORS = {"cold": "#3b6fb6", "warm": "#d08b2c"}
CONFIG = str(pathlib.Path(__file__).parent / "configs" / "zaya1_base.py")
DEVICES = 1024  # ZAYA1's, where only a CPU is here
PARTS = {
    "collectives": "what travels between devices: seconds and bandwidth over size and devices",
    "matmul": "matrix products: rates over M, N and K, the model's shapes, tokens an expert",
    "memory": "a device's memory: bandwidth of copying, reading, writing and adding over size",
}


def main() -> int:
    """Runs the measurement that the first argument names."""
    parser = cli.Parser(prog="python -m experiments.characterize", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True, metavar="|".join((*PARTS, "storage", "all")))
    for name, about in (*PARTS.items(), ("all", "all of these; storage where --data is given")):
        add = what.add_parser(name, help=about, description=f"{about}; see docs/hardware.md").add_argument
        add("--out", required=True, metavar="DIR", help=f"folder for {name}.json, .csv and .html")
        add("--config", default=CONFIG, metavar="FILE", help="whose model and batch are sized; zaya1_base")
        add("--chip", choices=sizing_rules.CHIPS, help="for which the rules are; this one, on a CPU mi300x")
        # fmt: off
        add("--devices", type=cli.number(int, 1, 2**24), metavar="N", help=f"of the run; these, on a CPU {DEVICES}")
        add("--seconds", type=cli.number(float, 0.001), default=0.1, metavar="X", help="longest time per size; 0.1")
        # fmt: on
        if name == "all":
            add("--data", metavar="DIR", help="prepared directory for storage, which is left out without one")
    storage_options(
        what.add_parser("storage", help="what a run's data ask of a storage, and what this one gives")
    )
    args = parser.parse_args()
    reading = args if args.what == "storage" else None
    if args.what == "all" and args.data is not None:
        its_options = cli.Parser()
        storage_options(its_options)
        reading = its_options.parse_args([f"--data={args.data}", f"--out={args.out}"])
    if args.what != "storage":
        host.keep_memory()
    return multihost.together(lambda: measure(args, reading))


def measure(args: argparse.Namespace, reading: argparse.Namespace | None) -> int:
    """What the options ask for. Of several processes the first reads and writes files, and looks whether it can."""
    require_same(vars(args))
    if multihost.is_writer():
        cli.out_folder(args.out, "figures")
        if reading is not None:
            check_storage(reading)
    if args.what != "storage":
        measure_devices(args, cli.read_config(args.config), reading)
    elif multihost.is_writer():
        measure_storage(args)
    multihost.barrier("measured")
    return cli.DONE


def require_same(options: dict[str, Any]) -> None:
    """UserError where processes were started with other options than the first: they would wait for each other."""
    for index, given in enumerate(multihost.to_first("options", options) or []):
        for name, value in given.items():
            if value != options.get(name):
                raise UserError(
                    f"process {index} was started with {name}={value}, process 0 with {options.get(name)}; "
                    "start all of them alike"
                )


def measure_devices(args: argparse.Namespace, config: Config, reading: argparse.Namespace | None) -> None:
    """Measures in all processes, then writes NAME.json, .csv and .html into --out from the first."""
    devices = jax.devices()
    first, nodes, host_only = devices[0], collectives.nodes_of(devices), devices[0].platform == "cpu"
    chip = args.chip or sizing_rules.chip_named(first.device_kind) or "mi300x"
    count = args.devices or (DEVICES if host_only else len(devices))
    sizing_rules.findings(config, chip, count)  # a mesh that does not fit is refused now
    writes = multihost.is_writer()
    with made(pathlib.Path(args.out)) if writes else contextlib.nullcontext():
        say = functools.partial(print, flush=True) if writes else lambda text: None
        say(
            f"{len(devices)} x {first.device_kind} in {max(nodes) + 1} node(s) of {jax.process_count()} process(es)"
        )
        if host_only:
            say(f"note: {page.HOST}")
        found, remarks = measure_parts(args, config, nodes, say)
        if args.what == "all" and reading is None:
            remarks.append("storage was left out: it needs --data=DIR")
        if writes:
            findings = sizing_rules.findings(config, chip, count, found)
            rules_for = f"{config.name} on {count:,} {chip}"
            name = pathlib.Path(args.out) / args.what
            files.write(name.with_suffix(".json"), figures.to_json(found).encode())
            files.write(name.with_suffix(".csv"), figures.to_csv(found).encode())
            files.write(name.with_suffix(".html"), page.render(found, findings, rules_for, remarks).encode())
            say(f"sizing rules for {rules_for}:" if findings else f"no sizing rule is broken by {rules_for}")
            for line in (*findings, *(f"note: {remark}" for remark in remarks)):
                say(str(line))
            say(f"written: {name}.json, .csv, .html")
            if reading is not None:
                measure_storage(reading)


def measure_parts(
    args: argparse.Namespace, config: Config, nodes: list[int], say: Callable[[str], None]
) -> tuple[figures.Figures, list[str]]:
    """What was asked for, and remarks on what was left out. Products and memory are of the first device alone."""
    devices, remarks = jax.devices(), []
    first, wanted = devices[0], tuple(PARTS) if args.what == "all" else (args.what,)
    found = figures.Figures(
        first.device_kind, first.platform, len(devices), max(nodes) + 1, jax.process_count(), jax.__version__,
        figures.now(), chips.peak_flops(first, Precision(compute="bfloat16")),
    )  # fmt: skip
    if "collectives" in wanted:
        room = memory.room(first, sum(d.process_index == first.process_index for d in devices))
        room = multihost.from_first("room", lambda: room // collectives.SHARE)
        found = dataclasses.replace(
            found,
            collectives=collectives.measure(devices, nodes, room, args.seconds, say),
            start_seconds=collectives.start_seconds(devices, args.seconds),
        )
        if not found.collectives:
            remarks.append("no collectives: there is one device")
    if not multihost.is_writer():
        return found, remarks
    if "memory" in wanted:
        found = dataclasses.replace(found, streams=memory.measure(first, args.seconds, say))
    if "matmul" in wanted:
        measured, left_out = products.measure(first, config.model, args.seconds, say)
        found = dataclasses.replace(found, products=measured)
        if left_out:
            remarks.append(
                f"{left_out} products were left out: a call takes more than {3 * args.seconds:g} s (three times "
                "--seconds), or memory does not hold it"
            )
    return found, remarks


def storage_options(parser: argparse.ArgumentParser) -> None:
    """The options of `storage`."""
    add = parser.add_argument
    # fmt: off
    add("--data", required=True, metavar="DIR", help="prepared directory to read")
    add("--out", required=True, metavar="DIR", help="directory for the table, the picture and the figures")
    add(
        "--iops_budget", type=cli.number(float, 0), default=0.0, metavar="X",
        help="page reads per second that the cluster's storage gives; 0, the default: as measured",
    )
    add("--seconds", type=cli.number(float, 0.1), default=5.0, metavar="X", help="longest time per measurement; 5")
    add(
        "--rows", type=cli.number(int, 1, 2**24), default=16, metavar="N",
        help="rows of a batch while measuring, a process's share of the global batch; 16",
    )
    add("--seq_len", type=cli.number(int, 1, 2**27), default=4096, metavar="N", help="context of the run; 4096")
    add(
        "--global_batch", type=cli.number(int, 1, 2**24), default=4096, metavar="N",
        help="sequences per step of the run; 4096",
    )
    add("--step_seconds", type=cli.number(float, 1e-6), default=2.5, metavar="X", help="step time of the run; 2.5")
    # fmt: on


def check_storage(args: argparse.Namespace) -> None:
    """UserError where the directory that `storage` reads will not do."""
    fields.check_path("--data", args.data)
    if not storage.is_prepared(args.data) or not storage.is_local(args.data):
        raise UserError(
            f"--data={args.data} is not a local prepared directory; make one with experiments.prepare_data"
        )


def measure_storage(args: argparse.Namespace) -> None:
    """Measures, then writes storage.md, storage.svg and storage.json into --out."""
    out = pathlib.Path(args.out)
    manifest = storage.load_manifest(args.data)
    raw = config_lib.default()
    raw.data.seq_len, raw.data.global_batch = args.seq_len, args.rows
    raw.model.max_position_embeddings = max(raw.model.max_position_embeddings, args.seq_len)
    config = config_lib.check(raw)
    readings = [sizing.measure(config, args.data, args.seconds, cold) for cold in (True, False)]

    # A small directory's bundles come round again while they are still in memory, which a large one's never do.
    sigma = max(readings[0].sigma, manifest["storage_factor"])
    need = sizing.Need(sigma, args.global_batch, args.seq_len, manifest["token_bytes"], args.step_seconds)
    budget = args.iops_budget or readings[0].pages_per_second
    whose = "given" if args.iops_budget else "measured here, cold, one reader"
    text = table(readings, manifest) + "\n" + verdict(need, budget, whose)
    measured = {
        "readings": [dataclasses.asdict(r) for r in readings],
        "need": dataclasses.asdict(need),
        "budget": budget,
    }
    with made(out):
        files.write(out / "storage.md", text.encode())
        files.write(out / "storage.svg", picture(need, budget).encode())
        files.write(out / "storage.json", (json.dumps(measured, indent=1) + "\n").encode())
    print(text)
    print(f"written: {out}/storage.md, storage.svg, storage.json")


@contextlib.contextmanager
def made(out: pathlib.Path) -> Iterator[None]:
    """The folder, for what is written inside; UserError where nothing can be, before anything is measured."""
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        writing.remove_empty(new)
        raise UserError(f"--out={out} cannot be written ({error.strerror}); give a folder that can") from None
    try:
        yield
    finally:
        writing.remove_empty(new)  # after an error


def table(readings: list[sizing.Reading], manifest: dict) -> str:
    """The measurements as Markdown, one column for each state of the page cache."""
    rows = {
        "tokens/s": [f"{r.tokens_per_second:,.0f}" for r in readings],
        f"page reads/s ({PAGE_BYTES} B)": [f"{r.pages_per_second:,.0f}" for r in readings],
        "read calls/s": [f"{r.reads_per_second:,.0f}" for r in readings],
        "bytes a read call": [f"{r.bytes_read / max(r.reads, 1):,.0f}" for r in readings],
        "sigma, pages asked for over pages of tokens": [f"{r.sigma:.3f}" for r in readings],
        "read from the device, MiB": [f"{r.bytes_device / 2**20:,.1f}" for r in readings],
        "page faults, minor / major": [f"{r.minor_faults:,} / {r.major_faults:,}" for r in readings],
        "measured over, s / M tokens": [f"{r.seconds:.2f} / {r.tokens / 1e6:.1f}" for r in readings],
    }
    head = (
        "| | " + " | ".join(f"{r.cache} page cache" for r in readings) + " |\n|---|" + "---|" * len(readings)
    )
    body = "\n".join(f"| {name} | {' | '.join(values)} |" for name, values in rows.items())
    layout = f"sigma of the files' layout, all bundles once: {manifest['storage_factor']:.3f}"
    note = ""
    if readings[0].bytes_device < readings[0].bytes_read / 2:
        note = "The device gave less than half of the cold reading: this system would not empty its page cache.\n"
    return f"{head}\n{body}\n\n{layout}; {manifest['token_bytes']} bytes per token\n{note}"


def verdict(need: sizing.Need, budget: float, whose: str) -> str:
    """What the formula says of the run that is sized."""
    share = need.pages_per_second / budget
    even = need.break_even_seconds(budget)
    judged = (
        "storage is not the limit" if share <= 1 else "storage IS the limit: steps take the break-even time"
    )
    return (
        f"A step of {need.global_batch:,} sequences of {need.seq_len:,} tokens reads "
        f"{need.pages * PAGE_BYTES / need.sigma / 2**20:,.1f} MiB of tokens in "
        f"N = {need.pages:,.0f} pages (sigma {need.sigma:.3f}); "
        f"every {need.step_seconds:g} s that is {need.pages_per_second:,.0f} page reads/s.\n"
        f"Budget {budget:,.0f} page reads/s ({whose}): {share:.1%} of it, break-even step time "
        f"{even:.3f} s; {judged}.\n"
    )


def picture(need: sizing.Need, budget: float) -> str:
    """Needed page reads a second over the step time, the budget across it, the run's own step marked."""
    width, height, left, top, right, bottom = 640, 360, 80, 44, 24, 52
    times = [need.step_seconds * 2 ** (i / 4 - 4) for i in range(33)]
    values = [need.pages / t for t in times]
    low, high = min([*values, budget]) / 1.5, max([*values, budget]) * 1.5

    def x(t: float) -> float:
        return left + (width - left - right) * _log_share(t, times[0], times[-1])

    def y(v: float) -> float:
        return height - bottom - (height - top - bottom) * _log_share(v, low, high)

    curve = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in zip(times, values, strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">Page reads a second that training needs, by step time</text>',
    ]
    for i in range(7):
        t = times[0] * (times[-1] / times[0]) ** (i / 6)
        v = low * (high / low) ** (i / 6)
        parts += [
            f'<line x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{top}" y2="{height - bottom}" stroke="#e5e5e5"/>',
            f'<text x="{x(t):.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#555">{t:.3g}</text>',
            f'<line x1="{left}" x2="{width - right}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#e5e5e5"/>',
            f'<text x="{left - 8}" y="{y(v) + 4:.1f}" text-anchor="end" fill="#555">{v:,.0f}</text>',
        ]
    at_x, at_y = x(need.step_seconds), y(need.pages_per_second)
    parts += [
        f'<text x="{(left + width - right) / 2}" y="{height - 12}" text-anchor="middle" fill="#555">'
        "step time, s</text>",
        f'<line x1="{left}" x2="{width - right}" y1="{y(budget):.1f}" y2="{y(budget):.1f}" stroke="{COLORS["warm"]}" '
        'stroke-width="2" stroke-dasharray="6 4"/>',
        f'<text x="{width - right - 4}" y="{y(budget) - 6:.1f}" text-anchor="end" fill="{COLORS["warm"]}">'
        f"budget {budget:,.0f}</text>",
        f'<polyline points="{curve}" fill="none" stroke="{COLORS["cold"]}" stroke-width="2"/>',
        f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{COLORS["cold"]}"/>',
        f'<text x="{at_x + 9:.1f}" y="{at_y - 7:.1f}" fill="{COLORS["cold"]}">{need.step_seconds:g} s: '
        f"{need.pages_per_second:,.0f}</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _log_share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
