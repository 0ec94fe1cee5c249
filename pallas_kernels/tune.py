"""Finds the tiles of this machine's card, for each kernel as a training step runs it.

    python -m pallas_kernels.tune [--config=FILE] [--operators NAME ...] [--seconds=90]

Sizes are those of a device in the phase of the config that most tokens are of; by default
zaya1_base's. Children try (`trying`), so a compiler that crashes, a fault of the GPU or a kernel
that never ends costs that tile's place and no more. An operator's kernels are taken if they are
right in all cases and faster than XLA's; a case that was not reached decides nothing.

Printed are the times of XLA's, of the tiles that ship, and of the best of each, with the gain over
what ships. Each operator is printed and written when it is done, so that an end before the last one
leaves the others. Runs on this machine take what was found by themselves, from
~/.cache/zaya_jax/tiles.json, as long as card, driver, JAX and the kernels' source stay the same.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels import candidates, chip, table, trying
from pallas_kernels.chip import Chip
from pallas_kernels.trying import BEST, SHIPPED, XLA, Row

SECONDS = 90.0  # after which no further tile is begun
POLL = 0.2  # between two looks at what a child has said
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
    found: Callable[[Chip, str, dict[str, Any], list[Row], str], None] = lambda *_: None,
) -> tuple[Chip, str, dict[str, Any], list[Row]]:
    """The card, its name, what was asked (`request(number of devices)`), and what became of each
    implementation, which `found` is given after each operator, with its name. RuntimeError without
    a GPU. For tests: other programs, a card to pretend."""
    *answers, last = _answers(program, None, START)
    if not answers:
        raise RuntimeError(f"the process that tries {last['fault']}")
    about = answers[0]
    card = pretend or Chip(about["platform"], about["kind"])
    if card.maker not in ("cuda", "rocm"):
        raise RuntimeError("no GPU is here; python -m benchmarks.kernels interprets kernels")
    asked = json.loads(json.dumps(request(about["devices"]) | {"memory": about["memory"]}))
    rows: list[Row] = []
    until, alone = time.monotonic() + seconds, False
    while True:
        before, begun, ended = len(rows), ["", "", ""], False
        told = {"asked": asked, "rows": rows, "seconds": until - time.monotonic(), "alone": alone}
        for answer in _answers(program, told | {"as": pretend and list(pretend[:2])}, each):
            if "row" in answer:
                rows.append(answer["row"])
            if "done" in answer:
                found(card, about["name"], asked, rows, answer["done"])
            begun = answer.get("begin", begun)
            last = answer
            ended = ended or "end" in answer
        if ended:
            return card, about["name"], asked, rows
        if begun[2] and not (rows and [rows[-1][n] for n in NAMES] == begun):
            rows.append(dict(zip(NAMES, begun, strict=True)) | last)
        if alone and len(rows) == before:
            raise RuntimeError(f"the process that tries {last['fault']}")
        alone = True  # so that the next child says what it was that took this one


def _answers(program: Sequence[str], request: dict | None, each: float) -> Iterator[dict[str, Any]]:
    """What a child answers, as it comes, and then in words why it ended, {"fault": ..}."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answers, errors = (Path(folder, name) for name in ("asked", "answers", "errors"))
        asked.write_text(json.dumps(request))
        with asked.open() as given, answers.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", *program],
                stdin=given,
                stdout=out,
                stderr=err,
                env=os.environ | ours,
                start_new_session=True,
            )
        count, heard, code = 0, time.monotonic(), None
        try:
            # As long as it says something within the time; its first words may come from a slow disk.
            while code is None and time.monotonic() < heard + (each if count else START):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
                code = process.poll()
                # A line that its end cut short is no answer.
                lines = answers.read_text().rpartition("\n")[0].splitlines()
                yield from map(json.loads, lines[count:])
                if len(lines) > count:
                    count, heard = len(lines), time.monotonic()
        finally:  # with all that it started
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        fault = f"did not end within {each:.0f} s"
        if code is not None:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            said = errors.read_text().strip().rpartition("\n")[2][:160]
            fault = f"ended the process ({name})" + (f": {said}" if said else "")
        yield {"fault": fault}


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


def describe(asked: dict[str, Any], rows: Sequence[Row], card: Chip) -> list[str]:
    """Lines for each operator: what a run takes, and the times; its tiles and faults; where and
    which others were tried."""
    lines = []
    for operator in asked["operators"]:
        times, best = verdict(asked, operator, rows)
        line, tiles = "not tried to its end: as it ships", dict[str, Any]()
        if times:
            measured = (f"{name} {1e3 * seconds:.3f} ms" for name, seconds in times.items())
            line = f"a run takes {best}: {', '.join(measured)}"
            if best in times and SHIPPED in times:
                line += f" ({times[SHIPPED] / times[best]:.2f}x what ships)"
        if best == BEST:
            tiles = trying.best_of_each(rows, trying.request_cases(asked, operator))
        lines.append(f"{operator}: {line}")
        for kernel, tile in tiles.items():
            lines.append(f"  {kernel}: {' '.join(f'{name} {size}' for name, size in tile.items())}")
        for row in rows:
            judged = row["operator"] == operator and row["name"] in (XLA, SHIPPED, BEST)
            if judged and "fault" in row:
                lines.append(f"  {row['name']}, {row['case']}: {row['fault']}")
        timed = [case.label for case in trying.request_cases(asked, operator) if case.timed]
        given = trying.shipped_tiles(asked, operator, card)
        others = candidates.described(card.architecture, given)
        lines.append(f"  timed: {'; '.join(timed)}, with {others}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the times, and writes what runs take."""
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

    def found(card: Chip, name: str, asked: dict[str, Any], rows: list[Row], operator: str) -> None:
        earlier, _ = table.read_measured(card.kind)
        try:
            table.write_measured(card.kind, make_record(card, name, asked, rows, earlier))
        except OSError as error:
            raise RuntimeError(
                f"{table.measured_file()} cannot be written ({error.strerror}); set"
                " XDG_CACHE_HOME to a folder that can"
            ) from error
        done = asked | {"operators": [operator]}
        print("\n".join(describe(done, rows, card)), flush=True)

    try:
        _, name, _, _ = measure(request, seconds=options.seconds, found=found)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.BAD_INPUT
    print(
        f"written: {table.measured_file()}; runs on this machine with {name} take it from now on.\nTo"
        " let it ship for everyone, send this file: it has the card's name, versions, sizes and times,"
        " and no paths."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
