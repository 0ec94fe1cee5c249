"""Finds the fastest correct implementation of each operator on the chip that is here.

    record = find(ask)                  a dict for JSON; record["kernels"] is for `chip.settle`
    python -m pallas_kernels.trial      the child that tries: a JSON request in, a line of JSON for each result out

Each operator, at the sizes and in the number format that a run asks for, with packed documents: our
kernels with each tile of `chip.TILES`, XLA's, on NVIDIA's chips cuDNN's attention. XLA's is
`lax.ragged_dot` where that exists. Results and gradients are compared with XLA's in float32 with
all its bits; what is right is timed, forward and backward. Ours must be faster than XLA's by GAIN,
otherwise the simpler stays. cuDNN's is shown and cannot be taken: it has no documents but by an [S,
S] mask, and its log-sum-exp in bfloat16.

Children try, so a compiler that crashes, a fault of the GPU or a kernel that never ends costs that
implementation's verdict: the child announces each implementation before it begins it, and a new one
goes on behind it. They come before the caller's own backend where it can wait
(`zaya_jax.training.kernels`), because that takes most of the GPU's memory, or all of an exclusive
one; a child takes memory as it needs it, so that it also finds room beside others.
"""

import contextlib
import functools
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cases, chip, timing
from pallas_kernels.cases import Case, Size
from pallas_kernels.chip import Chip

GAIN = 1.03
SECONDS = 60.0  # of a trial, after which no implementation is begun
EACH = 45.0  # of one implementation: a compiler may take that long
START = 180.0  # of a child's start, from a slow disk
SAMPLES = 0.03  # seconds of a timing
# Of errors relative to a norm, and of the worst number in units of its row: below that all are
# right, above it an error is held against XLA's in the same format.
NORM, WORST = 1e-3, 1e-2
TIMES_NORM, TIMES_WORST = 2.0, 4.0
XLAS_OWN = 0.1, 10.0  # by which results may be wrong that there is no other to hold against
# Of the largest result's norm, or gradient's: below that one is the rounding of a zero, as the
# gradient of queries that see one key, and is measured in this unit.
ZERO = 1e-3
MASK = 1 << 30  # bytes of an [S, S] mask at most
OURS = {"ours": "1", "ours, tile 2": "2", "ours, tile 3": "3"}
FIRST = ("XLA", "ours")
_OF_TILE = {tile: name for name, tile in OURS.items()}
NAMES = ("operator", "case", "implementation")
HEAD = (*NAMES, "forward, ms", "backward, ms", "error", "verdict")

Row = dict[str, Any]


# ################################################################################################
# In the child
# ##################################################################################################


def main() -> int:
    """Says what is here, then answers one request."""
    send = _sender()
    device = jax.devices()[0]
    here = chip.chip_of(device)
    send(
        {
            "platform": here.platform,
            "kind": here.kind,
            "devices": jax.device_count(),
            "name": device.device_kind,
            "driver": " ".join([driver(), *device.client.platform_version.split()]),
            "jax": jax.__version__,
        }
    )
    request = json.loads(sys.stdin.readline() or "null")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if request:
        target = Chip(*request["as"]) if request.get("as") else here
        for answer in tried(request["asked"], target, request["rows"], request["seconds"]):
            send(answer)
            if "failed" in answer.get("row", {}).get("fault", "") and not _sound():
                return 1
    send({"end": True})
    return 0


def _sender() -> Callable[[dict], None]:
    """Writes lines where standard output went; all that others print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda line: print(json.dumps(line), file=out, flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()  # ends when the parent does
    os._exit(1)


def _sound() -> bool:
    """Whether the device still computes; after a bad address it does not."""
    try:
        return bool(jnp.ones(8).sum() == 8)
    except jax.errors.JaxRuntimeError:
        return False


def tried(asked: dict, here: Chip, rows: Sequence[Row], seconds: float) -> Iterator[dict]:
    """{"begin": [operator, case, implementation]} and {"row": ..} of each that `rows` does not
    have.

    XLA's and our first tile are tried in any case, others as long as the case's share of the
    seconds lasts, but no more of ours after one that took the process with it.
    """
    until, todo = time.monotonic() + seconds, of_request(asked)
    for number, (case, size) in enumerate(todo):
        share = time.monotonic() + max(until - time.monotonic(), 0) / (len(todo) - number)
        before = {
            row["implementation"]: row
            for row in rows
            if (row["operator"], row["case"]) == _name(case)
        }
        lost = any(row.get("lost") for row in before.values())
        reference, dtype = None, asked.get("dtypes", {}).get(case.operator, asked["dtype"])
        for name, (call, target) in offered(case, here).items():
            if name in before or (name not in FIRST and (lost or time.monotonic() > share)):
                continue
            yield {"begin": [*_name(case), name]}
            try:
                reference = reference or Reference(case, size, dtype, here, before.get("XLA", {}))
            except Exception as error:
                yield {"row": _row(case, name) | {"fault": f"failed, in float32: {_line(error)}"}}
                continue
            yield {
                "row": reference.judge(
                    name, Case(case.operator, case.label, call, case.arguments), target
                )
            }


def _name(case: Case) -> tuple[str, str]:
    return case.operator, case.label


def _row(case: Case, name: str) -> Row:
    return dict(zip(NAMES, (*_name(case), name), strict=True))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def of_request(asked: dict) -> list[tuple[Case, Size]]:
    """The cases of a request, with their sizes."""
    model = SimpleNamespace(**asked["model"])
    size = Size("", asked["batch"], asked["length"], model, asked.get("whole", 0))
    found = [case for case in cases.CASES if case.operator in asked["operators"]]
    for window in asked.get("windows", ()):
        base = next(case for case in cases.CASES if case.operator == "attention")
        found.append(
            Case(
                "attention",
                f"window of {window}, documents",
                cases.attending(window),
                base.arguments,
            )
        )
    return [(case, size) for case in found]


def offered(case: Case, here: Chip) -> dict[str, tuple[Callable, Chip]]:
    """Implementations by name: the case's function, and the chip that it is made for. XLA's comes
    first."""
    found: dict[str, tuple[Callable, Chip]] = {"XLA": (case.call, here.taking(("none",)))}
    for name, tile in OURS.items():
        found[name] = (case.call, here._replace(kernels=(f"{case.operator}:{tile}",)))
    if case.operator == "attention" and here.maker == "cuda" and not here.is_host:
        found["cuDNN"] = (functools.partial(_cudnn, case.label), here.taking(("none",)))
    return found


def _cudnn(label: str, dtype: Any) -> Callable:
    window = int(label.split()[2].rstrip(",")) if label.startswith("window") else None

    def attend(q, k, v, ids):
        before, length = k.shape[1] - q.shape[1], k.shape[1]
        if q.shape[0] * q.shape[1] * length * q.dtype.itemsize > MASK:
            raise ValueError(
                f"its mask of {q.shape[1]:,} x {length:,} takes more than {MASK >> 30} GiB"
            )
        back = (jnp.arange(q.shape[1]) + before)[:, None] - jnp.arange(length)
        seen = (back >= 0) & (back < (window or length))
        mask = (seen & (ids[:, before:, None] == ids[:, None, :]))[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")

    return attend


class Reference:
    """A case's results and gradients in float32, and XLA's errors in the run's own format."""

    def __init__(self, case: Case, size: Size, dtype: str, here: Chip, xlas: Row):
        self.dtype = jnp.dtype(dtype)
        self.own = case.values(size, self.dtype, drawn=self.dtype)
        with chip.making(here.taking(("none",))), jax.default_matmul_precision("highest"):
            exact = case.values(size, jnp.float32, drawn=self.dtype)
            groups = self._run(case, exact, jnp.float32, None)
        norms = [
            [float(jnp.sqrt(jnp.mean(x * x))) if x.size else 0.0 for x in group] for group in groups
        ]
        self.exact = [x for group in groups for x in group]
        self.units = [max(n, ZERO * max(group)) for group in norms for n in group]
        self.alone = [
            XLAS_OWN if n >= ZERO * max(group) else (1e30, 1e30) for group in norms for n in group
        ]
        self.limits = self._limits(xlas)

    def _run(
        self, case: Case, arguments: tuple, dtype: Any, timed: dict | None
    ) -> list[list[jax.Array]]:
        """All results, and all gradients; with `timed` the calls of both directions."""
        if case.operator == "newton_schulz":  # no gradient
            program = jax.jit(case.call(dtype)).lower(*arguments).compile()
            out, self_timed = program(*arguments), {"forward": lambda: program(*arguments)}
            gradients: Any = ()
        else:
            forward = jax.jit(cases.linearized(case, dtype)).lower(*arguments).compile()
            out, pull = forward(*arguments)
            d_out = jax.tree.map(_cotangent, out)
            backward = jax.jit(lambda pull, d: pull(d)).lower(pull, d_out).compile()
            gradients = backward(pull, d_out)
            self_timed = {
                "forward": lambda: forward(*arguments),
                "backward": lambda: backward(pull, d_out),
            }
        if timed is not None:
            timed |= self_timed
        return [[x.astype(jnp.float32) for x in jax.tree.leaves(both)] for both in (out, gradients)]

    def judge(self, name: str, case: Case, target: Chip) -> Row:
        """The verdict on one implementation: its errors, and where they are small its seconds."""
        row = _row(case, name)
        calls: dict[str, Callable] = {}
        begun = time.perf_counter()
        try:
            with chip.making(target):
                found = self._run(case, self.own, self.dtype, calls)
            errors = self._errors([x for group in found for x in group])
            row["errors"] = [[min(x, 1e99) for x in pair] for pair in errors]
            norm, worst = map(max, zip(*errors, strict=True))
            row |= {"norm": min(norm, 1e99), "worst": min(worst, 1e99)}
            limits = self.alone if name == "XLA" else self.limits
            if not all(
                e <= most
                for pair, own in zip(errors, limits, strict=True)
                for e, most in zip(pair, own, strict=True)
            ):
                how = (
                    f"by {norm:.2g} of the norm, in one place by {worst:.2g}"
                    if norm + worst < np.inf
                    else "not finite"
                )
                return row | {"fault": f"wrong: {how}"}
            if name == "XLA":
                self.limits = self._limits(row)
            for direction, call in calls.items():
                row[direction] = timing.time_call(call, SAMPLES, queue=not target.is_host).median
        except Exception as error:
            row["fault"] = f"failed: {_line(error)}"
        row["took"] = round(time.perf_counter() - begun, 2)
        return row

    def _errors(self, found: list[jax.Array]) -> list[tuple[float, float]]:
        """Of each result and gradient: over its norm, and in the worst place; infinite where it is
        not finite."""
        if [x.shape for x in found] != [x.shape for x in self.exact]:
            return [(np.inf, np.inf)] * len(self.exact)
        pairs = [_distance(*given) for given in zip(found, self.exact, self.units, strict=True)]
        norms, worst = np.nan_to_num(
            np.array(jax.device_get(pairs), np.float64).reshape(-1, 2), nan=np.inf
        ).T.tolist()
        return list(zip(norms, worst, strict=True))

    def _limits(self, xlas: Row) -> list[tuple[float, float]]:
        """Of the errors, by XLA's own."""
        if "errors" not in xlas or "fault" in xlas:
            return self.alone
        return [
            (max(TIMES_NORM * norm, NORM), max(TIMES_WORST * worst, WORST))
            for norm, worst in xlas["errors"]
        ]


def _cotangent(x: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype)


@jax.jit
def _distance(a: jax.Array, b: jax.Array, unit: float) -> tuple[jax.Array, jax.Array]:
    """Of a norm, and the farthest number in units of its row, where a row counts at least a tenth
    of them all."""
    if not a.size:
        return jnp.zeros(()), jnp.zeros(())
    difference, least = jnp.abs(a - b), jnp.maximum(unit, jnp.finfo(jnp.float32).tiny)
    row = jnp.sqrt(jnp.mean(b * b, axis=-1, keepdims=True)) if b.ndim else jnp.abs(b)
    return jnp.sqrt(jnp.mean(difference**2)) / least, jnp.max(difference / (row + 0.1 * least))


# ################################################################################################
# In the parent
# ##################################################################################################


def may_be_here() -> bool:
    """Whether JAX could find a GPU, without asking it: that would start the backend."""
    platforms = jax.config.jax_platforms or ""
    return platforms != "cpu" and any(entry_points(group="jax_plugins"))


def cards() -> str:
    """The kinds of GPUs of this machine by the driver's own files; "" where it has none."""
    found = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with contextlib.suppress(OSError):
            found |= {
                line.split(":", 1)[1].strip()
                for line in path.read_text().splitlines()
                if "Model" in line
            }
    for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        with contextlib.suppress(OSError):
            found |= {
                line
                for line in path.read_text().splitlines()
                if line.startswith("gfx_target_version") and not line.endswith(" 0")
            }
    return ", ".join(sorted(found))


def driver() -> str:
    """The driver's version, by its own files."""
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        with contextlib.suppress(OSError):
            return path.read_text().split("\n")[0].strip()
    return ""


def code() -> str:
    """A hash of these kernels' source."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


class Child:
    """A process that tries."""

    def __init__(self, program: Sequence[str]):
        root = str(Path(__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {"PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        # as `jax.distributed` has set them
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            if getattr(jax.config, name, "all") != "all":
                ours[name.upper()] = str(getattr(jax.config, name))
        self.process = subprocess.Popen(
            [sys.executable, "-m", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ours,
            start_new_session=True,
        )
        self.lines: queue.Queue[dict | None] = queue.Queue()
        self.last = ""  # of what it prints as an error
        self.readers = [
            threading.Thread(target=one, daemon=True) for one in (self._read, self._read_errors)
        ]
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with contextlib.suppress(ValueError):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.last = line.strip()[:160] or self.last

    def next(self, seconds: float) -> dict | str:
        """The next line, or why there is none."""
        with contextlib.suppress(queue.Empty):
            line = self.lines.get(timeout=max(seconds, 0.01))
            return self._end() if line is None else line
        return f"did not end within {seconds:.0f} s"

    def ask(self, request: dict | None) -> None:
        """Sends the request; None: there is nothing to try."""
        with contextlib.suppress(OSError):
            assert self.process.stdin
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def _end(self) -> str:
        result = self.process.wait()
        name = signal.Signals(-result).name if result < 0 else f"exit code {result}"
        return f"ended the process ({name})" + (f": {self.last}" if self.last else "")

    def close(self) -> None:
        """Ends it, and all that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for reader in self.readers:
            reader.join(5)
        self.process.wait()
        # no process that left the group has its pipes
        if not any(reader.is_alive() for reader in self.readers):
            with contextlib.suppress(BrokenPipeError), self.process:  # closes them
                pass


@contextlib.contextmanager
def child(program: Sequence[str]) -> Iterator[Child]:
    """A child that ends with the block."""
    made = Child(program)
    try:
        yield made
    finally:
        made.close()


PROGRAM = ("pallas_kernels.trial",)


def find(
    ask: Callable[[dict], dict | None],
    *,
    again: bool = False,
    known: Sequence[dict] = (),
    folder: Path | None = None,
    program: Sequence[str] = PROGRAM,
    pretend: Chip | None = None,
    seconds: float = SECONDS,
    each: float = EACH,
) -> dict | None:
    """The record for this machine's first device: of `known` ones, of the cache, or of a trial;
    None on a CPU.

    `ask(what is here)` gives the request, None for none. `again` tries whatever is known. For
    tests: other programs, a chip to pretend, shorter times.
    """
    rows: list[Row] = []
    folder = cache_folder() if folder is None else folder
    with child(program) as first:
        here = first.next(START)
        if isinstance(here, str) or "kind" not in here:
            return {
                "kernels": [],
                "rows": [],
                "kind": "this device",
                "note": f"the trial's process {here}",
            }
        here = here | ({"platform": pretend.platform, "kind": pretend.kind} if pretend else {})
        target = Chip(here["platform"], here["kind"])
        asked = ask(here) if target.maker in ("cuda", "rocm") else None
        if asked is None:
            return None
        asked = json.loads(json.dumps(asked))
        key = {
            "kind": here["kind"],
            "driver": here["driver"],
            "jax": here["jax"],
            "code": code(),
            "asked": asked,
        }
        path = (
            folder
            / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
        )
        if not again:
            for record in (*known, read(path)):
                if record and all(record.get(name) == value for name, value in key.items()):
                    return record | {"tried": False}
        print(
            f"trying kernels on {here['kind']} at these sizes, once: a minute or two",
            file=sys.stderr,
            flush=True,
        )
        begun = time.monotonic()
        notes = _try(first, program, asked, pretend, rows, begun + seconds, each)
    record = {
        **key,
        "name": here["name"],
        "rows": rows,
        "kernels": decided(rows),
        "date": time.strftime("%Y-%m-%d"),
    }
    record |= {"seconds": round(time.monotonic() - begun, 1), "tuned": target.is_tuned}
    record |= {"said": words(record), "table": table(record)}
    try:
        write(path, record)
    except OSError as error:
        notes.append(
            f"{path.parent} cannot be written ({error.strerror}), so the next start tries again"
        )
    return {**record, "tried": True, **({"note": "; ".join(notes)} if notes else {})}


def _try(
    first: Child,
    program: Sequence[str],
    asked: dict,
    pretend: Chip | None,
    rows: list[Row],
    until: float,
    each: float,
) -> list[str]:
    """Fills `rows`, with a new child after each that is lost; gives notes."""
    current, as_chip = first, pretend and list(pretend[:2])
    with contextlib.ExitStack() as children:
        while True:
            left, before = until - time.monotonic(), len(rows)
            current.ask({"asked": asked, "rows": rows, "seconds": left, "as": as_chip})
            began, line = _rows_of(current, rows, until, each)
            current.close()
            if line is None:
                return []
            if began:
                rows.append({**dict(zip(NAMES, began, strict=True)), "fault": line, "lost": True})
            elif len(rows) == before:
                return [f"the trial's process {line}"]
            if time.monotonic() > until:
                return [f"no more was tried after {SECONDS:.0f} s"]
            current = children.enter_context(child(program))
            current.next(START)  # what is here


def _rows_of(
    current: Child, rows: list[Row], until: float, each: float
) -> tuple[list[str] | None, str | None]:
    """Appends what a child finds; the implementation at which it was lost, and how. (None, None) at
    its end."""
    began = None
    while True:
        line = current.next(each)
        if isinstance(line, str):
            return began, line
        if line.get("end"):
            return None, None
        if "begin" in line:
            began = line["begin"]
            if time.monotonic() > until:
                return None, "was ended"
        elif "row" in line:
            rows.append(line["row"])
            began = None


def decided(rows: Sequence[Row]) -> list[str]:
    """The operators whose own kernels are right and faster than XLA's, each with its fastest
    tile."""
    found = []
    for operator in dict.fromkeys(row["operator"] for row in rows):
        seconds = totals(rows, operator)
        ours = {tile: seconds[name] for name, tile in OURS.items() if name in seconds}
        if ours:
            tile = min(ours, key=lambda t: ours[t])
            if ours[tile] * GAIN <= seconds.get("XLA", np.inf):
                found.append(operator if tile == chip.TILES[0] else f"{operator}:{tile}")
    return found


def totals(rows: Sequence[Row], operator: str) -> dict[str, float]:
    """Seconds of the implementations that were right in all cases of an operator, forward and
    backward."""
    own = [row for row in rows if row["operator"] == operator]
    needed = {row["case"] for row in own}
    found = {}
    for name in dict.fromkeys(row["implementation"] for row in own):
        mine = [
            row
            for row in own
            if row["implementation"] == name and "forward" in row and "fault" not in row
        ]
        if {row["case"] for row in mine} == needed:
            found[name] = sum(row["forward"] + row.get("backward", 0.0) for row in mine)
    return found


def table(record: dict) -> list[list[str]]:
    """A row of text for each implementation, under HEAD."""
    best = {}
    for operator in dict.fromkeys(row["operator"] for row in record["rows"]):
        word = next(
            (word for word in record["kernels"] if word.partition(":")[0] == operator), None
        )
        best[operator] = _OF_TILE[word.partition(":")[2] or chip.TILES[0]] if word else "XLA"
    found = []
    for row in record["rows"]:
        taken = "taken" if best[row["operator"]] == row["implementation"] else ""
        times = [
            f"{1e3 * row[name]:,.3f}" if name in row else "–" for name in ("forward", "backward")
        ]
        error = f"{row['norm']:.1e}" if row.get("norm", 1e99) < 1e9 else "–"
        found.append([*(row[name] for name in NAMES), *times, error, row.get("fault") or taken])
    return found


def words(record: dict) -> str:
    """The record in a line: `kernels on gfx942: attention 2.1x, newton_schulz: XLA's (ours
    0.9x)`."""
    rows, parts = record["rows"], []
    taken = {word.partition(":")[0]: word.partition(":")[2] for word in record["kernels"]}
    for operator in dict.fromkeys(row["operator"] for row in rows):
        seconds = totals(rows, operator)
        ours = min((seconds[name] for name in OURS if name in seconds), default=None)
        gain = f"{seconds['XLA'] / ours:.2g}x" if ours and "XLA" in seconds else "(XLA's failed)"
        if operator in taken:
            parts.append(
                f"{operator} {gain}" + (f" (tile {taken[operator]})" if taken[operator] else "")
            )
        elif ours:
            parts.append(f"{operator}: XLA's (ours {gain})")
        else:
            fault = next(
                (
                    r["fault"]
                    for r in rows
                    if r["operator"] == operator and "ours" in r["implementation"] and "fault" in r
                ),
                "was not tried",
            )
            parts.append(f"{operator}: XLA's (ours {fault})")
    found = f"kernels on {record['kind']}: {', '.join(parts) or 'XLA’s for all'}"
    if not record.get("tuned", True) and taken:
        found += "; its tiles are those of another chip, untuned"
    return found + (f"; note: {record['note']}" if record.get("note") else "")


# ################################################################################################
# Records
# ##################################################################################################


def cache_folder() -> Path:
    """Where records lie: below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zaya_jax" / "kernels"


def read(path: Path) -> dict | None:
    """A record; None where there is none, or a damaged one, which the next trial replaces."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert (
            isinstance(found["rows"], list)
            and all(map(chip.is_word, found["kernels"]))
            and found["kind"]
        )
    except (OSError, ValueError, KeyError, TypeError, AssertionError, AttributeError):
        return None
    return found


def write(path: Path, record: dict) -> None:
    """Writes a record whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
