"""Measures a machine and words the figures, for `experiments.characterize`."""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import jax

from experiments.characterize import collectives
from experiments.characterize import rates as device_rates
from pallas_kernels.timing import Timing
from zaya_jax import cli
from zaya_jax import config as config_lib
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, Precision, UserError, fields, files, read_config
from zaya_jax.data import pipeline, prepared_store
from zaya_jax.data.order import VISIT_STEPS
from zaya_jax.hardware import chips, host, measured, sizing
from zaya_jax.hardware.measured import BUS, CollectiveTiming, Measured, Product
from zaya_jax.hardware.sizing import Advice
from zaya_jax.plan.phases import page_reads
from zaya_jax.report.document import Page, Section, Table
from zaya_jax.report.svg import Chart, Curve
from zaya_jax.report.text import duration, number, percent
from zaya_jax.text import tokenizers
from zaya_jax.text.shard_format import PAGE_BYTES, SUFFIX

HOST = (
    "These figures are of this host's CPU, whose virtual devices share its cores and memory. They"
    " say nothing of an accelerator, a network or a cluster."
)
READING_ROWS = (  # of the table of readings
    "tokens/s",
    f"page reads/s ({PAGE_BYTES} B)",
    "read calls/s",
    "bytes a read call",
    "sigma, pages asked for over pages of tokens",
    "read from the device, MiB",
    "measured over, s / M tokens",
)
# a size, the median rate there, the 10th and the 90th of 100
Point = tuple[float, float, float, float]


def run(args: argparse.Namespace) -> int:
    """Measures as the options ask."""
    if args.what == "storage":
        measure_storage(args)
        return cli.DONE
    host.keep_memory()
    return multihost.run_distributed(lambda: measure_devices(args))


def measure_devices(args: argparse.Namespace) -> int:
    """Measures in all processes, then writes NAME.json and .html into --out from the first."""
    writes, config, devices = multihost.is_writer(), read_config(args.config), jax.devices()
    if writes:
        cli.out_folder(args.out, "figures")
    first, nodes = devices[0], collectives.nodes_of(devices)
    chip = args.chip or chips.named(first.device_kind) or "mi300x"
    count = args.devices or (args.devices_on_cpu if first.platform == "cpu" else len(devices))
    sizing.advise(config, chip, count)  # a mesh that does not fit is refused now
    say = functools.partial(print, flush=True) if writes else lambda text: None
    say(
        f"{len(devices)} x {first.device_kind} in {max(nodes) + 1} node(s) of"
        f" {jax.process_count()} process(es)"
    )
    if first.platform == "cpu":
        say(f"note: {HOST}")
    figures, remarks = measure_parts(args, config, nodes, say)
    if writes:
        advice = sizing.advise(config, chip, count, figures)
        rules_for = f"{config.name} on {count:,} {chip}"
        page = document(figures, advice, rules_for, remarks).html()
        name = pathlib.Path(args.out) / args.what
        name.parent.mkdir(parents=True, exist_ok=True)
        files.write(name.with_suffix(".json"), measured.to_json(figures).encode())
        files.write(name.with_suffix(".html"), page.encode())
        if advice:
            say(f"sizing rules for {rules_for}:")
        else:
            say(f"no sizing rule is broken by {rules_for}")
        for line in (*advice, *map("note: {}".format, remarks)):
            say(str(line))
        say(f"written: {name}.json, .html")
    multihost.barrier("measured")
    return cli.DONE


def measure_parts(
    args: argparse.Namespace, config: Config, nodes: list[int], say: Callable[[str], None]
) -> tuple[Measured, list[str]]:
    """The figures asked for, and remarks on omissions. Products and memory are of the first device
    alone."""
    devices, lists, remarks = jax.devices(), dict[str, tuple](), []
    first, writes = devices[0], multihost.is_writer()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if "collectives" in args.parts:
        sharing = [device for device in devices if device.process_index == first.process_index]
        free = device_rates.room(first, len(sharing))
        room = multihost.broadcast_from_zero("room", lambda: free // collectives.SHARE)
        timings = collectives.measure_collectives(devices, nodes, room, args.seconds, say)
        lists["collectives"] = timings
        if not timings:
            remarks.append("no collectives: there is one device")
        elif first.platform == "cpu":
            remarks.append("broadcast is a sum with zeros: XLA has none for a CPU")
    if "memory" in args.parts and writes:
        lists["copies"] = device_rates.measure_copies(first, args.seconds, say)
    if "matmul" in args.parts and writes:
        products, left_out = device_rates.measure_products(first, config.model, args.seconds, say)
        lists["products"] = products
        if left_out:
            remarks.append(
                f"{left_out} products were left out: a call takes more than {3 * args.seconds:g} s"
                " (three times --seconds)"
            )
    figures = Measured(
        first.device_kind,
        first.platform,
        len(devices),
        max(nodes) + 1,
        jax.process_count(),
        jax.__version__,
        date,
        chips.peak_flops(first.device_kind, Precision(compute="bfloat16")),
        **lists,
    )
    return figures, remarks


def measure_storage(args: argparse.Namespace) -> None:
    """Measures, then writes storage.html and storage.json into --out."""
    out = cli.out_folder(args.out, "figures")
    fields.check_path("--data", args.data, addresses=True)
    if not prepared_store.is_prepared(args.data) or not prepared_store.is_local(args.data):
        raise UserError(
            f"--data={args.data} is not a local prepared directory; make one with"
            " experiments.prepare_data"
        )
    manifest = prepared_store.load_manifest(args.data)
    tokenizer = tokenizers.load(pathlib.Path(args.data) / "tokenizer")
    raw = config_lib.default()
    raw.data.path, raw.data.seq_len, raw.data.global_batch = args.data, args.seq_len, args.rows
    raw.model.max_position_embeddings = max(raw.model.max_position_embeddings, args.seq_len)
    raw.model.vocab_size = max(raw.model.vocab_size, tokenizer.vocab_size)
    config = config_lib.check(raw)
    readings = [measure_reading(config, tokenizer, args.seconds, cold) for cold in (True, False)]

    # A small directory's bundles come round again while they are still in memory, which a large
    # one's never do.
    sigma = max(readings[0].sigma, manifest["storage_factor"])
    tokens = args.global_batch * args.seq_len
    pages = page_reads(sigma, tokens, manifest["token_bytes"])
    budget, whose = readings[0].pages_per_second, "measured here, cold, one reader"
    if args.iops_budget:
        budget, whose = args.iops_budget, "given"
    step, share = args.step_seconds, pages / args.step_seconds / budget
    judged = "storage is not the limit"
    if share > 1:
        judged = "storage IS the limit: steps take the break-even time"
    verdict = (
        f"A step of {args.global_batch:,} sequences of {args.seq_len:,} tokens reads"
        f" {tokens * manifest['token_bytes'] / 2**20:,.1f} MiB of tokens in N = {pages:,.0f} pages"
        f" (sigma {sigma:.3f}); every {step:g} s that is {pages / step:,.0f} page reads/s. Budget"
        f" {budget:,.0f} page reads/s ({whose}): {share:.1%} of it, break-even step time"
        f" {pages / budget:.3f} s; {judged}."
    )
    run = Section("A run", verdict, pictures=_demand(pages, step, budget))
    words = Page("Storage", sections=[_reading_section(readings, manifest), run])
    figures = {
        "readings": [dataclasses.asdict(reading) for reading in readings],
        "sigma": sigma,
        "page_reads": pages,
        "budget": budget,
    }
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / "storage.html", words.html().encode())
    files.write(out / "storage.json", (json.dumps(figures, indent=1) + "\n").encode())
    print(words.markdown())
    print(f"written: {out}/storage.html, storage.json")


@dataclasses.dataclass(frozen=True)
class Reading:
    """One measurement of reading as training would."""

    cache: str  # cold or warm
    seconds: float
    tokens: int
    reads: int  # calls that read
    bytes_read: int  # by those calls
    bytes_device: int  # that came from the device, the kernel's own reading ahead included
    bytes_ideal: int  # of the tokens themselves

    @property
    def pages_per_second(self) -> float:
        """Page reads a second: the formula's I, as far as this machine was asked for it."""
        return self.bytes_read / PAGE_BYTES / self.seconds

    @property
    def sigma(self) -> float:
        """Pages asked for over pages that the tokens fill; each call touches one page more than it
        fills."""
        return (self.bytes_read / PAGE_BYTES + self.reads) / (self.bytes_ideal / PAGE_BYTES)


def measure_reading(
    config: Config, tokenizer: tokenizers.Tokenizer, seconds: float, cold: bool
) -> Reading:
    """Read batches for some seconds, each bundle from its file, after emptying or filling the page
    cache."""
    data = config.data
    # As in a large source: blocks of several bundles, and open ones stay in memory.
    batches = pipeline.Batches(config, tokenizer, rounds=1)
    (store,) = batches.prepared_stores
    store.cache.limit = 0
    for path in sorted(pathlib.Path(data.path).glob(f"*{SUFFIX}")):
        if cold:
            forget(path)
        else:
            path.read_bytes()
    epoch = batches.source(batches.eras[0], 0).layout.num_rows // data.global_batch
    turns = min(VISIT_STEPS, epoch)
    begin_step = 3 * epoch  # all blocks begin together: measure from the start of an epoch
    # opens shards, and the bundles of the moment
    for step in range(begin_step, begin_step + turns):
        batches[step]
    before, begin, tokens, step = io_counts(), time.perf_counter(), 0, begin_step + turns
    while time.perf_counter() - begin < seconds:
        if cold and step == begin_step + epoch:  # a second epoch is warm
            break
        tokens += batches[step]["tokens"].size
        step += 1
    elapsed = time.perf_counter() - begin
    if not tokens:
        raise UserError(
            f"{data.path} is smaller than two batches of {data.global_batch} x {data.seq_len}; ask"
            " for less"
        )
    after = io_counts()
    return Reading(
        "cold" if cold else "warm",
        elapsed,
        tokens,
        reads=after["syscr"] - before["syscr"],
        bytes_read=after["rchar"] - before["rchar"],
        bytes_device=after["read_bytes"] - before["read_bytes"],
        bytes_ideal=tokens * store.manifest["token_bytes"],
    )


def forget(path: pathlib.Path) -> None:
    """Ask the kernel to drop a file's pages from its cache; written pages go to disk first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def io_counts() -> dict[str, int]:
    """What this process has read, as the kernel counts it."""
    counts = {}
    for line in pathlib.Path("/proc/self/io").read_text().splitlines():
        name, value = line.split(": ")
        counts[name] = int(value)
    return counts


def _reading_section(readings: list[Reading], manifest: dict) -> Section:
    """The measurements by the state of the page cache."""
    head = ["", *(f"{reading.cache} page cache" for reading in readings)]
    columns = [
        [
            f"{reading.tokens / reading.seconds:,.0f}",
            f"{reading.pages_per_second:,.0f}",
            f"{reading.reads / reading.seconds:,.0f}",
            f"{reading.bytes_read / max(reading.reads, 1):,.0f}",
            f"{reading.sigma:.3f}",
            f"{reading.bytes_device / 2**20:,.1f}",
            f"{reading.seconds:.2f} / {reading.tokens / 1e6:.1f}",
        ]
        for reading in readings
    ]
    rows = list(zip(READING_ROWS, *columns, strict=True))
    notes = [
        f"Sigma of the files' layout, all bundles once: {manifest['storage_factor']:.3f};"
        f" {manifest['token_bytes']} bytes per token."
    ]
    if readings[0].bytes_device < readings[0].bytes_read / 2:
        notes.append(
            "The device gave less than half of the cold reading: this system would not empty its"
            " page cache."
        )
    return Section("Reading", "", [Table("By the state of the page cache", head, rows)], notes)


def _demand(pages: float, step: float, budget: float) -> str:
    """Page reads a second by the time of a step."""
    times = [step * 2 ** (i / 4 - 4) for i in range(33)]
    lines = [
        Curve("needed", [(seconds, pages / seconds) for seconds in times]),
        Curve("this step", [(step, pages / step)], 2),
        Curve("budget", [(times[0], budget), (times[-1], budget)], 1, dashed=True),
    ]
    named = [(seconds, f"{seconds:.3g}") for seconds in times[::4]]
    title = "Page reads a second by step time"
    return Chart(title, lines, log_x=True, over="s", named=named).draw()


def document(
    figures: Measured, advice: Sequence[Advice], rules_for: str, remarks: Sequence[str] = ()
) -> Page:
    """The page of figures; `rules_for` says for which model, chip and number of devices the sizing
    rules are."""
    nodes = "one node" if figures.num_nodes == 1 else f"{figures.num_nodes} nodes"
    processes = "" if figures.num_processes == 1 else f" · {figures.num_processes} processes"
    about = (
        f"{figures.num_devices} x {figures.device} in {nodes}{processes} · jax {figures.jax} ·"
        f" {figures.date}"
    )
    warnings = [HOST] if figures.platform == "cpu" else []
    if figures.num_nodes == 1 and figures.collectives:
        warnings.append("All devices are in one node: nothing was measured across nodes.")
    sections = [
        _rules(advice, rules_for),
        _collectives(figures),
        _products(figures),
        _memory(figures),
    ]
    footer = (
        "Lines are medians, bands the 10th to 90th of 100 samples. docs/hardware.md says how it was"
        " measured."
    )
    return Page(
        figures.device, "measured figures", about, sections, (), [*warnings, *remarks], footer
    )


def _rules(advice: Sequence[Advice], rules_for: str) -> Section:
    text = f"Dimensions off the fast path: {rules_for}."
    if not advice:
        return Section("Sizing rules", text, notes=["None."])
    head = ("rule", "key", "reason", "better", "by")
    rows = [
        [
            found.rule,
            f"{found.key}={found.value:,}",
            found.reason,
            f"{found.better:,}" if found.better else "–",
            found.source,
        ]
        for found in advice
    ]
    return Section("Sizing rules", text, [Table("Advice", head, rows, "code")])


def _collectives(figures: Measured) -> Section:
    if not figures.collectives:
        return Section("Collectives")
    pictures, rows = "", []
    sets = sorted({(c.num_nodes, c.num_devices) for c in figures.collectives})
    for name in BUS:
        lines = []
        whole = figures.best(name, figures.node, 1)
        for color, (nodes, count) in enumerate(sets):
            points = figures.series(name, count, nodes)
            if not points:
                continue
            devices, size = _devices(points[0]), binary_size(measured.bytes_near_best(points) or 0)
            rates = [_point(c.bytes, c.bus_bandwidth / 1e9, c.seconds) for c in points]
            lines.append(_line(devices, color, rates))
            best = max(points, key=lambda c: c.bus_bandwidth)
            rows.append(
                [
                    name,
                    devices,
                    duration(points[0].seconds.median),
                    number(best.bus_bandwidth / 1e9),
                    binary_size(best.bytes),
                    size,
                    f"{best.bus_bandwidth / whole:.0%}" if whole and nodes == 1 else "",
                ]
            )
        pictures += _chart(f"{name}, bus bandwidth", lines, "GB/s", binary_size)
    head = (
        "collective",
        "devices",
        f"{figures.collectives[0].bytes:,} B take",
        "best bus GB/s",
        "there",
        "90% from",
        "of the whole node's",
    )
    text = "Over the size of the message, by the definitions of nccl-tests."
    return Section("Collectives", text, [Table("Best rates", head, rows)], pictures=pictures)


def _devices(c: CollectiveTiming) -> str:
    over = f" over {c.num_nodes} nodes" if c.num_nodes > 1 else ""
    return f"{c.num_devices} devices{over}"


def _products(figures: Measured) -> Section:
    if not figures.products:
        return Section("Matrix products")

    dense = [product for product in figures.products if product.groups == 1]
    grouped = [product for product in figures.products if product.groups > 1]
    whole = "{:,.0f}".format
    pictures = _chart("Dense products over rows M", _over_rows(dense, "label"), "TFLOP/s", whole)
    knee = figures.rows_knee()
    note = f"Knee of the forward pass, at 80% of the best seen: {knee:,} tokens." if knee else ""
    title = "Experts: over tokens an expert"
    pictures += _chart(title, _over_rows(grouped, "name"), "TFLOP/s", whole, note)
    head = ("product", "M", "K", "N", "experts", "a call", "TFLOP/s", "of the peak")
    rows = [
        [
            f"{product.label} ({product.name}, {product.dtype})",
            f"{product.m:,}",
            f"{product.k:,}",
            f"{product.n:,}",
            f"{product.groups}",
            duration(product.seconds.median),
            number(product.rate / 1e12),
            percent(product.rate / (figures.peak or math.nan)),
        ]
        for product in (*dense, *grouped)
    ]
    text = "On one device, the model's own shapes; M are the tokens at once."
    return Section("Matrix products", text, [Table("Rates", head, rows)], pictures=pictures)


def _over_rows(products: Sequence[Product], key: str) -> list[Curve]:
    """Rates over the number of rows, a curve for each value of `key`."""
    points: dict[str, list[Point]] = {}
    for product in sorted(products, key=lambda product: product.m):
        point = _point(product.m, product.rate / 1e12, product.seconds)
        points.setdefault(getattr(product, key), []).append(point)
    return [_line(label, color, line) for color, (label, line) in enumerate(points.items())]


def _memory(figures: Measured) -> Section:
    if not figures.copies:
        return Section("Memory")
    points = sorted(figures.copies, key=lambda copy: copy.bytes)
    line = _line("copy", 0, [_point(c.bytes, c.bandwidth / 1e9, c.seconds) for c in points])
    picture = _chart("Bandwidth over the size of an array", [line], "GB/s", binary_size)
    best = max(points, key=lambda copy: copy.bandwidth)
    text = (
        "Copying on one device; bytes read and bytes written count alike. The best,"
        f" {number(best.bandwidth / 1e9)} GB/s, is that of {binary_size(best.bytes)}."
    )
    return Section("Memory", text, pictures=picture)


def binary_size(count: float) -> str:
    """2 GiB, 16 KiB or 12 B: sizes that were measured are powers of two."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.4g} {unit}"
    return f"{count:g} B"


def _point(size: float, median: float, seconds: Timing) -> Point:
    work = median * seconds.median
    return size, median, work / seconds.high, work / seconds.low


def _line(label: str, color: int, points: Sequence[Point]) -> Curve:
    band = [(size, low, high) for size, _, low, high in points]
    return Curve(label, [(size, median) for size, median, *_ in points], color, band=band)


def _chart(
    title: str, lines: Sequence[Curve], unit: str, text: Callable[[float], str], note: str = ""
) -> str:
    """Rates over a size, whose axis is logarithmic."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    sizes = sorted({size for line in lines for size, _ in line.points})
    return Chart(
        f"{title}, {unit}",
        lines,
        log_x=True,
        over="size",
        named=[(size, text(size)) for size in sizes],
        note=note,
    ).draw()
