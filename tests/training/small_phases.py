"""experiments/configs/tiny_phases.py, smaller still: three steps a phase, for tests that start it
again and again."""

import dataclasses

from experiments.configs import tiny_phases


def get_config():
    """The whole config of the run."""
    c = tiny_phases.get_config()
    c.model.hidden_size, c.model.head_dim, c.model.moe_intermediate_size = 32, 8, 32
    c.model.num_hidden_layers, c.model.router_hidden_size = 1, 8
    sizes = [(32, 16, 32, 8), (16, 32, 32, 0), (64, 16, 128, 8), (128, 4, 128, 0)]  # per phase
    c.schedule.phases = tuple(
        dataclasses.replace(
            phase,
            seq_len=length,
            global_batch=batch,
            eval_seq_len=evaluation,
            ramp_from=ramp,
            micro_batch=max(phase.micro_batch // 2, 8) if batch > 8 else 2,
            tokens=5 * length * batch // 2 if ramp else 3 * length * batch,
            ramp_tokens=length * batch // 2 if ramp else 0,
            mixture=tuple(part.replace("*.py", "json") for part in phase.mixture),
        )
        for phase, (length, batch, evaluation, ramp) in zip(c.schedule.phases, sizes, strict=True)
    )
    c.eval.every, c.eval.windows, c.log.sample_tokens, c.checkpoint.every_steps = 2, 4, 4, 2
    return c
