"""The config: an ml_collections ConfigDict at the border, frozen dataclasses inside, every key checked.

A config file's `get_config()` starts from `default()` and changes what it needs; `check()` turns the result into a
`Config`, or raises one `UserError` that names the key, what was given, what was expected and the way out.
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from typing import Any

from ml_collections import config_dict


class UserError(ValueError):
    """Bad input: programs print it as one line and exit with code 2."""


class StorageError(RuntimeError):
    """Storage that stays unreadable after all retries, or damaged data: one line, exit code 4."""


LAYER_KINDS = ("hybrid", "hybrid_sliding", "hybrid_linear")  # full, windowed and linear attention


@dataclasses.dataclass(frozen=True)
class Rope:
    rope_type: str = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.5


@dataclasses.dataclass(frozen=True)
class RopeKinds:
    """One rotary embedding per layer kind; linear attention has none."""

    hybrid: Rope = Rope()
    hybrid_sliding: Rope = Rope()


@dataclasses.dataclass(frozen=True)
class Model:
    """The architecture, under transformers' names; the defaults are ZAYA1-base at 4K context."""

    model_type: str = "zaya"  # or "dense": plain attention and one gated MLP a layer
    vocab_size: int = 262_272
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 128
    intermediate_size: int = 0  # the gated MLP's width in a dense model
    moe_intermediate_size: int = 2048
    num_experts: int = 16  # a dense model's one MLP counts as one
    num_experts_per_tok: int = 1
    router_hidden_size: int = 256
    cca_time0: int = 2
    cca_time1: int = 2
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    layer_types: tuple[str, ...] = ()  # () means "hybrid" throughout
    sliding_window: int | None = None
    rope_parameters: RopeKinds = RopeKinds()
    max_position_embeddings: int = 131_072
    attention_bias: bool = False
    lm_head_bias: bool = False
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    pad_token_id: int | None = None  # these three None: the tokenizer's (zaya_jax/data/token_ids.py)
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, bottom first."""
        return self.layer_types or ("hybrid",) * self.num_hidden_layers


@dataclasses.dataclass(frozen=True)
class Data:
    path: str = "stdlib"  # "stdlib", a directory or glob of text files, or a prepared directory
    mixture: tuple[str, ...] = ()  # in place of path, several sources: "path=weight"
    tokenizer: str = "bytes"  # "bytes", a tokenizer.json, or a directory that holds a saved tokenizer
    seq_len: int = 4096
    global_batch: int = 4096  # sequences a step
    micro_batch: int = 0  # sequences at once over all devices; 0: the whole global batch
    packing: str = "concat"  # concat (and split), first_fit, best_fit (decreasing)
    cross_documents: bool = False  # let documents of a row attend to each other
    on_corrupt: str = "stop"  # a damaged record: stop, or skip (padding takes its place)
    workers: int = 0  # processes that compute batches ahead; 0: a thread, fastest on few cores


@dataclasses.dataclass(frozen=True)
class Optim:
    name: str = "muon"  # muon (matrices) with adamw (the rest), or adamw for all
    lr: float = 1e-3  # the schedule's peak
    b1: float = 0.9  # AdamW's
    b2: float = 0.95
    eps: float = 1e-8
    adamw_lr_factor: float = 1.0  # AdamW's learning rate over Muon's; for muon_scale="spectral", say, 0.1
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # of the gradient over all weights; 0: no clipping
    z_loss: float = 0.0  # weight of the mean log² Z in the loss
    momentum: float = 0.95  # Muon's
    nesterov: bool = True
    muon_scale: str = "match_rms_adamw"  # or "spectral"
    newton_schulz: str = "keller_jordan"  # or "polar_express": the coefficients
    newton_schulz_steps: int = 5


@dataclasses.dataclass(frozen=True)
class Balance:
    enabled: bool = True
    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    dead_after: int = 100  # steps without a token after which an expert counts as dead


@dataclasses.dataclass(frozen=True)
class Mesh:
    data: int = -1  # -1: all devices that the other axes leave
    expert: int = 1
    context: int = 1
    tensor: int = 1
    fsdp: bool = False  # weights lie over data too, gathered layer by layer
    tsp: bool = False  # the tensor axis carries the sequence too: weights travel in place of activations
    ring: bool = False  # over context, keys and values travel round a ring in place of being gathered


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training; what is 0, "", () or None is as outside the phases, in the key named beside it."""

    name: str = ""
    tokens: int = 0  # its length, padding counted
    seq_len: int = 0  # data.seq_len
    rope_theta: float = 0.0  # of full-attention layers: model.rope_parameters.hybrid.rope_theta
    global_batch: int = 0  # sequences a step: data.global_batch
    micro_batch: int = 0  # sequences at once over all devices: data.micro_batch
    ramp_from: int = 0  # sequences a step at its start, doubled until global_batch is reached; 0: no ramp
    ramp_tokens: int = 0  # over which the doublings are spread
    mixture: tuple[str, ...] = ()  # of "path=weight": data.mixture, or data.path
    packing: str = ""  # data.packing
    mesh: Mesh | None = (
        None  # the whole group; where it differs from the phase before, a new start takes over
    )
    remat: str = ""  # remat
    eval_seq_len: int = 0  # tokens of a held-out window: this phase's seq_len


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate over the whole run: warm-up, constant, decay; the fractions are of all its tokens."""

    warmup_fraction: float = 0.02
    decay_fraction: float = 0.2  # with decay="cosine" and 1 - warmup_fraction it is the plain cosine schedule
    decay: str = "linear"  # or "cosine", "1-sqrt"
    final_lr_fraction: float = 0.0
    phases: tuple[Phase, ...] = ()  # (): one phase of run.num_steps steps


@dataclasses.dataclass(frozen=True)
class Run:
    seed: int = 0
    num_steps: int = 1000
    skip_update: str = "nonfinite"
    spike_deviations: float = 6.0  # above the running mean of the gradient norm: what "spike" skips
    init_from: str = ""  # weights to begin with: another run's folder, FOLDER@STEP, or exported parameters
    init_grow: bool = False  # let a model of more layers or experts take what fits


@dataclasses.dataclass(frozen=True)
class Eval:
    every: int = 100
    windows: int = 64  # held-out windows, each of the phase's eval_seq_len tokens


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the state is saved, where, and which checkpoints stay; docs/checkpoints.md."""

    every_steps: int = 500
    every_minutes: float = 0.0  # and whenever so much time has passed; 0: by steps alone
    keep: int = 3  # the newest so many
    keep_every: int = 0  # also those of every so many steps
    keep_best: int = 0  # also the so many of least held-out loss
    keep_tokens: int = 0  # also the first after every so many tokens
    local: str = ""  # a fast folder, may be each node's own, that saves go to first
    durable: str = ""  # a folder or URL (s3://, gs://) that gets a copy of each
    on_corrupt: str = "stop"  # or "previous": goes on from the newest that is whole
    max_failures: int = 3  # saves that may fail in a row before the run stops
    max_wait: float = 60.0  # seconds that a due save waits for the one before; then it counts as failed


@dataclasses.dataclass(frozen=True)
class Precision:
    """The one table of number formats, and what they are on each chip.

    Weights, residual stream, norms, softmaxes and losses are always float32, and a product adds up in float32. TF32 is
    float32 cut to 10 bits in front of a product: what XLA takes for float32 on NVIDIA and, as XF32, on MI300X, unless
    it is asked for more. CPUs have none.
    """

    # What matrices multiply in, and what travels between the devices of a layer: partial sums over tensor, and
    # gradients of keys and values over context, add up in it. A weight's gradient leaves its product in float32; that
    # of experts on a GPU rounded once to bfloat16, for each micro-batch, and is float32 from there on.
    compute: str = "bfloat16"
    # What the router's matrices multiply in; float32 is never TF32.
    router: str = "float32"
    # What float32 is where compute is "float32": with "default" and "high" TF32 if the chip has it, with "highest"
    # float32. Nothing else depends on it.
    matmul: str = "default"
    # Muon's iteration and, between devices, its directions; "compute": like compute. float32 is never TF32.
    newton_schulz: str = "compute"
    # In what Muon keeps its momentum.
    momentum: str = "float32"


@dataclasses.dataclass(frozen=True)
class Log:
    every: int = 10  # steps between lines on the terminal; the files get every step
    sample_prompt: str = "def "
    sample_tokens: int = 256
    sample_temperature: float = 0.7


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides a run, checked and frozen."""

    name: str = "unnamed"
    model: Model = Model()
    data: Data = Data()
    optim: Optim = Optim()
    balance: Balance = Balance()
    schedule: Schedule = Schedule()
    mesh: Mesh = Mesh()
    run: Run = Run()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    precision: Precision = Precision()
    log: Log = Log()
    remat: str = "none"


CHOICES = {
    "model.model_type": ("zaya", "dense"),
    "data.packing": ("concat", "first_fit", "best_fit"),
    "data.on_corrupt": ("stop", "skip"),
    "optim.name": ("muon", "adamw"),
    "optim.muon_scale": ("match_rms_adamw", "spectral"),
    "optim.newton_schulz": ("keller_jordan", "polar_express"),
    "schedule.decay": ("linear", "cosine", "1-sqrt"),
    "precision.newton_schulz": ("compute", "bfloat16", "float32"),
    "precision.momentum": ("bfloat16", "float32"),
    "checkpoint.on_corrupt": ("stop", "previous"),
    "run.skip_update": ("never", "nonfinite", "spike"),
    "precision.compute": ("bfloat16", "float32"),
    "precision.router": ("bfloat16", "float32"),
    "precision.matmul": ("default", "high", "highest"),
    "remat": ("none", "layer", "attention", "offload"),
}

RANGES = {  # least and greatest value
    "optim.lr": (0, math.inf),
    "optim.b1": (0, 0.99999),
    "optim.b2": (0, 0.99999),
    "optim.eps": (0, math.inf),
    "optim.adamw_lr_factor": (0, math.inf),
    "optim.weight_decay": (0, math.inf),
    "optim.clip_norm": (0, math.inf),
    "optim.momentum": (0, 0.99999),
    "optim.newton_schulz_steps": (1, 99),
    "balance.lr": (0, math.inf),
    "balance.b1": (0, 0.99999),
    "balance.b2": (0, 0.99999),
    "balance.dead_after": (1, math.inf),
    "schedule.warmup_fraction": (0, 1),
    "schedule.decay_fraction": (0, 1),
    "schedule.final_lr_fraction": (0, 1),
    "run.spike_deviations": (0, math.inf),
    "checkpoint.every_minutes": (0, math.inf),
    "checkpoint.keep_every": (0, math.inf),
    "checkpoint.keep_best": (0, math.inf),
    "checkpoint.keep_tokens": (0, math.inf),
    "checkpoint.max_failures": (1, math.inf),
    "checkpoint.max_wait": (0, math.inf),
    "eval.windows": (0, math.inf),
    "data.workers": (0, math.inf),
    "log.sample_tokens": (0, math.inf),
    "log.sample_temperature": (0, math.inf),
}


def default() -> config_dict.ConfigDict:
    """All keys with their defaults, typed and locked: what a config file's get_config() starts from."""
    return editable(Config())


def editable(config: Config) -> config_dict.ConfigDict:
    """A Config as config files return it: for one that starts from a recorded config instead of the defaults."""
    return _to_config_dict(config).lock()


def check(cfg: config_dict.ConfigDict | dict) -> Config:
    """The frozen Config of a ConfigDict (or of what config.json holds); UserError on any key that is not right."""
    plain = cfg.to_dict() if isinstance(cfg, config_dict.ConfigDict) else cfg
    config = _build(Config, plain, "")
    for path, choices in CHOICES.items():
        value = _get(config, path)
        if value not in choices:
            raise UserError(
                f"config.{path}={value!r} is not one of {', '.join(choices)}{_nearest(value, choices)}"
            )
    _check_model(config.model)
    _check_sizes(config)
    _check_ranges(config)
    return config


def check_model(given: dict) -> Model:
    """The frozen Model of a nested dict of its keys alone."""
    model = _build(Model, given, "model.")
    _check_model(model)
    return model


def to_dict(config: Any) -> dict:
    """The config as JSON-able nested dicts; `check` reads it back to an equal Config."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def unknown_key(path: str) -> UserError:
    """The error for a key that the config does not have, with the nearest that it has."""
    return UserError(f"unknown config key config.{path}{_nearest(path, all_keys())}")


def all_keys() -> list[str]:
    """Every key, dotted."""
    return list(_all_paths(Config))


def _all_paths(cls: type, prefix: str = ""):
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from _all_paths(typing.cast(type, field.type), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _nearest(value: Any, choices) -> str:
    found = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def _get(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


def _to_config_dict(value: Any) -> config_dict.ConfigDict:
    out = config_dict.ConfigDict()
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        optional = _optional_type(field.type)
        if dataclasses.is_dataclass(item):
            out[field.name] = _to_config_dict(item)
        elif optional is not None:
            out[field.name] = config_dict.placeholder(optional)
            if item is not None:
                out[field.name] = item
        else:
            out[field.name] = item
    return out


def _optional_type(kind: Any) -> type | None:
    args = typing.get_args(kind)
    if isinstance(kind, types.UnionType) and type(None) in args:
        return next(a for a in args if a is not type(None))
    return None


def _build(cls: type, given: Any, prefix: str) -> Any:
    if not isinstance(given, dict):
        raise UserError(
            f"config.{prefix.rstrip('.')} is {given!r}; it is a group of keys, see zaya_jax/config.py"
        )
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in given:
        if key not in fields:
            raise unknown_key(prefix + key)
    return cls(**{key: _convert(fields[key].type, value, prefix + key) for key, value in given.items()})


def _convert(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if isinstance(value, config_dict.ConfigDict):
            value = value.to_dict()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        return _build(typing.cast(type, kind), value, path + ".")
    if isinstance(value, config_dict.FieldReference):  # in a phase, which ConfigDict does not look into
        value = value.get()
    optional = _optional_type(kind)
    if optional is not None:
        return None if value is None else _convert(optional, value, path)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, list | tuple):
            raise _wrong(path, value, "a tuple")
        return tuple(_convert(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(path, value, f"of type {kind.__name__}")
    return value


def _wrong(path: str, value: Any, expected: str) -> UserError:
    return UserError(
        f"config.{path}={value!r} has the wrong type {type(value).__name__}; it must be {expected}"
    )


def _check_model(m: Model) -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "moe_intermediate_size",
        "num_experts",
        "router_hidden_size",
        "cca_time0",
        "cca_time1",
    ):
        if getattr(m, name) < 1:
            raise UserError(f"config.model.{name}={getattr(m, name)} must be at least 1")
    if m.num_attention_heads % m.num_key_value_heads:
        raise UserError(
            f"config.model.num_attention_heads={m.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={m.num_key_value_heads}; each key-value head serves an equal group of query heads"
        )
    if m.num_key_value_heads * m.head_dim % 2:
        raise UserError(
            f"config.model.num_key_value_heads x head_dim = {m.num_key_value_heads * m.head_dim} is odd; half of the "
            "value channels come from the token before, so it must be even"
        )
    if m.layer_types and len(m.layer_types) != m.num_hidden_layers:
        raise UserError(
            f"config.model.layer_types names {len(m.layer_types)} layers, num_hidden_layers={m.num_hidden_layers}; "
            'give one kind a layer, or () for "hybrid" throughout'
        )
    for kind in m.kinds:
        if kind not in LAYER_KINDS:
            raise UserError(
                f"config.model.layer_types has {kind!r}; known kinds are {', '.join(LAYER_KINDS)}"
                f"{_nearest(kind, LAYER_KINDS)}"
            )
    if "hybrid_sliding" in m.kinds and (m.sliding_window is None or m.sliding_window < 1):
        raise UserError(
            f"config.model.sliding_window={m.sliding_window} but layer_types has hybrid_sliding layers; "
            "give the window in tokens, the query included"
        )
    if m.model_type == "dense":
        _check_dense(m)
    traits = {
        "num_experts_per_tok": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
    }
    for name, only in traits.items():
        if getattr(m, name) != only:
            raise UserError(
                f"config.model.{name}={getattr(m, name)!r} is not supported; ZAYA has {name}={only!r}"
            )
    for kind in sorted(set(m.kinds) - {"hybrid_linear"}):
        rope = getattr(m.rope_parameters, kind)
        if rope.rope_type != "default":
            raise UserError(
                f"config.model.rope_parameters.{kind}.rope_type={rope.rope_type!r} is not supported; use 'default'"
            )
        if not 0 <= rope.partial_rotary_factor <= 1 or int(m.head_dim * rope.partial_rotary_factor) % 2:
            raise UserError(
                f"config.model.rope_parameters.{kind}.partial_rotary_factor={rope.partial_rotary_factor} turns "
                f"{m.head_dim * rope.partial_rotary_factor:g} of {m.head_dim} channels; it must be an even number"
            )


def _check_dense(m: Model) -> None:
    if m.intermediate_size < 1:
        raise UserError(
            f"config.model.intermediate_size={m.intermediate_size} must be at least 1 with model_type='dense': "
            "the width of the gated MLP"
        )
    if m.num_experts != 1:
        raise UserError(
            f"config.model.num_experts={m.num_experts} with model_type='dense', which has no router; set it to 1"
        )
    if m.attention_bias:
        raise UserError(
            "config.model.attention_bias is set, but model_type='dense' has no biases; set it to False"
        )
    if "hybrid_linear" in m.kinds:
        raise UserError(
            "config.model.layer_types has hybrid_linear, which is a form of ZAYA's attention, but model_type='dense'; "
            "dense layers are hybrid (full attention) or hybrid_sliding"
        )


def _check_sizes(c: Config) -> None:
    for path in (
        "data.seq_len",
        "data.global_batch",
        "run.num_steps",
        "eval.every",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "log.every",
    ):
        if _get(c, path) < 1:
            raise UserError(f"config.{path}={_get(c, path)} must be at least 1")
    if c.data.micro_batch < 0 or (c.data.micro_batch and c.data.global_batch % c.data.micro_batch):
        raise UserError(
            f"config.data.micro_batch={c.data.micro_batch} does not divide data.global_batch={c.data.global_batch}; "
            "give a divisor, or 0 for the whole batch at once"
        )
    if c.data.seq_len > c.model.max_position_embeddings:
        raise UserError(
            f"config.data.seq_len={c.data.seq_len} is above model.max_position_embeddings="
            f"{c.model.max_position_embeddings}; raise the latter or shorten the sequences"
        )


def _check_ranges(c: Config) -> None:
    for path, (least, greatest) in RANGES.items():
        value = _get(c, path)
        if not least <= value <= greatest:
            above = f" and at most {greatest:g}" if greatest < math.inf else ""
            raise UserError(f"config.{path}={value!r} is out of range; it must be at least {least:g}{above}")
