"""The child of `tune`: compares and times implementations of operators, in the form of a training
step.

    python -m pallas_kernels.trying      a `messages.TileTask` in, messages out

For each operator: XLA's implementation, our kernels with the tiles that ship, with another tile of
one kernel at a time, and with the best of each together. All are compared with XLA's in float32,
and those that are right are timed: values and gradients in one program, as a step has them. Experts
read a layer of stacks and add their gradients into stacks. The tiles that ship, and the best ones,
must also be right in further cases: windows, log-sum-exps and their gradient, padded tails, all
channels turned, experts without tokens, lengths that fill no tile.

Before each implementation the child says which one it begins. Its parent then knows which one crashed
or never ended, and starts another child for the rest.
"""

import concurrent.futures
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import candidates, cases, chip, messages, table, timing
from pallas_kernels.candidates import Tile
from pallas_kernels.cases import Size
from pallas_kernels.chip import Chip
from pallas_kernels.messages import ChildMessage, Outcome, TileTask

SAMPLES = 0.03  # seconds of a timing
THREADS = 16  # that compile at once
GAIN = 1.01  # by which another tile of a kernel must be faster
# Error limits, relative to the norm and to the worst row. Below NORM and WORST all is right; above,
# an error may be so many times XLA's in the same format. Where XLA's own failed, LIMITS by the bytes
# of a number hold: right kernels have at most half of them.
NORM, WORST = 1e-3, 1e-2
TIMES_NORM, TIMES_WORST = 2.0, 4.0
LIMITS = {2: (2e-2, 0.5), 4: (1e-4, 1e-2)}
# A result or gradient this much smaller than the largest is rounding noise around zero, and its
# errors are measured in this unit.
ZERO, OF_NOISE = 1e-3, (100.0, 100.0)
XLA, SHIPPED, BEST = "XLA", "shipped", "best of each"


class TriedCall(NamedTuple):
    """An operator's call with its gradients; without `timed` it must only be right."""

    operator: str
    label: str
    timed: bool
    size: Size
    # dtype → function(arguments, sums) → (results, sums); `sums` are given away and come back.
    call: Callable[[Any], Callable]
    arguments: Callable[[Size], tuple[cases.RandomInput, ...]]
    sums: Callable[[Size], tuple[jax.ShapeDtypeStruct, ...]]

    @property
    def name(self) -> tuple[str, str]:
        """Operator and label."""
        return self.operator, self.label

    def values(self, dtype: Any, drawn: Any) -> tuple[jax.Array, ...]:
        """Arguments, those of bfloat16 drawn in the format `drawn`."""
        return cases.values_of(self.arguments(self.size), dtype, drawn)

    def zeros(self) -> tuple[jax.Array, ...]:
        """Sums."""
        return tuple(jnp.zeros(x.shape, x.dtype) for x in self.sums(self.size))


def request_cases(request: Mapping[str, Any], operator: str) -> list[TriedCall]:
    """An operator's cases: the timed ones first."""
    model = SimpleNamespace(**request["model"])
    size = Size("", request["batch"], request["length"], model, request.get("whole", 0))
    small = Size("", 2, 333, model)
    plain = [case for case in cases.CASES if case.operator == operator]
    more = cases.rare_cases(operator, request.get("windows", ()))
    if operator == "grouped_mlp":
        size = size._replace(layers=cases.layers_like_step(size, request.get("memory") or np.inf))
        label = f"in stacks of {size.layers} layers"
        stacks = TriedCall(operator, label, True, size, _in_stacks, cases.stacked, cases.sums)
        chosen, more = [stacks], [*more, *plain]
    else:
        chosen = [tried_call(case, size, True) for case in plain]
    return chosen + [tried_call(case, small, False) for case in more]


def tried_call(case: cases.OperatorCase, size: Size, timed: bool) -> TriedCall:
    """A case's call with its gradients."""

    def call(dtype: Any) -> Callable:
        def run(arguments, sums):
            out, pull = cases.linearized(case, dtype)(*arguments)
            return (out, pull(jax.tree.map(_cotangent, out))), sums

        return run

    return TriedCall(case.operator, case.label, timed, size, call, case.arguments, lambda size: ())


def _in_stacks(dtype: Any) -> Callable:
    def run(arguments, sums):
        x, choice, *weights = arguments
        results = cases.mlp_in_stacks(x.astype(dtype), choice, weights, sums, _cotangent)
        out, gradient, added = results
        return (out, gradient), added

    return run


def _cotangent(x: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype)


# ################################################################################################
# What is tried
# ################################################################################################


def shipped_tiles(request: Mapping[str, Any], operator: str, card: Chip) -> dict[str, Tile]:
    """The tiles that ship for an operator's kernels, by the name of the variant that the request
    meets."""
    rows = table.rows(card.architecture)
    heads = operator in ("attention", "linear_attention")
    channels = request["model"]["head_dim"] if heads else 128
    variant = table.variant_of(channels, jnp.dtype(request["dtype"]).itemsize)
    shipped = {}
    for kernel, row in table.rows_of_operators(rows, [operator]).items():
        of_variant = rows.get(f"{kernel} {variant}", row)
        name = kernel if of_variant is row else f"{kernel} {variant}"
        shipped[name] = of_variant["tile"]
    return shipped


def implementations(
    request: Mapping[str, Any], operator: str, card: Chip
) -> dict[str, dict[str, Tile]]:
    """Names of implementations, each with the tiles that it has in place of those that ship."""
    by_name: dict[str, dict[str, Tile]] = {XLA: {}, SHIPPED: {}}
    for kernel, tile in shipped_tiles(request, operator, card).items():
        for other in candidates.tiles_to_measure(card.architecture, kernel, tile):
            sizes = " ".join(f"{name} {size}" for name, size in other.items())
            by_name[f"{kernel}: {sizes}"] = {kernel: other}
    return by_name


def best_of_each(outcomes: Sequence[Outcome], cases: Sequence[TriedCall]) -> dict[str, Tile]:
    """The fastest right tile of each kernel, of those that are faster than what ships."""
    times = total_seconds(outcomes, [case for case in cases if case.timed])
    fast: dict[str, Tile] = {}
    fastest: dict[str, float] = {}
    slowest = times.get(SHIPPED, np.inf) / GAIN
    for outcome in outcomes:
        if outcome["name"] == BEST:
            continue
        seconds = times.get(outcome["name"], np.inf)
        for kernel, tile in outcome.get("tiles", {}).items():
            if seconds < min(slowest, fastest.get(kernel, np.inf)):
                fast[kernel], fastest[kernel] = tile, seconds
    return fast


def total_seconds(outcomes: Sequence[Outcome], needed: Sequence[TriedCall]) -> dict[str, float]:
    """The seconds of each implementation that is right in all these cases, over the timed ones."""
    right: dict[str, dict[tuple, float]] = {}
    for outcome in outcomes:
        if "fault" not in outcome:
            seconds = right.setdefault(outcome["name"], {})
            seconds[outcome["operator"], outcome["case"]] = outcome.get("seconds", 0.0)
    names = [case.name for case in needed]
    return {
        name: sum(seconds[case] for case in names)
        for name, seconds in right.items()
        if all(case in seconds for case in names)
    }


def try_all(task: TileTask, card: Chip) -> Iterator[ChildMessage]:
    """Tries what the task has no outcome of yet, operator after operator."""
    attempts = Attempts(task, card)
    for operator in attempts.request["operators"]:
        yield from attempts.try_operator(operator)
        yield messages.Done(operator)


class Attempts:
    """The implementations that a task asks for, and what became of them."""

    def __init__(self, task: TileTask, card: Chip):
        assert task.request is not None
        self.request, self.card = task.request, card
        self.outcomes = list(task.outcomes)
        self.deadline = time.monotonic() + task.seconds
        self.one_at_a_time = task.one_at_a_time
        self.references: dict[str, Reference] = {}  # by the label of the case

    def try_operator(self, operator: str) -> Iterator[ChildMessage]:
        """All tiles in the timed cases, those that ship in all, then the best of each kernel."""
        self.references = {}  # the arrays of the operator before are freed
        operator_cases = request_cases(self.request, operator)
        tiles_of = implementations(self.request, operator, self.card)
        for case in operator_cases:
            if case.timed:
                yield from self._try_case(case, tiles_of)
            else:
                yield from self._try_case(case, {name: tiles_of[name] for name in (XLA, SHIPPED)})
        best = best_of_each(self.outcomes, operator_cases)
        if best:
            for case in operator_cases:
                yield from self._try_case(case, {BEST: best})

    def _try_case(
        self, case: TriedCall, tiles_of: Mapping[str, dict[str, Tile]]
    ) -> Iterator[ChildMessage]:
        known = {o["name"]: o for o in self.outcomes if (o["operator"], o["case"]) == case.name}
        missing = [name for name in tiles_of if name not in known]
        if not missing or "float32" in known:  # of float32 there is only a fault
            return
        if case.label not in self.references:
            yield messages.Begin(*case.name, "float32")
            self.references[case.label] = Reference(case, self.request, self.card)
        reference = self.references[case.label]
        reference.limit_by(known.get(XLA, {}))
        for batch in itertools.batched(missing, THREADS):
            tiles = {name: tiles_of[name] for name in batch if self._in_time(name)}
            programs: dict[str, Any] = {}
            if tiles and not self.one_at_a_time:
                yield messages.Begin(*case.name, "")
                for name, program in reference.compiled(tiles, self.card):
                    programs[name] = program
                    yield messages.Compiled(name)
            for name in tiles:
                if not self._in_time(name):
                    return
                yield messages.Begin(*case.name, name)
                if name not in programs:
                    programs |= reference.compiled({name: tiles[name]}, self.card)
                outcome: Outcome = {"operator": case.operator, "case": case.label, "name": name}
                outcome |= {"tiles": tiles[name]} | reference.judge(name, programs[name])
                self.outcomes.append(outcome)
                yield messages.Tried(outcome)

    def _in_time(self, name: str) -> bool:
        """Without the times of these three a run cannot choose, so they are tried however late."""
        return name in (XLA, SHIPPED, BEST) or time.monotonic() < self.deadline


class Reference:
    """A case's results and gradients in float32, and by how much others may differ."""

    def __init__(self, case: TriedCall, request: Mapping[str, Any], card: Chip):
        self.case, self.dtype = case, jnp.dtype(request["dtype"])
        self.queue = not card.is_host
        self.arguments = case.values(self.dtype, self.dtype)
        one = case._replace(size=case.size._replace(layers=1))  # whose numbers the last layer has
        with chip.making(card.taking(("none",))), jax.default_matmul_precision("highest"):
            arguments, sums = one.values(jnp.float32, self.dtype), one.zeros()
            program = jax.jit(case.call(jnp.float32)).lower(arguments, sums).compile()
            groups = _groups(*program(arguments, sums))
        norms = [[_rms(x) for x in group] for group in groups]
        self.exact = [x for group in groups for x in group]
        self.units = [max(n, ZERO * max(group)) for group in norms for n in group]
        limits = LIMITS[self.dtype.itemsize]
        self.limits = [
            limits if n >= ZERO * max(group) else OF_NOISE for group in norms for n in group
        ]

    def limit_by(self, xlas: Outcome) -> None:
        """Takes XLA's own errors for limits, where it is right."""
        if "errors" in xlas and "fault" not in xlas:
            self.limits = [
                (max(TIMES_NORM * norm, NORM), max(TIMES_WORST * worst, WORST))
                for norm, worst in xlas["errors"]
            ]

    def compiled(
        self, todo: Mapping[str, dict[str, Tile]], card: Chip
    ) -> Iterator[tuple[str, Any]]:
        """(name, program, or the error) of each, as they are ready."""

        sums = self.case.sums(self.case.size)

        def one(name: str, tiles: Mapping[str, Tile]) -> tuple[str, Any]:
            given = tuple((kernel, tuple(tile.items())) for kernel, tile in tiles.items())
            target = card.taking(("none",)) if name == XLA else card._replace(tiles=given)
            try:
                with chip.making(target):
                    program = jax.jit(self.case.call(self.dtype), donate_argnums=1)
                    return name, program.lower(self.arguments, sums).compile()
            except Exception as error:
                return name, error

        with concurrent.futures.ThreadPoolExecutor(min(THREADS, len(todo))) as pool:
            waiting = [pool.submit(one, name, tiles) for name, tiles in todo.items()]
            for done in concurrent.futures.as_completed(waiting):
                yield done.result()

    def judge(self, name: str, program: Any) -> Outcome:
        """The errors of one implementation, and where they are small its seconds."""
        outcome: Outcome = {}
        try:
            if isinstance(program, Exception):
                raise program
            results = program(self.arguments, self.case.zeros())
            buffers = [results[1]]
            errors = self._errors([x for group in _groups(*results) for x in group])
            outcome["errors"] = [[min(x, 1e99) for x in pair] for pair in errors]
            norm, worst = map(max, zip(*errors, strict=True))
            outcome["error"] = min(norm, 1e99)
            if (np.array(errors) > np.array(self.limits)).any():
                finite = norm + worst < np.inf
                how = f"by {norm:.2g} of the norm, in one place by {worst:.2g}"
                return outcome | {"fault": f"wrong: {how if finite else 'not finite'}"}
            if name == XLA:
                self.limit_by(outcome)

            def call() -> Any:
                out, buffers[0] = program(self.arguments, buffers[0])
                return out

            if self.case.timed:
                outcome["seconds"] = timing.time_call(call, SAMPLES, self.queue).median
        except Exception as error:
            outcome["fault"] = " ".join(f"failed: {type(error).__name__}: {error}".split())[:160]
        return outcome

    def _errors(self, results: list[jax.Array]) -> list[tuple[float, float]]:
        """Of each result and gradient, over its norm and in the worst place; infinite where it is
        not finite."""
        if [x.shape for x in results] != [x.shape for x in self.exact]:
            return [(np.inf, np.inf)] * len(self.exact)
        pairs = [_distance(*triple) for triple in zip(results, self.exact, self.units, strict=True)]
        numbers = np.array(jax.device_get(pairs), np.float64).reshape(-1, 2)
        return [(norm, worst) for norm, worst in np.nan_to_num(numbers, nan=np.inf).tolist()]


def _groups(results: tuple, sums: Any) -> list[list[jax.Array]]:
    """The results; and the gradients, with the sums that they were added to."""
    out, gradients = results
    return [
        [x.astype(jnp.float32) for x in jax.tree.leaves(group)]
        for group in (out, (gradients, [*map(_last_and_others, sums)]))
    ]


@jax.jit
def _last_and_others(stack: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last layer, and the largest number of the others, which must stay zeros."""
    return stack[-1], jnp.max(jnp.abs(stack[:-1]), initial=0.0)


def _rms(x: jax.Array) -> float:
    return float(jnp.sqrt(jnp.mean(x * x))) if x.size else 0.0


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
# The process
# ################################################################################################


def main() -> int:
    """Says what device is here, then does one task."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print goes to standard error

    def send(message: ChildMessage) -> None:
        print(messages.encode(message), file=out, flush=True)

    device = jax.devices()[0]
    card = chip.chip_of(device)
    memory = (device.memory_stats() or {}).get("bytes_limit")
    send(messages.Device(card.platform, card.kind, device.device_kind, jax.device_count(), memory))
    task = messages.decode(sys.stdin.read())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    if task.request:
        target = Chip(*task.pretend) if task.pretend else card
        for message in try_all(task, target):
            send(message)
            fault = message.outcome.get("fault", "") if isinstance(message, messages.Tried) else ""
            if "failed" in fault and not _sound():
                return 1
    send(messages.End())
    return 0


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _sound() -> bool:
    """Whether the device still computes; after a bad address it does not."""
    try:
        return bool(jnp.ones(8).sum() == 8)
    except jax.errors.JaxRuntimeError:
        return False


if __name__ == "__main__":
    sys.exit(main())
