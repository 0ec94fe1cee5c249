"""Finds the tiles of this machine's card, for each kernel as a training step runs it.

    python -m pallas_kernels.tune [--config=FILE] [--operators NAME ...] [--seconds=90]

The sizes are those that a device has in the config's phase with most tokens; the default config is
zaya1_base. Child processes run the kernels (`trying`), so a compiler that crashes, a fault of the
GPU or a kernel that never ends costs that tile and no more. Runs take an operator's kernels if they
are right in all cases and faster than XLA's; if a case was not reached, nothing changes for its
operator.

For each operator it prints the times of XLA's kernels, of the tiles that ship and of the best ones,
with the gain over what ships. It prints and writes an operator when it is done, so an early end
loses only the one in progress. Runs on this machine take the best tiles by themselves, from
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
from collections.abc import Callable, Generator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels import candidates, chip, table, trying
from pallas_kernels.candidates import Tile
from pallas_kernels.chip import Chip
from pallas_kernels.messages import (
    Begin,
    Done,
    End,
    Fault,
    Outcome,
    TileTask,
    Tried,
    decode,
    encode,
)
from pallas_kernels.trying import BEST, SHIPPED, XLA

SECONDS = 90.0  # after which no further tile is begun
POLL = 0.2  # between two looks at a child's messages
PATIENCE = 60.0  # between two messages of a child: a compiler may take that long
START = 180.0  # until a child's first message
GAIN = 1.03  # by which our kernels must be faster than XLA's
PROGRAM = ("pallas_kernels.trying",)


class Search(NamedTuple):
    """What was tried on this machine's card."""

    card: Chip
    name: str  # of the card
    request: dict[str, Any]  # zaya_jax.training.kernels.tuning_request
    outcomes: list[Outcome]


def measure(
    make_request: Callable[[int], dict[str, Any]],
    program: Sequence[str] = PROGRAM,
    pretend: Chip | None = None,
    seconds: float = SECONDS,
    patience: float = PATIENCE,
    after_operator: Callable[[Search, str], None] = lambda *_: None,
) -> Search:
    """Tries what `make_request(number of devices)` asks for; `after_operator` gets the search so far
    and the operator that is done. RuntimeError without a GPU. For tests: another program, a card to
    pretend."""
    first, *_ = _messages(program, TileTask(), START)
    if isinstance(first, Fault):
        raise RuntimeError(f"the process that tries {first.text}")
    card = pretend or Chip(first.platform, first.kind)
    if card.maker not in ("cuda", "rocm"):
        raise RuntimeError("no GPU is here; python -m benchmarks.kernels interprets kernels")
    request = json.loads(json.dumps(make_request(first.devices) | {"memory": first.memory}))
    search = Search(card, first.name, request, [])
    deadline = time.monotonic() + seconds
    one_at_a_time = False
    while True:
        left = deadline - time.monotonic()
        task = TileTask(request, search.outcomes, left, one_at_a_time, pretend and pretend[:2])
        before = len(search.outcomes)
        begun, fault = None, ""
        with contextlib.closing(_messages(program, task, patience)) as received:
            for message in received:
                match message:
                    case Begin():
                        begun = message
                    case Tried(outcome):
                        search.outcomes.append(outcome)
                        begun = None
                    case Done(operator):
                        after_operator(search, operator)
                    case End():
                        return search
                    case Fault(text):
                        fault = text
        if begun and begun.name:
            search.outcomes.append(begun._asdict() | {"fault": fault})
        if one_at_a_time and len(search.outcomes) == before:
            raise RuntimeError(f"the process that tries {fault}")
        one_at_a_time = True  # so that the next child tells what ended this one


def _messages(program: Sequence[str], task: TileTask, patience: float) -> Generator[Any]:
    """A child's messages as they come, and then a `Fault` that says how it ended."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answers, errors = (Path(folder, name) for name in ("task", "answers", "errors"))
        asked.write_text(encode(task))
        with asked.open() as stdin, answers.open("w") as stdout, errors.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", *program],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=os.environ | ours,
                start_new_session=True,
            )
        count, heard, code = 0, time.monotonic(), None
        try:
            # The first message may take longer, from a slow disk.
            while code is None and time.monotonic() < heard + (patience if count else START):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
                code = process.poll()
                # A line that the child's end cut short is no message.
                lines = answers.read_text().rpartition("\n")[0].splitlines()
                yield from map(decode, lines[count:])
                if len(lines) > count:
                    count, heard = len(lines), time.monotonic()
        finally:  # with all that it started
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code is None:
            yield Fault(f"did not end within {patience:.0f} s")
            return
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last_line = errors.read_text().strip().rpartition("\n")[2][:160]
        yield Fault(f"ended the process ({name})" + (f": {last_line}" if last_line else ""))


def make_record(search: Search, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """What runs take of the outcomes, for `table.write_measured`, with all of them for its readers.
    Operators that were not tried, or not to their end, stay as in the `earlier` record, or as they
    ship."""
    kernels, tiles = list[str](), dict[str, Any]()
    card, date = search.card, time.strftime("%Y-%m-%d")
    shipped: dict[str, Any] = {
        "kernels": chip.OPERATORS * table.has(card.architecture),
        "tiles": {},
    }
    before = earlier or shipped
    for operator in chip.OPERATORS:
        times, best = verdict(search, operator)
        if not times:
            kernels += [operator] * (operator in before["kernels"])
            begin = table.BEGIN[operator]
            tiles |= {k: row for k, row in before["tiles"].items() if k.startswith(begin)}
        elif best != XLA:
            kernels.append(operator)
            chosen = trying.shipped_tiles(search.request, operator, card)
            if best == BEST:
                chosen |= _best_tiles(search, operator)
            about = {"source": "measured", "chip": search.name, "date": date, "jax": version("jax")}
            ms = round(1e3 * times[best], 4)
            tiles |= {kernel: {"tile": tile, **about, "ms": ms} for kernel, tile in chosen.items()}
    return {
        "key": table.key(card.kind),
        "name": search.name,
        "date": date,
        "request": search.request,
        "kernels": kernels,
        "tiles": tiles,
        "outcomes": search.outcomes,
    }


def verdict(search: Search, operator: str) -> tuple[dict[str, float], str]:
    """The seconds of XLA's, the shipped and the best tiles, where they are right in all cases; and
    which of these a run takes. No seconds: the cases were not all tried."""
    if operator not in search.request["operators"]:
        return {}, XLA
    needed = trying.request_cases(search.request, operator)
    by_case = {(o["operator"], o["case"], o["name"]): o for o in search.outcomes}
    reached = all((*case.name, name) in by_case for case in needed for name in (XLA, SHIPPED))
    faulty = any("fault" in by_case.get((*case.name, SHIPPED), {}) for case in needed)
    if not reached and not faulty:
        return {}, XLA
    right = trying.total_seconds(search.outcomes, needed)
    times = {name: right[name] for name in (XLA, SHIPPED, BEST) if name in right}
    ours = min((name for name in times if name != XLA), key=times.__getitem__, default=XLA)
    slowest = times.get(XLA, np.inf) / GAIN
    return times or {XLA: np.inf}, ours if times.get(ours, np.inf) <= slowest else XLA


def _best_tiles(search: Search, operator: str) -> dict[str, Tile]:
    cases = trying.request_cases(search.request, operator)
    return trying.best_of_each(search.outcomes, cases)


def describe(search: Search, operator: str) -> list[str]:
    """What a run takes, and the times; the best tiles and the faults; where and which others were
    tried."""
    times, best = verdict(search, operator)
    line = "not tried to its end: as it ships"
    if times:
        measured = (f"{name} {1e3 * seconds:.3f} ms" for name, seconds in times.items())
        line = f"a run takes {best}: {', '.join(measured)}"
        if best in times and SHIPPED in times:
            line += f" ({times[SHIPPED] / times[best]:.2f}x what ships)"
    lines = [f"{operator}: {line}"]
    if best == BEST:
        for kernel, tile in _best_tiles(search, operator).items():
            lines.append(f"  {kernel}: {' '.join(f'{name} {size}' for name, size in tile.items())}")
    for outcome in search.outcomes:
        judged = outcome["operator"] == operator and outcome["name"] in (XLA, SHIPPED, BEST)
        if judged and "fault" in outcome:
            lines.append(f"  {outcome['name']}, {outcome['case']}: {outcome['fault']}")
    timed = [case.label for case in trying.request_cases(search.request, operator) if case.timed]
    shipped = trying.shipped_tiles(search.request, operator, search.card)
    others = candidates.described(search.card.architecture, shipped)
    return [*lines, f"  timed: {'; '.join(timed)}, with {others}"]


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

    def make_request(devices: int) -> dict[str, Any]:
        request = kernels.tuning_request(run_config, devices)
        wanted = options.operators or request["operators"]
        for name in sorted({*wanted} - {*request["operators"]}):
            print(f"note: {name} is not tried: a step of this config does not have it", flush=True)
        return request | {"operators": [name for name in request["operators"] if name in wanted]}

    def write(search: Search, operator: str) -> None:
        earlier, _ = table.read_measured(search.card.kind)
        try:
            table.write_measured(search.card.kind, make_record(search, earlier))
        except OSError as error:
            raise RuntimeError(
                f"{table.measured_file()} cannot be written ({error.strerror}); set"
                " XDG_CACHE_HOME to a folder that can"
            ) from error
        print("\n".join(describe(search, operator)), flush=True)

    try:
        search = measure(make_request, seconds=options.seconds, after_operator=write)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.BAD_INPUT
    print(
        f"written: {table.measured_file()}; runs on this machine with {search.name} take it from now on.\nTo"
        " let it ship for everyone, send this file: it has the card's name, versions, sizes and times,"
        " and no paths."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
