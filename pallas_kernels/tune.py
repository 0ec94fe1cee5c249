"""Finds the tiles of this machine's card, for each kernel as a training step runs it.

    python -m pallas_kernels.tune [--config=FILE] [--operators NAME ...] [--seconds=90]

Sizes are those of a device in the phase of the config that most tokens are of; by default
zaya1_base's. Children try (`trying`), so a compiler that crashes, a fault of the GPU or a kernel
that never ends costs that tile's place and no more. An operator's kernels are taken if they are
right in all cases and faster than XLA's; a case that was not reached decides nothing.

Printed are the gains over the tiles that ship. Runs on this machine take what was found by
themselves, from ~/.cache/zaya_jax/tiles.json, as long as card, driver, JAX and the kernels' source
stay the same.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels import chip, table, trying
from pallas_kernels.chip import Chip
from pallas_kernels.trying import BEST, SHIPPED, XLA, Row

SECONDS = 90.0  # after which no further tile is begun
EACH = 60.0  # between two signs of life of a child: a compiler may take that long
START = 180.0  # of a child's start
GAIN = 1.03  # by which our kernels must be faster than XLA's
PROGRAM = ("pallas_kernels.trying",)
NAMES = ("operator", "case", "name")


def measure(
    request: Callable[[int], dict[str, Any]],
    program: Sequence[str] = PROGRAM,
    pretend: Chip | None = None,
    seconds: float = SECONDS,
    each: float = EACH,
) -> tuple[Chip, str, dict[str, Any], list[Row]]:
    """The card, its name, what was asked (`request(number of devices)`), and what became of each
    implementation. RuntimeError without a GPU. For tests: other programs, a card to pretend."""
    about = next(_answers(program, None, START))
    if isinstance(about, str):
        raise RuntimeError(f"the process that tries {about}")
    card = pretend or Chip(about["platform"], about["kind"])
    if card.maker not in ("cuda", "rocm"):
        raise RuntimeError("no GPU is here; python -m benchmarks.kernels interprets kernels")
    asked = json.loads(json.dumps(request(about["devices"])))
    rows: list[Row] = []
    until, alone = time.monotonic() + seconds, False
    while True:
        before, begun = len(rows), ["", "", ""]
        told = {"asked": asked, "rows": rows, "seconds": until - time.monotonic(), "alone": alone}
        for answer in _answers(program, told | {"as": pretend and list(pretend[:2])}, each):
            if isinstance(answer, str):
                fault = answer
            elif answer.get("end"):
                return card, about["name"], asked, rows
            elif "row" in answer:
                rows.append(answer["row"])
            begun = answer.get("begin", begun) if isinstance(answer, dict) else begun
        if begun[2] and not (rows and [rows[-1][n] for n in NAMES] == begun):
            rows.append(dict(zip(NAMES, begun, strict=True)) | {"fault": fault})
        if alone and len(rows) == before:
            raise RuntimeError(f"the process that tries {fault}")
        alone = True  # so that the next child says what it was that took this one


def _answers(
    program: Sequence[str], request: dict | None, each: float
) -> Iterator[dict[str, Any] | str]:
    """What a child answers, line by line; at last, in words, why it ended. It ends with the loop
    over this."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    lines: queue.Queue[str] = queue.Queue()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | ours,
            start_new_session=True,
        ) as process,
    ):

        def read() -> None:
            for line in process.stdout or ():
                lines.put(line)
            lines.put("")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            with contextlib.suppress(OSError):
                print(json.dumps(request), file=process.stdin, flush=True)
            line = lines.get(timeout=START)  # from a slow disk
            while line:
                yield json.loads(line)
                line = lines.get(timeout=each)
            code = process.wait()
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            errors.seek(0)
            last = errors.read().strip().rpartition("\n")[2][:160]
            yield f"ended the process ({name})" + (f": {last}" if last else "")
        except queue.Empty:
            yield f"did not end within {each:.0f} s"
        finally:  # with all that it started
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            # Closing flushes a request that a child has not read, which is no error of ours.
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            # It must be at the end of its input before that is closed.
            reader.join(START)


def make_record(
    card: Chip,
    name: str,
    asked: dict[str, Any],
    rows: Sequence[Row],
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What runs take of the rows, for `table.write_measured`, with all rows for its readers.
    Operators that were not tried, or not to their end, stay as in the `earlier` record, or as they
    ship."""
    kernels, tiles = list[str](), dict[str, Any]()
    date = time.strftime("%Y-%m-%d")
    before: dict[str, Any] = {"kernels": chip.OPERATORS * table.has(card.architecture), "tiles": {}}
    before = earlier or before
    for operator in chip.OPERATORS:
        times, best = verdict(asked, operator, rows)
        if not times:
            kernels += [operator] * (operator in before["kernels"])
            begin = table.BEGIN[operator]
            tiles |= {k: row for k, row in before["tiles"].items() if k.startswith(begin)}
        elif best != XLA:
            kernels.append(operator)
            chosen = trying.shipped_tiles(asked, operator, card)
            if best == BEST:
                chosen |= trying.best_of_each(rows, trying.request_cases(asked, operator))
            about = {"source": "measured", "chip": name, "date": date, "jax": version("jax")}
            ms = round(1e3 * times[best], 4)
            tiles |= {kernel: {"tile": tile, **about, "ms": ms} for kernel, tile in chosen.items()}
    record = {"key": table.key(card.kind), "name": name, "date": date, "asked": asked}
    return record | {"kernels": kernels, "tiles": tiles, "rows": list(rows)}


def verdict(
    asked: dict[str, Any], operator: str, rows: Sequence[Row]
) -> tuple[dict[str, float], str]:
    """The seconds of XLA's, the shipped and the best tiles, where they are right in all cases; and
    which of these a run takes. No seconds: the cases were not all tried."""
    if operator not in asked["operators"]:
        return {}, XLA
    needed = trying.request_cases(asked, operator)
    of = {(row["operator"], row["case"], row["name"]): row for row in rows}
    reached = all((*case.name, name) in of for case in needed for name in (XLA, SHIPPED))
    faulty = any("fault" in of.get((*case.name, SHIPPED), {}) for case in needed)
    if not reached and not faulty:
        return {}, XLA
    right = trying.total_seconds(rows, needed)
    times = {name: right[name] for name in (XLA, SHIPPED, BEST) if name in right}
    ours = min((name for name in times if name != XLA), key=times.__getitem__, default=XLA)
    slowest = times.get(XLA, np.inf) / GAIN
    return times or {XLA: np.inf}, ours if times.get(ours, np.inf) <= slowest else XLA


def describe(asked: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """A line for each operator: what a run takes, and its gains."""
    lines = []
    for operator in asked["operators"]:
        times, best = verdict(asked, operator, rows)
        faults = [
            f"{row['name']}, {row['case']}: {row['fault']}"
            for row in rows
            if row["operator"] == operator
            and "fault" in row
            and row["name"] in (XLA, SHIPPED, BEST)
        ]
        if not times:
            line = "not tried to its end: as it ships"
        elif best == XLA:
            ours = min((t for name, t in times.items() if name != XLA), default=np.inf)
            gain = times.get(XLA, np.inf) / ours
            line = f"XLA's (ours is {gain:.2g}x as fast)" if gain < np.inf and gain else "XLA's"
        else:
            of_xla = f"{times[XLA] / times[best]:.2f}x XLA's" if XLA in times else "XLA's failed"
            of_shipped = times.get(SHIPPED, np.inf) / times[best]
            line = f"{1e3 * times[best]:.3f} ms, {of_xla}, {of_shipped:.2f}x what ships"
            if best == BEST:
                tiles = trying.best_of_each(rows, trying.request_cases(asked, operator))
                line += "".join(
                    f"\n  {kernel}: {' '.join(f'{n} {size}' for n, size in tile.items())}"
                    for kernel, tile in tiles.items()
                )
        lines.append(f"{operator}: {line}" + "".join(f"\n  {fault}" for fault in faults))
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the gains, and writes what runs take."""
    from zaya_jax import cli
    from zaya_jax.config import read_config
    from zaya_jax.training import kernels

    parser = cli.Parser(prog="python -m pallas_kernels.tune", description=__doc__)
    add = parser.add_argument
    config = Path(__file__).parents[1] / "experiments" / "configs" / "zaya1_base.py"
    add("--config", default=str(config), metavar="FILE", help="the run's config; zaya1_base")
    add("--operators", nargs="+", choices=chip.OPERATORS, help="these alone")
    add(
        "--seconds", type=cli.number(float, 1), default=SECONDS, metavar="X", help="time to try; 90"
    )
    options = parser.parse_args(arguments)
    run_config = read_config(options.config)

    def request(devices: int) -> dict[str, Any]:
        asked = kernels.tuning_request(run_config, devices)
        wanted = options.operators or asked["operators"]
        for name in sorted({*wanted} - {*asked["operators"]}):
            print(f"note: {name} is not tried: a step of this config does not have it", flush=True)
        return asked | {"operators": [name for name in asked["operators"] if name in wanted]}

    try:
        card, name, asked, rows = measure(request, seconds=options.seconds)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.BAD_INPUT
    earlier, _ = table.read_measured(card.kind)
    record = make_record(card, name, asked, rows, earlier)
    print("\n".join([f"{name}:", *describe(asked, rows)]))
    try:
        table.write_measured(card.kind, record)
    except OSError as error:
        print(
            f"error: {table.measured_file()} cannot be written ({error.strerror}); set"
            " XDG_CACHE_HOME to a folder that can",
            file=sys.stderr,
        )
        return cli.BAD_INPUT
    print(
        f"written: {table.measured_file()}; runs on this machine take it from now on.\nTo let it ship"
        " for everyone, send this file: it has the card's name, versions, sizes and times, and no"
        " paths."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
