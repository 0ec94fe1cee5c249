"""Plans a whole run on a cluster phase by phase: step, memory, storage, days and GPU-hours."""

import dataclasses
import math

from zaya_jax import schedule
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import targets
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.plan import footprint, goodput, step_time
from zaya_jax.plan.case import StepCase
from zaya_jax.plan.footprint import Footprint
from zaya_jax.plan.goodput import Saving
from zaya_jax.plan.rates import Rates
from zaya_jax.plan.step_time import StepTime
from zaya_jax.text.shard_format import PAGE_BYTES
from zaya_jax.training import recipe

READ_AMPLIFICATION = (
    2.0  # page reads for one that the tokens fill: the most of well-packed shards (SPEC: 1 to 2)
)
DAY = 86_400.0


def page_reads(sigma: float, tokens: int, token_bytes: int) -> float:
    """N: the page reads of a step's tokens, sigma for each page that they fill.

    A step of t seconds needs N/t page reads a second, and storage that can do I of them is the
    limit for steps shorter than N/I.
    """
    return sigma * tokens * token_bytes / PAGE_BYTES


@dataclasses.dataclass(frozen=True)
class PlannedPhase:
    """One phase with its step of the full batch, and its ramp's smaller steps."""

    case: StepCase
    step: StepTime
    memory: Footprint
    name: str
    capacity: int  # bytes that the chip has for it
    saving: Saving
    tokens: int
    steps: int
    seconds: float  # of all its steps, without failures and saves
    page_reads: float  # per step

    @property
    def days(self) -> float:
        """Days, failures and saves included."""
        return self.seconds / self.saving.goodput / DAY

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all devices."""
        return self.days * 24 * self.case.devices

    @property
    def tokens_per_second(self) -> float:
        """The rate of the cluster, while it computes."""
        return self.case.tokens_per_device * self.case.devices / self.step.seconds


def plan_run(
    config: Config,
    devices: int,
    cluster: Cluster,
    rates: Rates,
    at_once: int = 0,
    mtbf_hours: float = goodput.MTBF_HOURS.value,
) -> tuple[list[PlannedPhase], list[str]]:
    """All phases of a run that so many devices can train, and a note on each that needs another
    number of them; UserError where none can be trained."""
    capacity = targets.memory_for_jax(cluster.chip)
    planned: list[PlannedPhase] = []
    refusals: list[UserError] = []
    for _, segments, *_ in schedule.phases_of(config, schedule.make_plan(config)):
        try:
            portions = [
                recipe.place_segment(config, segment, devices, at_once) for segment in segments
            ]
        except UserError as error:
            refusals.append(error)
            continue
        seconds, steps, tokens = 0.0, 0, 0
        # The smaller batches of a ramp come first; the last segment has the full batch.
        for segment, portion in zip(segments, portions, strict=True):
            phase_config, spread, sequences, micro_batches = portion
            case = StepCase(phase_config, spread, cluster.chip, sequences, micro_batches)
            step = step_time.estimate(case, cluster, rates)
            segment_tokens = segment.num_steps * segment.tokens_per_step
            segment_steps = math.ceil(segment_tokens / (sequences * phase_config.data.seq_len))
            tokens += segment_tokens
            steps += segment_steps
            seconds += segment_steps * step.seconds
        batch = case.sequences * case.config.data.seq_len
        token_bytes = 2 if case.model.vocab_size <= 2**16 else 4
        planned.append(
            PlannedPhase(
                case,
                step,
                footprint.estimate(case),
                segments[0].phase.name,
                capacity,
                goodput.saving(case, cluster, mtbf_hours),
                tokens,
                steps,
                seconds,
                page_reads(READ_AMPLIFICATION, batch, token_bytes),
            )
        )
    if not planned:
        raise refusals[0]
    notes = [f"needs another number of devices: {error}" for error in refusals]
    if config.kernels not in (("all",), ("auto",)):
        notes.append(
            "The plan assumes all of our kernels; the config has"
            f" --config.kernels={','.join(config.kernels)}"
        )
    return planned, notes
