"""Computes each step's phase, batch and learning rate, as pure functions of the tokens seen.

Progress is counted in tokens (positions, padding included), in Python's integers: 12T of them are
no float32. A run is a row of phases (context length, RoPE base, mixture and batch,
`config.schedule.phases`), a phase a row of segments with one batch size each: a ramp doubles the
batch, so that a 12T-token run with a ramp from 256 to 4096 sequences has five segments and its step
compiles for five of them: for other numbers of micro-batches, or for smaller ones where a step has
fewer sequences than a micro-batch. A batch ramp moves neither a phase's borders nor the learning
rate, since both are given in tokens. `learning_rate` is the whole rule of the latter.

    plan = schedule.make_plan(config)
    step = plan.step(number)
    step.micro_batches, step.lr, step.tokens_after, step.phase
    here = schedule.phase_config(config, step.phase)    # for the model, the data and the mesh in that phase

A step belongs to the phase and segment in which it starts; phases and segments end with the first
step that reaches their border, so their lengths are rounded up to whole steps.

A fork's plan (`config.run.fork`) counts steps and tokens from its parent's first: it is of the
whole run, and begins with the step after `run.fork_step`. Its own phases do not apply to the steps
before.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from zaya_jax.config import Config, Phase, Schedule, UserError, fields


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one batch size."""

    phase: Phase  # with every 0 filled in
    phase_index: int
    sequences: int  # per step, over all devices
    micro_batches: int
    first_step: int  # 1 is the run's first
    num_steps: int
    first_token: int  # seen before its first step
    phase_begin: int  # tokens before its phase, also where a fork begins in the middle of that

    @property
    def tokens_per_step(self) -> int:
        """Positions per step."""
        return self.sequences * self.phase.seq_len


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the plan."""

    number: int
    phase: Phase
    phase_index: int
    sequences: int
    micro_batches: int
    tokens_after: int
    lr: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """All steps of a run."""

    segments: tuple[Segment, ...]
    schedule: Schedule
    peak_lr: float
    decay_begin: float = 0  # tokens after which the run's learning rate falls

    @property
    def begin(self) -> int:
        """The step before the first: 0, or a fork's."""
        return self.segments[0].first_step - 1

    @property
    def total_steps(self) -> int:
        """The number of the last step."""
        last = self.segments[-1]
        return last.first_step + last.num_steps - 1

    @property
    def total_tokens(self) -> int:
        """Tokens seen when it is over."""
        return self.tokens_of_step(self.total_steps)

    def tokens_of_step(self, number: int) -> int:
        """Tokens seen after step `number`; 0 steps have seen none, those before a fork's first its
        parent's."""
        if not self.begin <= number <= self.total_steps:
            raise ValueError(
                f"step {number} is outside the run's steps {self.begin} to {self.total_steps}"
            )
        segment = self._segment_at(number)
        return segment.first_token + (number - segment.first_step + 1) * segment.tokens_per_step

    def step(self, number: int) -> Step:
        """Step `number`, from 1."""
        tokens, segment = self.tokens_of_step(number), self._segment_at(number)
        if number < segment.first_step:
            raise ValueError(f"steps are counted from {segment.first_step}, not {number}")
        return Step(
            number,
            segment.phase,
            segment.phase_index,
            segment.sequences,
            segment.micro_batches,
            tokens,
            learning_rate(self, tokens, segment),
        )

    def _segment_at(self, number: int) -> Segment:
        after = bisect.bisect_right(self.segments, number, key=lambda segment: segment.first_step)
        return self.segments[max(after - 1, 0)]


def learning_rate(plan: Plan, tokens: int, segment: Segment) -> float:
    """The learning rate of the step of `segment` that ends after `tokens` tokens.

    Up, constant, down: it rises from 0 over the run's first tokens, and falls over its last ones,
    or in a phase with a rate of its own from that phase's first token to its last. A fall begins
    behind the rise in any case.
    """
    phase, run = segment.phase, plan.schedule
    peak, final, shape = plan.peak_lr, run.final_lr_fraction, run.decay
    fall_begin, fall_end = plan.decay_begin, plan.total_tokens
    if phase.lr:
        assert phase.lr_end is not None  # _filled
        peak, final, shape = phase.lr, phase.lr_end / phase.lr, phase.schedule
        fall_begin, fall_end = segment.phase_begin, segment.phase_begin + phase.tokens
    warmup = run.warmup_fraction * plan.total_tokens
    if tokens < warmup:
        return peak * (tokens / warmup)
    fall_begin = max(fall_begin, warmup)
    if tokens <= fall_begin:
        return peak
    done = min((tokens - fall_begin) / max(fall_end - fall_begin, 1), 1)
    left = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "1-sqrt": 1 - math.sqrt(done),
    }
    return peak * (final + (1 - final) * left[shape])


def make_plan(config: Config) -> Plan:
    """The plan of a config: its phases, or one phase of run.num_steps steps where it declares none.

    Where phases are declared, run.num_steps does not lengthen or shorten the schedule; a program
    may stop there.
    """
    begun, seen = config.run.fork_step, config.run.fork_tokens
    batch = config.data.global_batch * config.data.seq_len
    whole = Phase(name="all", tokens=seen + max(config.run.num_steps - begun, 0) * batch)
    phases = config.schedule.phases or (whole,)
    segments: list[Segment] = []
    tokens, steps = 0, 0  # of the segments so far
    for index, given in enumerate(phases):
        phase, start = _filled(config, given, index), tokens
        for sequences, share in _ramp(phase):
            border = start + (phase.tokens if share is None else int(phase.ramp_tokens * share))
            size = sequences * phase.seq_len
            num_steps = max(-(-(border - tokens) // size), 0)
            if num_steps:
                micro_batches = sequences // (phase.micro_batch or sequences) or 1
                segments.append(
                    Segment(
                        phase, index, sequences, micro_batches, steps + 1, num_steps, tokens, start
                    )
                )
            tokens, steps = tokens + num_steps * size, steps + num_steps
    plan = Plan(_after(segments, begun, seen, config), config.schedule, config.optim.lr)
    whole_run = dataclasses.replace(plan, segments=tuple(segments))
    return dataclasses.replace(plan, decay_begin=_decay_begin(plan, whole_run, config))


def _decay_begin(plan: Plan, whole_run: Plan, config: Config) -> float:
    """The tokens before the last `schedule.decay_steps` steps, or before `decay_fraction` of all.

    The steps may have begun before a fork's first, if its parent's were as `whole_run` has them.
    """
    steps = config.schedule.decay_steps
    if not steps:
        return plan.total_tokens - config.schedule.decay_fraction * plan.total_tokens
    before, begin = plan.total_steps - steps, plan.begin
    if before >= begin:
        return plan.tokens_of_step(before)
    if (
        0 <= before < begin <= whole_run.total_steps
        and whole_run.tokens_of_step(begin) == config.run.fork_tokens
    ):
        return whole_run.tokens_of_step(before)
    raise UserError(
        f"config.schedule.decay_steps={steps}, but {plan.total_steps - begin} steps come after"
        f" {f'run.fork={config.run.fork}' if begin else 'the start'}; give at most as many"
    )


def _after(segments: list[Segment], steps: int, tokens: int, config: Config) -> tuple[Segment, ...]:
    """The rest of some segments when a run has seen so many tokens in so many steps, its own or its
    parent's."""
    left = []
    for segment in segments:
        end = segment.first_token + segment.num_steps * segment.tokens_per_step
        if not config.schedule.phases:  # its length is given in steps
            end = tokens + (config.run.num_steps - steps) * segment.tokens_per_step
        num_steps = max(-(-(end - tokens) // segment.tokens_per_step), 0)
        if num_steps:
            left.append(
                dataclasses.replace(
                    segment, first_step=steps + 1, num_steps=num_steps, first_token=tokens
                )
            )
        tokens, steps = tokens + num_steps * segment.tokens_per_step, steps + num_steps
    if left:
        return tuple(left)
    if config.schedule.phases:
        raise UserError(
            f"config.schedule.phases end after {end:,} tokens, but run.fork={config.run.fork} has"
            f" seen {tokens:,}; phases count from the run's begin, so give longer ones or one more"
        )
    raise UserError(
        f"config.run.num_steps={config.run.num_steps}, but run.fork={config.run.fork} has reached"
        f" step {steps}; it counts from the run's begin, so give more"
    )


def phase_config(config: Config, phase: Phase) -> Config:
    """The config as a phase has it: context, RoPE base, batch, mesh and the like in their usual
    places."""
    data = dataclasses.replace(
        config.data,
        seq_len=phase.seq_len,
        global_batch=phase.global_batch,
        micro_batch=phase.micro_batch,
        packing=phase.packing,
    )
    kinds = config.model.rope_parameters
    hybrid = dataclasses.replace(kinds.hybrid, rope_theta=phase.rope_theta)
    model = dataclasses.replace(
        config.model, rope_parameters=dataclasses.replace(kinds, hybrid=hybrid)
    )
    assert phase.mesh is not None  # _filled
    return dataclasses.replace(config, data=data, model=model, mesh=phase.mesh, remat=phase.remat)


def phases_of(
    config: Config, plan: Plan
) -> Iterator[tuple[int, tuple[Segment, ...], Config, Callable[[str], str]]]:
    """(index, segments, config, the config key that decides a value) of each phase of the plan."""
    for index, group in itertools.groupby(plan.segments, key=lambda segment: segment.phase_index):
        segments = tuple(group)
        yield (
            index,
            segments,
            phase_config(config, segments[0].phase),
            functools.partial(key, config, index),
        )


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
    """The config key that decides a phase's value: its own, or the one outside that it leaves it
    to."""
    phases = config.schedule.phases
    if name == "eval_seq_len" and not (phases and phases[index].eval_seq_len):
        name = "seq_len"
    own = bool(phases) and getattr(phases[index], name) not in (0, "", None)
    return f"config.schedule.phases[{index}].{name}" if own else f"config.{ELSEWHERE[name]}"


def _filled(config: Config, phase: Phase, index: int) -> Phase:
    """A phase with a value for everything that it leaves open; UserError where it cannot be."""
    where = f"config.schedule.phases[{index}]" if config.schedule.phases else "config.data"
    fields.check_fields(phase, f"config.schedule.phases[{index}].")
    outside: dict[str, Any] = {
        name: functools.reduce(getattr, path.split("."), config) for name, path in ELSEWHERE.items()
    }
    phase = dataclasses.replace(
        phase,
        name=phase.name or f"phase {index + 1}",
        **{name: getattr(phase, name) or value for name, value in outside.items()},
    )
    phase = dataclasses.replace(
        phase,
        eval_seq_len=phase.eval_seq_len or phase.seq_len,
        micro_batch=min(phase.micro_batch, phase.global_batch),
        lr_end=phase.lr if phase.lr_end is None else phase.lr_end,
        schedule=phase.schedule or config.schedule.decay,
    )
    for name in ("seq_len", "eval_seq_len"):
        if getattr(phase, name) > config.model.max_position_embeddings:
            raise UserError(
                f"{key(config, index, name)}={getattr(phase, name)} is above"
                f" model.max_position_embeddings={config.model.max_position_embeddings}; raise the"
                " latter or shorten the sequences"
            )
    if bool(phase.ramp_from) != bool(phase.ramp_tokens) or phase.ramp_tokens > phase.tokens:
        raise UserError(
            f"{where} ramps the batch from {phase.ramp_from} sequences over {phase.ramp_tokens} of"
            f" its {phase.tokens} tokens; give both, ramp_from and a ramp_tokens within the phase,"
            " or neither"
        )
    if phase.ramp_from > phase.global_batch:
        raise UserError(
            f"{where}.ramp_from={phase.ramp_from} needs a global_batch of at least as many"
            f" sequences (it is {phase.global_batch})"
        )
    for sequences, _ in _ramp(phase):
        if phase.micro_batch and sequences % min(sequences, phase.micro_batch):
            raise UserError(
                f"{where} has steps of {sequences} sequences, no multiple of its micro-batch:"
                f" {key(config, index, 'micro_batch')}={phase.micro_batch}; give a"
                f" {where}.micro_batch that divides {math.gcd(*(size for size, _ in _ramp(phase)))}"
            )
    return phase


def _ramp(phase: Phase) -> list[tuple[int, Fraction | None]]:
    """(sequences per step, the share of the ramp where it ends): ramp_from, doubled, then
    global_batch."""
    sizes, size = [], phase.ramp_from
    while 0 < size < phase.global_batch:
        sizes.append(size)
        size *= 2
    return [
        *((size, Fraction(i + 1, len(sizes))) for i, size in enumerate(sizes)),
        (phase.global_batch, None),
    ]


def phase_at(config: Config, step: int) -> Phase:
    """The phase that a checkpoint of this step was trained in."""
    plan = make_plan(config)
    step = max(step, plan.segments[0].first_step)  # a fork's first checkpoint is from before that
    return plan.step(min(step, plan.total_steps)).phase
