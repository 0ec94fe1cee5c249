"""Computes each step's phase, batch and learning rate, as pure functions of the tokens seen.

Progress is counted in tokens (positions, padding included), in Python's integers: float32 cannot
count 12T exactly. A run is a row of phases (context length, RoPE base, mixture and batch,
`config.schedule.phases`), and a phase a row of segments with one batch size each: a ramp doubles
the batch. A 12T-token run with a ramp from 256 to 4096 sequences has five segments. The step is
compiled once per segment, because the number (or size) of its micro-batches differs. A batch ramp
moves neither a phase's borders nor the learning rate, since both are given in tokens.
`learning_rate` is the whole rule of the latter.

    plan = schedule.make_plan(config)
    step = plan.step(number)
    step.micro_batches, step.lr, step.tokens_after, step.phase
    config = schedule.phase_config(config, step.phase)    for the model, the data and the mesh in that phase

A step belongs to the phase and segment in which it starts; phases and segments end with the first
step that reaches their border, so their lengths are rounded up to whole steps.

The plan of a fork (`config.run.fork`) is that of the whole run, without the steps of the parent: it
begins with the step after `run.fork_step`, and counts steps and tokens from the parent's first. Its
own phases do not apply to the steps before.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.config import Config, Phase, Schedule, UserError


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one batch size."""

    phase: Phase  # with every 0 filled in
    phase_index: int
    sequences: int  # per step, over all devices
    micro_batches: int
    first_step: int  # 1 is the run's first
    num_steps: int
    tokens_before: int
    tokens_before_phase: int  # also if a fork begins in the middle of that

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
    def steps_before(self) -> int:
        """The steps before the plan's first: 0, or a fork's parent's."""
        return self.segments[0].first_step - 1

    @property
    def last_step(self) -> int:
        """The number of the last step."""
        last = self.segments[-1]
        return last.first_step + last.num_steps - 1

    @property
    def tokens_at_end(self) -> int:
        """Tokens seen after the last step, a parent's included."""
        return self.tokens_of_step(self.last_step)

    def tokens_of_step(self, number: int) -> int:
        """Tokens seen after step `number`, from `steps_before` on."""
        if not self.steps_before <= number <= self.last_step:
            raise ValueError(
                f"step {number} is outside the run's steps {self.steps_before} to {self.last_step}"
            )
        segment = self._segment_at(number)
        return segment.tokens_before + (number - segment.first_step + 1) * segment.tokens_per_step

    def step(self, number: int) -> Step:
        """Step `number`, from 1."""
        segment = self._segment_at(number)
        if number < segment.first_step:
            raise ValueError(f"steps are counted from {segment.first_step}, not {number}")
        tokens = self.tokens_of_step(number)
        return Step(
            number=number,
            phase=segment.phase,
            phase_index=segment.phase_index,
            sequences=segment.sequences,
            micro_batches=segment.micro_batches,
            tokens_after=tokens,
            lr=learning_rate(self, tokens, segment),
        )

    def _segment_at(self, number: int) -> Segment:
        after = bisect.bisect_right(self.segments, number, key=lambda segment: segment.first_step)
        return self.segments[max(after - 1, 0)]


def learning_rate(plan: Plan, tokens: int, segment: Segment) -> float:
    """The learning rate of the step of `segment` that ends after `tokens` tokens.

    Up, constant, down: it rises from 0 over the run's first tokens, and falls over its last ones,
    or, in a phase with its own rate, from that phase's first token to its last. The decay never
    starts before the warm-up has ended.
    """
    phase, settings = segment.phase, plan.schedule
    if phase.lr:
        assert phase.lr_end is not None  # _with_defaults
        peak, final, shape = phase.lr, phase.lr_end / phase.lr, phase.schedule
        decay_begin: float = segment.tokens_before_phase
        decay_end = segment.tokens_before_phase + phase.tokens
    else:
        peak, final, shape = plan.peak_lr, settings.final_lr_fraction, settings.decay
        decay_begin, decay_end = plan.decay_begin, plan.tokens_at_end
    warmup = settings.warmup_fraction * plan.tokens_at_end
    if tokens < warmup:
        return peak * (tokens / warmup)
    decay_begin = max(decay_begin, warmup)
    if tokens <= decay_begin:
        return peak
    done = min((tokens - decay_begin) / max(decay_end - decay_begin, 1), 1)
    left = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "1-sqrt": 1 - math.sqrt(done),
    }
    return peak * (final + (1 - final) * left[shape])


def make_plan(config: Config) -> Plan:
    """The plan of a config: its phases, or one phase of run.num_steps steps if it declares none.

    If phases are declared, run.num_steps does not lengthen or shorten the schedule; a process may
    stop there.
    """
    whole_run = _segments(config)
    plan = Plan(_remaining(whole_run, config), config.schedule, config.optim.lr)
    whole_plan = dataclasses.replace(plan, segments=tuple(whole_run))
    return dataclasses.replace(plan, decay_begin=_decay_begin(plan, whole_plan, config))


def _segments(config: Config) -> list[Segment]:
    """The segments of the whole run, those before a fork's first step included."""
    run, data = config.run, config.data
    phases = config.schedule.phases
    if not phases:
        tokens_per_step = data.global_batch * data.seq_len
        own_tokens = max(run.num_steps - run.fork_step, 0) * tokens_per_step
        phases = (Phase(name="all", tokens=run.fork_tokens + own_tokens),)
    segments: list[Segment] = []
    tokens, steps = 0, 0  # of the segments so far
    for index, declared in enumerate(phases):
        phase = _with_defaults(config, declared, index)
        _check_phase(config, phase, index)
        phase_begin = tokens
        for sequences, end in _ramp(phase):
            tokens_per_step = sequences * phase.seq_len
            num_steps = max(_ceil_div(phase_begin + end - tokens, tokens_per_step), 0)
            if num_steps:
                micro_batches = max(sequences // phase.micro_batch, 1)
                segments.append(
                    Segment(
                        phase=phase,
                        phase_index=index,
                        sequences=sequences,
                        micro_batches=micro_batches,
                        first_step=steps + 1,
                        num_steps=num_steps,
                        tokens_before=tokens,
                        tokens_before_phase=phase_begin,
                    )
                )
            tokens += num_steps * tokens_per_step
            steps += num_steps
    return segments


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _decay_begin(plan: Plan, whole_plan: Plan, config: Config) -> float:
    """The tokens before the last `schedule.decay_steps` steps, or before `decay_fraction` of all.

    These steps may begin before a fork's first, if its parent's were as `whole_plan` has them.
    """
    steps = config.schedule.decay_steps
    if not steps:
        return plan.tokens_at_end - config.schedule.decay_fraction * plan.tokens_at_end
    constant_steps, parent_steps = plan.last_step - steps, plan.steps_before
    if constant_steps >= parent_steps:
        return plan.tokens_of_step(constant_steps)
    if (
        0 <= constant_steps < parent_steps <= whole_plan.last_step
        and whole_plan.tokens_of_step(parent_steps) == config.run.fork_tokens
    ):
        return whole_plan.tokens_of_step(constant_steps)
    start = f"run.fork={config.run.fork}" if parent_steps else "the start"
    raise UserError(
        f"config.schedule.decay_steps={steps}, but {plan.last_step - parent_steps} steps come after"
        f" {start}; give at most as many"
    )


def _remaining(segments: list[Segment], config: Config) -> tuple[Segment, ...]:
    """The segments that remain after the steps and tokens of a fork's parent; all without one."""
    steps, tokens = config.run.fork_step, config.run.fork_tokens
    left = []
    for segment in segments:
        end = segment.tokens_before + segment.num_steps * segment.tokens_per_step
        if not config.schedule.phases:  # its length is given in steps
            end = tokens + (config.run.num_steps - steps) * segment.tokens_per_step
        num_steps = max(_ceil_div(end - tokens, segment.tokens_per_step), 0)
        if num_steps:
            left.append(
                dataclasses.replace(
                    segment, first_step=steps + 1, num_steps=num_steps, tokens_before=tokens
                )
            )
        tokens += num_steps * segment.tokens_per_step
        steps += num_steps
    if not left:
        raise UserError(
            f"config.schedule.phases or run.num_steps end after {end:,} tokens, but"
            f" run.fork={config.run.fork} has seen {tokens:,}; both are counted from the start of"
            " the parent run: lengthen the last phase, add one, or give more steps"
        )
    return tuple(left)


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
    assert phase.mesh is not None  # _with_defaults
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


# The run-wide key of each value that a phase need not set. (`data` resolves the mixture.)
RUN_WIDE_KEYS = {
    "seq_len": "data.seq_len",
    "rope_theta": "model.rope_parameters.hybrid.rope_theta",
    "global_batch": "data.global_batch",
    "micro_batch": "data.micro_batch",
    "packing": "data.packing",
    "mesh": "mesh",
    "remat": "remat",
}


def key(config: Config, index: int, name: str) -> str:
    """The config key that decides a phase's value: its own if it is set, otherwise the run-wide
    one."""
    phases = config.schedule.phases
    if name == "eval_seq_len" and not (phases and phases[index].eval_seq_len):
        name = "seq_len"
    if phases and getattr(phases[index], name) not in (0, "", None):
        return f"config.schedule.phases[{index}].{name}"
    return f"config.{RUN_WIDE_KEYS[name]}"


def _with_defaults(config: Config, phase: Phase, index: int) -> Phase:
    """A phase with a value for everything that it does not set."""
    values: dict[str, Any] = {}
    for name, path in RUN_WIDE_KEYS.items():
        values[name] = getattr(phase, name) or functools.reduce(getattr, path.split("."), config)
    phase = dataclasses.replace(phase, name=phase.name or f"phase {index + 1}", **values)
    return dataclasses.replace(
        phase,
        eval_seq_len=phase.eval_seq_len or phase.seq_len,
        micro_batch=min(phase.micro_batch or phase.global_batch, phase.global_batch),
        lr_end=phase.lr if phase.lr_end is None else phase.lr_end,
        schedule=phase.schedule or config.schedule.decay,
    )


def _check_phase(config: Config, phase: Phase, index: int) -> None:
    """UserError if a phase with all its values cannot be trained."""
    where = f"config.schedule.phases[{index}]" if config.schedule.phases else "config.data"
    for name in ("seq_len", "eval_seq_len"):
        if getattr(phase, name) > config.model.max_position_embeddings:
            raise UserError(
                f"{key(config, index, name)}={getattr(phase, name)} is above"
                f" model.max_position_embeddings={config.model.max_position_embeddings}; raise the"
                " latter or shorten the sequences"
            )
    half = bool(phase.ramp_from) != bool(phase.ramp_tokens)
    if half or phase.ramp_from > phase.global_batch or phase.ramp_tokens > phase.tokens:
        raise UserError(
            f"{where} ramps the batch from {phase.ramp_from} to {phase.global_batch} sequences over"
            f" {phase.ramp_tokens} of its {phase.tokens} tokens; give both, a ramp_from of at most"
            " global_batch and a ramp_tokens within the phase, or neither"
        )
    sizes = [size for size, _ in _ramp(phase)]
    for size in sizes:
        if size % min(size, phase.micro_batch):
            raise UserError(
                f"{where} has steps of {size} sequences, no multiple of its micro-batch:"
                f" {key(config, index, 'micro_batch')}={phase.micro_batch}; give a"
                f" {where}.micro_batch that divides {math.gcd(*sizes)}"
            )


def _ramp(phase: Phase) -> list[tuple[int, int]]:
    """(sequences per step, the tokens of the phase after which they end): ramp_from, doubled, then
    global_batch."""
    sizes, size = [], phase.ramp_from
    while 0 < size < phase.global_batch:
        sizes.append(size)
        size *= 2
    ends = [phase.ramp_tokens * (i + 1) // len(sizes) for i in range(len(sizes))]
    return [*zip(sizes, ends, strict=True), (phase.global_batch, phase.tokens)]


def phase_at(config: Config, step: int) -> Phase:
    """The phase that a checkpoint of this step was trained in."""
    plan = make_plan(config)
    step = max(step, plan.segments[0].first_step)  # a fork's first checkpoint is from before that
    return plan.step(min(step, plan.last_step)).phase
