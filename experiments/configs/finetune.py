"""Fine-tuning on chats: the weights of any run, or imported ones, learn to answer as the chats do.

    python -m experiments.pretrain --config=experiments/configs/finetune.py:RUN --workdir=runs/tuned \
        --config.data.path=chats.jsonl [--config.run.num_steps=200]

RUN is a run's folder, FOLDER@STEP, a directory of transformers' zaya, or OWNER/NAME on the hub.
With RUN,lora=16 its weights stay as they are, and low-rank updates of them are trained, with
RUN,lora=16,base=mxfp4 (or fp8) over experts in few bits. With RUN,preference=dpo,beta=0.1 it learns
from pairs of a better and a worse answer (DPO), with or without lora=16. Model, tokenizer and
precision are those of the weights; so is the context, up to 4,096 tokens. The chats are JSONL,
Parquet, a folder or glob of them, or a directory that prepare_data made of them with --context
(docs/data.md says which forms); pairs are files alone. Only answers are learnt; chats are fitted to
the context without cutting questions or answers, and packed whole into rows.

Hardware: as for pretraining. Expected: a held-out loss of the answers before the first step and at
every 50th; docs/finetuning.md has a run on a laptop. An epoch is about (tokens of the chats) /
(seq_len x global_batch) steps: two or three of them are enough as a rule, and the held-out loss
says when it was too many.
"""

import dataclasses
import re

from ml_collections import ConfigDict

from zaya_jax import config, schedule
from zaya_jax.pytorch import any_model

CONTEXT = 4096  # at most, where nothing else is said
# Times the peak rate of the phase that the weights come from; those of a run on chats keep theirs.
SMALLER = 0.1
IMPORTED_LR = 2e-5  # where that is not known
PREFERRING = 0.1  # times the rate for chats, of pairs
OPTIONS = {"lora": int, "base": str, "preference": str, "beta": float}  # keys of config.run


def get_config(weights: str = "") -> ConfigDict:
    """The whole config of a run that fine-tunes these weights: MODEL, or MODEL,lora=RANK and what
    else OPTIONS has."""
    weights, options = _parse(weights)
    base = _find(weights)
    before, step = base.config, base.step
    # Ids of begin, end and padding are the tokenizer's. A layer that a record names is imported
    # only where you name it too: --config.model.layer.
    model = dataclasses.replace(
        base.model, bos_token_id=None, eos_token_id=None, pad_token_id=None, layer="", router=""
    )
    c = config.editable(
        config.Config(
            name="finetune",
            model=model,
            precision=before.precision,
            optim=before.optim,
            balance=before.balance,
            remat=before.remat,
            kernels=before.kernels,
        )
    )
    c.run.init_from = weights
    for name, value in options.items():
        c.run[name] = OPTIONS[name](value)
    of_pairs = options.get("preference", "none") != "none"
    if "lora" in options or of_pairs:
        c.balance.enabled = False  # the biases of the base, or of the reference, are the run's

    c.data.path = "chats.jsonl"
    c.data.chats = True
    c.data.packing = "best_fit"
    c.data.tokenizer = base.tokenizer_folder
    # A second set of chats is not learnt at a tenth of a tenth.
    smaller = 1 if step and before.data.chats else SMALLER
    context, lr = before.model.max_position_embeddings, IMPORTED_LR
    if step:
        phase = schedule.phase_at(before, step)
        context, lr = phase.seq_len, smaller * (phase.lr or before.optim.lr)
    c.data.seq_len = min(CONTEXT, context)
    c.data.global_batch = 16

    c.optim.lr = lr
    if of_pairs:
        if not before.run.takes_pairs:
            c.optim.lr *= PREFERRING
        c.optim.z_loss = 0.0
    c.balance.lr = smaller * before.balance.lr  # the biases themselves come with the weights
    c.schedule.warmup_fraction = 0.05
    c.schedule.decay_fraction = 0.95
    c.schedule.decay = "cosine"
    c.run.num_steps = 200
    c.eval.every = 50
    c.checkpoint.every_steps = 50
    c.log.sample_prompt = "Who are you?"
    return c


def _parse(asked: str) -> tuple[str, dict[str, str]]:
    """(the name of the weights, the options behind it): "MODEL,lora=16,preference=dpo"."""
    weights, *parts = re.split(r",(?=\w+=)", asked)
    options = dict(part.split("=", 1) for part in parts)
    for name in options:
        if name not in OPTIONS:
            raise config.UserError(
                f"finetune.py:{asked}: {name} is not one of {', '.join(OPTIONS)}; other keys are"
                " given as --config.KEY=VALUE"
            )
    return weights, options


def _find(weights: str) -> any_model.AnyModel:
    """The named model; UserError if it or its tokenizer is missing."""
    if not weights:
        raise config.UserError(
            "finetune.py needs the weights to begin with:"
            f" --config=experiments/configs/finetune.py:MODEL, with {config.fields.MODEL_FORMS}"
        )
    with config.fields.naming(f"finetune.py:{weights}"):
        base = any_model.find(weights)
    if base.tokenizer_folder is None:
        place = base.folder / "tokenizer" if any_model.is_run(base.folder) else base.folder
        raise config.UserError(
            f"finetune.py:{weights} has no tokenizer; put tokenizer.json into {place}"
        )
    return base
