"""Rules between keys of a config; a key's own rule is declared in keys.py, those of batches are the
schedule's."""

import re

from zaya_jax.config.fields import UserError, nearest, shown
from zaya_jax.config.keys import Config, Model, Run, Schedule


def check_config(c: Config) -> None:
    """UserError if two keys contradict each other."""
    check_model(c.model)
    _check_run(c.run)
    if c.run.base != "compute" and c.model.model_type == "dense":
        raise UserError(
            f"config.run.base={c.run.base} is for experts, which a dense model does not have; leave"
            " it out"
        )
    _check_kernels(c.kernels)
    _check_rates(c.schedule)
    if c.log.profile and not re.fullmatch(r"[1-9]\d{0,8}(:[1-9]\d{0,3})?", c.log.profile):
        raise UserError(
            f"config.log.profile={shown(c.log.profile)} is not STEP or STEP:STEPS, such as 100:3"
        )
    if c.data.chats:
        _check_chats(c)
    if c.run.takes_pairs:
        _check_preference(c)


def _check_chats(c: Config) -> None:
    packings = {c.data.packing, *(phase.packing for phase in c.schedule.phases)} - {""}
    if "concat" in packings or c.data.cross_documents:
        given = "packing='concat'" if "concat" in packings else "cross_documents=True"
        raise UserError(
            f"config.data.chats is set with {given}, which would part answers from their questions"
            " or mix chats; give --config.data.packing=best_fit and no cross_documents"
        )
    for i, phase in enumerate(c.schedule.phases):
        for key in ("seq_len", "eval_seq_len"):
            if getattr(phase, key) not in (0, c.data.seq_len):
                raise UserError(
                    f"config.schedule.phases[{i}].{key}={getattr(phase, key)}, but"
                    f" config.data.chats fits chats to one context, data.seq_len={c.data.seq_len};"
                    " leave it out, or take data.chats away and give each phase chats that were"
                    " prepared for its context"
                )


def _check_preference(c: Config) -> None:
    needed = {
        "run.init_from, whose weights the trained ones are compared with": bool(c.run.init_from),
        "data.chats=True, for pairs of answers": c.data.chats,
        "balance.enabled=False, since the reference has the biases too": not c.balance.enabled,
        "optim.z_loss=0, a part of the loss of tokens": not c.optim.z_loss,
    }
    missing = [what for what, given in needed.items() if not given]
    if missing:
        raise UserError(
            f"config.run.preference={c.run.preference!r} needs {'; '.join(missing)}; or give"
            " --config=experiments/configs/finetune.py:MODEL,preference=dpo, which sets them"
        )


def _check_rates(s: Schedule) -> None:
    for i, phase in enumerate(s.phases):
        falls = phase.lr_end is not None or phase.schedule
        if falls and (not phase.lr or phase.lr_end is None):
            raise UserError(
                f"config.schedule.phases[{i}] has lr={phase.lr}, lr_end={phase.lr_end} and"
                f" schedule={phase.schedule!r}; give lr for a constant rate, lr and lr_end for one"
                " that falls, with or without a schedule"
            )
    if s.decay_steps and s.phases and s.phases[-1].lr:
        raise UserError(
            f"config.schedule.decay_steps={s.decay_steps} would end the run's schedule, but"
            f" schedule.phases[{len(s.phases) - 1}].lr gives the last phase a rate of its own;"
            " leave decay_steps out and give that phase an lr_end, or leave its lr out"
        )


def _check_run(r: Run) -> None:
    if r.fork and r.init_from:
        raise UserError(
            f"config.run.fork={r.fork} and config.run.init_from={r.init_from} are both given; a run"
            " begins from one: fork takes the optimizer's state too, init_from the weights alone"
        )
    if bool(r.fork_step) != bool(r.fork_tokens) or (r.fork_step and not r.fork):
        raise UserError(
            f"config.run.fork_step={r.fork_step} and fork_tokens={r.fork_tokens} are filled in"
            " where run.fork names a run; leave them out"
        )
    if r.lora is not None and not r.init_from:
        raise UserError(
            f"config.run.lora={r.lora} is given without config.run.init_from: low-rank updates are"
            " of weights that are there; name a model, or give"
            " --config=experiments/configs/finetune.py:MODEL,lora=RANK"
        )
    if r.base != "compute" and r.lora is None:
        raise UserError(
            f"config.run.base={r.base} is given without config.run.lora: only frozen weights are"
            " kept in few bits; give a rank, such as --config.run.lora=16"
        )


def _check_kernels(names: tuple[str, ...]) -> None:
    alone = ("auto", "all", "none")
    if len(names) == 1 and names[0] in alone:
        return
    # imports JAX, which a config of default kernels does not need
    from pallas_kernels.chip import OPERATORS

    for i, name in enumerate(names):
        if name not in OPERATORS:
            near = "" if name in alone else nearest(name, OPERATORS)
            raise UserError(
                f"config.kernels[{i}]={shown(name)} is not one of {', '.join(OPERATORS)}{near};"
                " 'auto', 'all' and 'none' stand alone, several are"
                f" --config.kernels=\"('{OPERATORS[0]}', '{OPERATORS[-1]}')\""
            )


def check_model(m: Model, prefix: str = "config.model.") -> None:
    """UserError if keys of a model contradict each other; it names them behind `prefix`."""
    if m.num_attention_heads % m.num_key_value_heads:
        raise UserError(
            f"{prefix}num_attention_heads={m.num_attention_heads} is not a multiple of"
            f" num_key_value_heads={m.num_key_value_heads}; each key-value head serves an equal"
            " group of query heads"
        )
    if m.num_key_value_heads * m.head_dim % 2:
        raise UserError(
            f"{prefix}num_key_value_heads x head_dim = {m.num_key_value_heads * m.head_dim} is"
            " odd; half of the value channels come from the token before, so it must be even"
        )
    if m.layer_types and len(m.layer_types) != m.num_hidden_layers:
        raise UserError(
            f"{prefix}layer_types names {len(m.layer_types)} layers,"
            f' num_hidden_layers={m.num_hidden_layers}; give one kind per layer, or () for "hybrid"'
            " throughout"
        )
    if "hybrid_sliding" in m.kinds and (m.sliding_window is None or m.sliding_window < 1):
        raise UserError(
            f"{prefix}sliding_window={m.sliding_window} but layer_types has hybrid_sliding"
            " layers; give the window in tokens, the query included"
        )
    if m.model_type == "dense":
        _check_dense(m, prefix)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if (getattr(m, name) or 0) >= m.vocab_size:
            raise UserError(
                f"{prefix}{name}={getattr(m, name)} is outside the vocabulary of"
                f" model.vocab_size={m.vocab_size}; give an id from 0 to {m.vocab_size - 1}, or"
                " None for the tokenizer's"
            )
    for kind in sorted(set(m.kinds) - {"hybrid_linear"}):
        rope = getattr(m.rope_parameters, kind)
        if int(m.head_dim * rope.partial_rotary_factor) % 2:
            raise UserError(
                f"{prefix}rope_parameters.{kind}.partial_rotary_factor={rope.partial_rotary_factor}"
                f" turns {m.head_dim * rope.partial_rotary_factor:g} of {m.head_dim} channels; it"
                " must be an even number"
            )


def _check_dense(m: Model, prefix: str) -> None:
    needed = {
        "intermediate_size of at least 1, the width of the gated MLP": m.intermediate_size > 0,
        "num_experts=1": m.num_experts == 1,
        "attention_bias=False": not m.attention_bias,
        "layer_types without hybrid_linear": "hybrid_linear" not in m.kinds,
    }
    missing = [what for what, given in needed.items() if not given]
    if missing:
        raise UserError(f"{prefix}model_type='dense' needs {'; '.join(missing)}")
