"""What each step of a run is: its phase, its batch, its learning rate; pure functions of the tokens seen.

Progress is counted in tokens (positions, padding included), in Python's integers: 12T of them are no float32.
A run is a row of phases (context length, RoPE base, mixture and batch, `config.schedule.phases`), a phase a
row of segments with one batch size each: a ramp doubles the batch, so that a 12T-token run with a ramp from
256 to 4096 sequences has five segments and its step compiles for five micro-batch counts. A batch ramp moves
neither a phase's borders nor the learning rate, since both are given in tokens.

    plan = schedule.make_plan(config)
    step = plan.at(tokens)                              # or plan.step(number)
    step.micro_batches, step.lr, step.tokens_after, step.phase
    here = schedule.phase_config(config, step.phase)    # what model, data and mesh see in that phase

A step belongs to the phase and segment in which it starts; phases and segments end with the first step that
reaches their border, so their lengths are rounded up to whole steps.
"""

import bisect
import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

from zaya_jax.config import Config, Phase, Schedule, UserError, check_phase


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one batch size."""

    phase: Phase  # with every 0 filled in
    phase_index: int
    sequences: int  # a step, over all devices
    micro_batches: int
    first_step: int  # 1 is the run's first
    num_steps: int
    first_token: int  # seen before its first step

    @property
    def tokens_per_step(self) -> int:
        """Positions a step."""
        return self.sequences * self.phase.seq_len


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the plan."""

    number: int
    phase: Phase
    phase_index: int
    sequences: int
    micro_batches: int
    tokens_before: int
    tokens_after: int
    lr: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """All steps of a run."""

    segments: tuple[Segment, ...]
    schedule: Schedule
    peak_lr: float

    @property
    def total_steps(self) -> int:
        """The number of the last step."""
        last = self.segments[-1]
        return last.first_step + last.num_steps - 1

    @property
    def total_tokens(self) -> int:
        """Tokens seen when it is over."""
        return self.tokens_of_step(self.total_steps)

    @property
    def micro_batch_counts(self) -> tuple[int, ...]:
        """The distinct micro-batch counts: the step is compiled once for each (and each context length)."""
        return tuple(dict.fromkeys(s.micro_batches for s in self.segments))

    def tokens_of_step(self, number: int) -> int:
        """Tokens seen after step `number`; 0 steps have seen none."""
        if not 0 <= number <= self._last(self.segments[-1]):
            raise ValueError(f"step {number} is outside the run's steps 0 to {self._last(self.segments[-1])}")
        segment = self._by("first_step", max(number, 1))
        return segment.first_token + (number - segment.first_step + 1) * segment.tokens_per_step

    def step_of_tokens(self, tokens: int) -> int:
        """The number of steps that have seen exactly so many tokens."""
        segment = self._by("first_token", tokens)
        steps, rest = divmod(tokens - segment.first_token, segment.tokens_per_step)
        if rest or tokens < 0 or steps > segment.num_steps:
            raise ValueError(f"no step of the plan ends after {tokens} tokens")
        return segment.first_step - 1 + steps

    def step(self, number: int) -> Step:
        """Step `number`, from 1."""
        tokens, segment = self.tokens_of_step(number), self._by("first_step", number)
        if number < 1:
            raise ValueError(f"steps are counted from 1, not {number}")
        before = tokens - segment.tokens_per_step
        return Step(
            number,
            segment.phase,
            segment.phase_index,
            segment.sequences,
            segment.micro_batches,
            before,
            tokens,
            self.lr_at(tokens),
        )

    def at(self, tokens: int) -> Step:
        """The step that starts when `tokens` tokens have been seen."""
        return self.step(self.step_of_tokens(tokens) + 1)

    def lr_at(self, tokens: int) -> float:
        """The learning rate of the step that ends after `tokens` tokens."""
        return self.peak_lr * lr_factor(self.schedule, tokens, self.total_tokens)

    @staticmethod
    def _last(segment: Segment) -> int:
        return segment.first_step + segment.num_steps - 1

    def _by(self, field: str, value: int) -> Segment:
        starts = [getattr(s, field) for s in self.segments]
        return self.segments[max(bisect.bisect_right(starts, value) - 1, 0)]


def lr_factor(schedule: Schedule, tokens: int, total: int) -> float:
    """The learning rate over its peak when `tokens` of `total` have been seen: up, constant, down."""
    warmup = schedule.warmup_fraction * total
    if tokens < warmup:
        return tokens / warmup
    start = max(total - schedule.decay_fraction * total, warmup)
    if tokens <= start:
        return 1.0
    done = min((tokens - start) / (total - start), 1.0)
    shape = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "1-sqrt": 1 - math.sqrt(done)}
    return schedule.final_lr_fraction + (1 - schedule.final_lr_fraction) * shape[schedule.decay]


def make_plan(config: Config) -> Plan:
    """The plan of a config: its phases, or one phase of run.num_steps steps where it declares none.

    Where phases are declared, run.num_steps does not lengthen or shorten the schedule; a program may stop
    there.
    """
    whole = config.run.num_steps * config.data.global_batch * config.data.seq_len
    phases = config.schedule.phases or (Phase(name="all", tokens=whole),)
    segments: list[Segment] = []
    tokens, steps = 0, 0  # of the segments so far
    for index, given in enumerate(phases):
        phase, start = _filled(config, given, index), tokens
        for sequences, share in _ramp(phase):
            border = start + (phase.tokens if share is None else int(phase.ramp_tokens * share))
            size = sequences * phase.seq_len
            num_steps = max(-(-(border - tokens) // size), 0)
            if num_steps:
                micro_batches = sequences // phase.micro_batch if phase.micro_batch else 1
                segments.append(Segment(phase, index, sequences, micro_batches, steps + 1, num_steps, tokens))
            tokens, steps = tokens + num_steps * size, steps + num_steps
    return Plan(tuple(segments), config.schedule, config.optim.lr)


def phase_config(config: Config, phase: Phase) -> Config:
    """The config as a phase has it: context, RoPE base, batch, mesh and the like in their usual places."""
    data = dataclasses.replace(
        config.data, seq_len=phase.seq_len, global_batch=phase.global_batch, micro_batch=phase.micro_batch,
        packing=phase.packing,
    )  # fmt: skip
    kinds = config.model.rope_parameters
    hybrid = dataclasses.replace(kinds.hybrid, rope_theta=phase.rope_theta)
    model = dataclasses.replace(config.model, rope_parameters=dataclasses.replace(kinds, hybrid=hybrid))
    assert phase.mesh is not None  # _filled
    return dataclasses.replace(config, data=data, model=model, mesh=phase.mesh, remat=phase.remat)


# Where the values come from that a phase leaves open; the mixture is the data's own affair.
ELSEWHERE = {
    "seq_len": "data.seq_len",
    "rope_theta": "model.rope_parameters.hybrid.rope_theta",
    "global_batch": "data.global_batch",
    "micro_batch": "data.micro_batch",
    "packing": "data.packing",
    "mesh": "mesh",
    "remat": "remat",
}


def key(config: Config, index: int, name: str) -> str:
    """The config key that decides a phase's value: its own, or the one outside that it leaves it to."""
    phases = config.schedule.phases
    if name == "eval_seq_len" and not (phases and phases[index].eval_seq_len):
        name = "seq_len"
    own = bool(phases) and getattr(phases[index], name) not in (0, "", None)
    return f"config.schedule.phases[{index}].{name}" if own else f"config.{ELSEWHERE[name]}"


def _filled(config: Config, phase: Phase, index: int) -> Phase:
    """A phase with a value for everything that it leaves open; UserError where it cannot be."""
    where = f"config.schedule.phases[{index}]"
    check_phase(phase, index)
    outside: dict[str, Any] = {
        name: functools.reduce(getattr, path.split("."), config) for name, path in ELSEWHERE.items()
    }
    phase = dataclasses.replace(
        phase,
        name=phase.name or f"phase {index + 1}",
        **{name: getattr(phase, name) or value for name, value in outside.items()},
    )
    phase = dataclasses.replace(phase, eval_seq_len=phase.eval_seq_len or phase.seq_len)
    for name in ("seq_len", "eval_seq_len"):
        if getattr(phase, name) > config.model.max_position_embeddings:
            raise UserError(
                f"{where}.{name}={getattr(phase, name)} is above model.max_position_embeddings="
                f"{config.model.max_position_embeddings}; raise the latter or shorten the sequences"
            )
    if bool(phase.ramp_from) != bool(phase.ramp_tokens) or phase.ramp_tokens > phase.tokens:
        raise UserError(
            f"{where} ramps the batch from {phase.ramp_from} sequences over {phase.ramp_tokens} of its "
            f"{phase.tokens} tokens; give both, ramp_from and a ramp_tokens within the phase, or neither"
        )
    if phase.ramp_from and (not phase.micro_batch or phase.ramp_from > phase.global_batch):
        raise UserError(
            f"{where}.ramp_from={phase.ramp_from} needs a micro_batch (it is {phase.micro_batch}) and a "
            f"global_batch of at least as many sequences (it is {phase.global_batch}): a ramp changes "
            "the number of micro-batches"
        )
    for sequences, _ in _ramp(phase):
        if phase.micro_batch and sequences % phase.micro_batch:
            raise UserError(
                f"{where} has steps of {sequences} sequences, no multiple of its micro-batch: "
                f"{key(config, index, 'micro_batch')}={phase.micro_batch}; give a {where}.micro_batch that divides "
                f"{math.gcd(*(size for size, _ in _ramp(phase)))}"
            )
    return phase


def _ramp(phase: Phase) -> list[tuple[int, Fraction | None]]:
    """(sequences a step, the share of the ramp where it ends): ramp_from, doubled, then global_batch."""
    sizes, size = [], phase.ramp_from
    while 0 < size < phase.global_batch:
        sizes.append(size)
        size *= 2
    return [
        *((size, Fraction(i + 1, len(sizes))) for i, size in enumerate(sizes)),
        (phase.global_batch, None),
    ]
