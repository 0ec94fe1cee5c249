"""Every key of a config with its default, allowed values and meaning. docs/config.md is this file
as a page.

Upper bounds only catch slips: they lie far above any training run so far.
"""

import dataclasses

from zaya_jax.config.fields import choice, key, ranged, text

LAYER_KINDS = ("hybrid", "hybrid_sliding", "hybrid_linear")  # full, windowed and linear attention
PACKINGS = ("concat", "best_fit")
DECAYS = ("linear", "cosine", "1-sqrt")
FLOATS = ("bfloat16", "float32")
SCALES = ("match_rms_adamw", "spectral")
REMATS = ("none", "elementwise", "attention", "layer", "offload")

MOST = 2**31 - 1  # for counts in 32 bits on the devices
TOKENS = 10**16  # a thousand times the largest corpus
BELOW_ONE = 0.99999  # of decay rates: at 1 nothing would ever be forgotten
MINUTES = 60 * 24 * 365


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding."""

    rope_type: str = choice("default", ("default",), "no scaled variant is supported")
    rope_theta: float = ranged(
        10_000.0, 1, 1e15, "base; channel pair i of n rotates by base^(-i/n) per token"
    )
    partial_rotary_factor: float = ranged(
        0.5, 0, 1, "share of a head's channels that rotate; an even number of them"
    )


@dataclasses.dataclass(frozen=True)
class RopeKinds:
    """One rotary embedding per layer kind; linear attention has none."""

    hybrid: Rope = Rope()
    hybrid_sliding: Rope = Rope()


@dataclasses.dataclass(frozen=True)
class Model:
    """The architecture, under transformers' names; the defaults are ZAYA1-base at 4K context."""

    model_type: str = choice(
        "zaya", ("zaya", "dense"), "dense: plain attention, and one gated MLP per layer"
    )
    vocab_size: int = ranged(262_272, 1, 2**26, "rows of the embedding")
    hidden_size: int = ranged(2048, 1, 2**20, "width of the residual stream")
    num_hidden_layers: int = ranged(40, 1, 10_000, "layers")
    num_attention_heads: int = ranged(8, 1, 2**14, "query heads")
    num_key_value_heads: int = ranged(
        2, 1, 2**14, "key-value heads; each serves an equal group of queries"
    )
    head_dim: int = ranged(128, 1, 2**14, "channels of a head")
    intermediate_size: int = ranged(0, 0, 2**22, "width of a dense model's gated MLP; 0 in others")
    moe_intermediate_size: int = ranged(2048, 1, 2**22, "an expert's width")
    num_experts: int = ranged(
        16, 1, 2**16, "experts per layer; a dense model's one MLP counts as one"
    )
    num_experts_per_tok: int = ranged(1, 1, 1, "experts per token")
    router_hidden_size: int = ranged(256, 1, 2**16, "the router's width")
    cca_time0: int = ranged(2, 1, 1024, "taps of the depthwise convolution over queries and keys")
    cca_time1: int = ranged(2, 1, 1024, "taps of the grouped convolution after it")
    hidden_act: str = choice("silu", ("silu",), "the experts' activation")
    rms_norm_eps: float = ranged(1e-5, 1e-30, 1, "added to the mean square under the root")
    layer_types: tuple[str, ...] = choice(
        (), LAYER_KINDS, 'kinds of layers, bottom first; (): all "hybrid"'
    )
    sliding_window: int | None = ranged(
        None, 1, MOST, "window of hybrid_sliding layers in tokens, with the query's own"
    )
    rope_parameters: RopeKinds = RopeKinds()
    max_position_embeddings: int = ranged(
        131_072, 1, MOST, "the longest context that the model is meant for"
    )
    attention_bias: bool = key(False, "biases in attention's projections")
    lm_head_bias: bool = key(False, "a bias per token on the logits")
    tie_word_embeddings: bool = choice(
        True, (True,), "the head is the embedding; ZAYA has no other"
    )
    attention_dropout: float = ranged(0.0, 0, 0, "ZAYA has none")
    initializer_range: float = ranged(0.02, 0, 100, "standard deviation of new matrices")
    pad_token_id: int | None = ranged(None, 0, 2**26, "the padding id; None: the tokenizer's")
    layer: str = text("", "name", "a layer of your own, MODULE:CLASS; docs/howto/own_layer.md")
    router: str = text("", "name", "a router of your own, MODULE:CLASS")
    bos_token_id: int | None = ranged(
        None, 0, 2**26, "the id that begins a document; None: the tokenizer's"
    )
    eos_token_id: int | None = ranged(
        None, 0, 2**26, "the id that ends a document; None: the tokenizer's"
    )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, bottom first."""
        return self.layer_types or ("hybrid",) * self.num_hidden_layers


@dataclasses.dataclass(frozen=True)
class Data:
    """The training data and its batches; docs/data.md."""

    path: str = text(
        "stdlib", "path", '"stdlib", a directory or glob of text files, or a prepared directory'
    )
    mixture: tuple[str, ...] = text((), "source", 'several sources instead of path: "path=weight"')
    chats: bool = key(
        False, "the data are chats (JSONL, Parquet, prepared); only answers are learnt"
    )
    tokenizer: str = text(
        "bytes", "path", '"bytes", a tokenizer.json, or the folder of a saved tokenizer'
    )
    seq_len: int = ranged(4096, 1, 2**27, "tokens of a sequence, the context")
    global_batch: int = ranged(4096, 1, 2**24, "sequences per step")
    micro_batch: int = ranged(
        0, 0, 2**24, "most sequences computed at once, over all devices; 0: the whole batch"
    )
    packing: str = choice(
        "concat", PACKINGS, "how documents fill rows: concat cuts them, best_fit keeps them whole"
    )
    cross_documents: bool = key(False, "documents of a row attend to each other")
    on_corrupt: str = choice(
        "stop", ("stop", "skip"), "at a damaged record: stop, or turn it into padding"
    )


@dataclasses.dataclass(frozen=True)
class Optim:
    """Muon and AdamW."""

    name: str = choice("muon", ("muon", "adamw"), "muon: Muon for matrices and AdamW for the rest")
    lr: float = ranged(1e-3, 0, 1000, "the learning rate at the schedule's peak")
    b1: float = ranged(0.9, 0, BELOW_ONE, "AdamW's decay of the mean gradient")
    b2: float = ranged(0.95, 0, BELOW_ONE, "AdamW's decay of the mean squared gradient")
    eps: float = ranged(1e-8, 0, 1, "added to the root in AdamW")
    adamw_lr_factor: float = ranged(
        1.0, 0, 1e6, "AdamW's learning rate over Muon's; with spectral, for example, 0.1"
    )
    weight_decay: float = ranged(
        0.1, 0, 1000, "times the learning rate: the share by which a step shrinks each matrix"
    )
    clip_norm: float = ranged(
        1.0, 0, 1e30, "maximum norm of the gradient over all weights; 0: no clipping"
    )
    z_loss: float = ranged(0.0, 0, 1000, "weight of the mean log² Z in the loss")
    momentum: float = ranged(0.95, 0, BELOW_ONE, "Muon's momentum")
    nesterov: bool = key(True, "Nesterov momentum in Muon")
    muon_scale: str = choice(
        "match_rms_adamw", SCALES, "scale of Muon's update: as large as AdamW's, or spectral"
    )
    newton_schulz: str = choice(
        "keller_jordan",
        ("keller_jordan", "polar_express"),
        "coefficients of Muon's Newton-Schulz iteration",
    )
    newton_schulz_steps: int = ranged(5, 1, 99, "steps of Muon's Newton-Schulz iteration")
    rows: tuple[str, ...] = text(
        (), "source", 'for weights of your own layers: "PATH=muon" or "PATH=adamw"'
    )


@dataclasses.dataclass(frozen=True)
class Balance:
    """The biases that balance the experts' load."""

    enabled: bool = key(True, "update the biases")
    lr: float = ranged(1e-3, 0, 1000, "their learning rate")
    b1: float = ranged(0.9, 0, BELOW_ONE, "as optim.b1, for the biases")
    b2: float = ranged(0.95, 0, BELOW_ONE, "as optim.b2, for the biases")
    dead_after: int = ranged(
        100, 1, MOST, "steps without a token after which an expert counts as dead"
    )


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The devices as a box of four axes; docs/parallelism.md."""

    data: int = ranged(
        -1, -1, 2**20, "devices that split the batch's sequences; -1: all that other axes leave"
    )
    expert: int = ranged(1, 1, 2**16, "devices that split the experts, and sequences too")
    context: int = ranged(1, 1, 2**16, "devices that split the tokens of a sequence")
    tensor: int = ranged(1, 1, 2**14, "devices that split heads and widths")
    fsdp: bool = key(False, "weights are sharded over data too, and gathered layer by layer")
    tsp: bool = key(False, "tensor splits the sequence too: weights travel instead of activations")
    ring: bool = key(
        False, "over context, keys and values travel round a ring instead of being gathered"
    )
    across: bool = key(
        False, "context spans nodes instead of staying in one; data and expert then share a node"
    )


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training; with 0, "", () or None a key takes its value from the key named in its
    row."""

    name: str = text("", "name", "for tables and messages")
    tokens: int = ranged(0, 1, TOKENS, "its length, padding counted; every phase must have one")
    seq_len: int = ranged(0, 0, 2**27, "data.seq_len")
    rope_theta: float = ranged(0.0, 0, 1e15, "model.rope_parameters.hybrid.rope_theta")
    global_batch: int = ranged(0, 0, 2**24, "sequences per step: data.global_batch")
    micro_batch: int = ranged(0, 0, 2**24, "sequences at once over all devices: data.micro_batch")
    ramp_from: int = ranged(
        0, 0, 2**24, "sequences per step at first, doubled to global_batch; 0: no ramp"
    )
    ramp_tokens: int = ranged(0, 0, TOKENS, "tokens over which the doublings are spread")
    mixture: tuple[str, ...] = text((), "source", 'of "path=weight": data.mixture, or data.path')
    packing: str = choice("", ("", *PACKINGS), "data.packing")
    mesh: Mesh | None = key(  # noqa: RUF009
        None, "the whole group; if it differs from the phase before, a new start takes over"
    )
    remat: str = choice("", ("", *REMATS), "remat")
    eval_seq_len: int = ranged(0, 0, 2**27, "tokens of a held-out window: this phase's seq_len")
    lr: float = ranged(
        0.0, 0, 1000, "learning rate at its start, after the run's warm-up; 0: the run's schedule"
    )
    lr_end: float | None = ranged(None, 0, 1000, "learning rate at its end; None: lr throughout")
    schedule: str = choice("", ("", *DECAYS), "shape of the way from lr to lr_end: schedule.decay")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate over the whole run: warm-up, constant, decay; the fractions are of all its
    tokens. A phase with a rate of its own shares only the warm-up."""

    warmup_fraction: float = ranged(0.02, 0, 1, "share in which the learning rate rises from 0")
    decay_fraction: float = ranged(
        0.2, 0, 1, "share in which it falls; 1 - warmup_fraction: no constant part"
    )
    decay_steps: int = ranged(0, 0, MOST, "steps of the decay; 0: as decay_fraction says")
    decay: str = choice("linear", DECAYS, "shape of the decay")
    final_lr_fraction: float = ranged(0.0, 0, 1, "the final learning rate over optim.lr")
    phases: tuple[Phase, ...] = key(
        (), "config.Phase values in order; (): one phase of run.num_steps steps"
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """The run's length and its beginning."""

    # Above that, random keys take the number modulo 2**32: two seeds would begin with the same
    # weights.
    seed: int = ranged(0, 0, 2**32 - 1, "seed of weights, data order and sampling")
    num_steps: int = ranged(1000, 1, MOST, "the last step; it may end a run with phases early")
    skip_update: str = choice(
        "nonfinite",
        ("never", "nonfinite", "spike"),
        "skip gradients that are not finite, or (spike) also far too large",
    )
    spike_deviations: float = ranged(
        6.0, 0, 1e6, 'for "spike": deviations of the gradient norm above its mean'
    )
    init_from: str = text(
        "", "path", "initial weights: any model's name (docs/pytorch.md), or exported parameters"
    )
    lora: int | None = ranged(
        None, 1, 2**14, "train updates of this rank over init_from's weights; None: all weights"
    )
    base: str = choice(
        "compute", ("compute", "fp8", "mxfp4"), "with lora: format of the frozen experts in memory"
    )
    preference: str = choice(
        "none",
        ("none", "dpo"),
        "dpo: learn from pairs of answers, measured against init_from's weights",
    )
    beta: float = ranged(
        0.1, 1e-6, 1e6, "for dpo: the larger, the closer the model stays to init_from's answers"
    )
    fork: str = text(
        "",
        "path",
        "the run to continue from, with changes: folder, URL or FOLDER@STEP; docs/recipe.md",
    )
    changed_source: bool = key(
        False, "continue although the file of model.layer or model.router has changed"
    )
    fork_step: int = ranged(0, 0, MOST, "the step that run.fork continues from; filled in")
    fork_tokens: int = ranged(0, 0, TOKENS, "the tokens seen by that step; filled in")

    @property
    def takes_pairs(self) -> bool:
        """Whether the data are pairs of answers."""
        return self.preference != "none"


@dataclasses.dataclass(frozen=True)
class Eval:
    """The loss on held-out text, and the scores of tasks."""

    every: int = ranged(100, 1, MOST, "steps between evaluations; the last step always has one")
    windows: int = ranged(
        64, 0, 2**20, "held-out windows, each of the phase's eval_seq_len tokens; 0: none"
    )
    named: tuple[str, ...] = text(
        (), "source", 'more text, not trained on: "name=path", logged as eval/name'
    )
    tasks: tuple[str, ...] = text(
        (), "name", "lm-eval's tasks, logged as eval/TASK/METRIC; docs/evaluation.md"
    )
    tasks_every: int = ranged(
        1000, 1, MOST, "steps between two runs of the tasks; the last step always has one"
    )
    tasks_limit: int = ranged(
        0, 0, MOST, "only this many documents of each task, the first ones; 0: all"
    )
    tasks_path: str = text("", "path", "a folder with tasks of your own")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the state is saved, where, and which checkpoints stay; docs/checkpoints.md."""

    every_steps: int = ranged(500, 1, MOST, "steps between saves; the last step is always saved")
    every_minutes: float = ranged(
        0.0, 0, MINUTES, "also save when this many minutes have passed; 0: only by steps"
    )
    keep: int = ranged(3, 1, MOST, "keep this many of the newest")
    keep_every: int = ranged(
        0, 0, MOST, "also keep those whose step is a multiple of this; 0: none"
    )
    keep_best: int = ranged(0, 0, MOST, "also keep this many with the lowest held-out loss")
    durable: str = text("", "path", "a folder or URL (s3://, gs://) that gets a copy of each")
    on_corrupt: str = choice(
        "stop",
        ("stop", "previous"),
        "if the newest is damaged: stop, or continue from an older one",
    )
    max_failures: int = ranged(3, 1, MOST, "saves that may fail in a row before the run stops")
    max_wait: float = ranged(
        60.0, 0, 60 * MINUTES, "seconds that a save waits for the one before, then fails"
    )


@dataclasses.dataclass(frozen=True)
class Guard:
    """How a run guards its numbers; docs/guard.md."""

    spike_steps: int = ranged(
        10, 0, MOST, "steps with too high a loss or gradient norm that make a spike; 0: none do"
    )
    spike_deviations: float = ranged(
        8.0, 1, 1e6, "too high is above the last steps' median by this many robust deviations"
    )
    rollbacks: int = ranged(
        10, 0, MOST, "rollbacks allowed after spikes; one more ends the run with code 3"
    )
    replay_every: int = ranged(
        500, 0, MOST, "steps between checks that compute gradients again and compare them; 0: off"
    )
    try_step: str = choice(
        "auto",
        ("auto", "always", "never"),
        "compare a small model's step with a CPU's numbers: auto: once on each new machine with"
        " GPUs; always: at each start",
    )


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What is known of the machine; docs/hardware.md has what follows from it."""

    figures: str = text(
        "",
        "path",
        "a file of experiments.characterize on this machine, or its folder: sets fusion buffers,"
        " levels of sums and, unless they are on, mesh.ring and mesh.across",
    )


@dataclasses.dataclass(frozen=True)
class Precision:
    """The one table of number formats, and their meaning on each chip.

    Weights (but for copies of them, `weights`), residual stream, norms, softmaxes and losses are
    always float32, and a product adds up in float32. TF32 is float32 cut to 10 bits in front of a
    product: XLA's choice for float32 on NVIDIA and, as XF32, on MI300X, unless it is asked for
    more. CPUs have none. "Never TF32" is said of the bits: NVIDIA's float32 is three products of
    TF32, as exact as one of float32.
    """

    # Partial sums over tensor, and gradients of keys and values over context, add up in it. A
    # weight's gradient leaves its product in float32; that of experts on a GPU rounded once to
    # bfloat16, for each micro-batch, and is float32 from there on.
    compute: str = choice(
        "bfloat16", FLOATS, "format of matrix products, and of layers' messages between devices"
    )
    router: str = choice(
        "float32", FLOATS, "format of the router's products; float32 is never TF32"
    )
    # With "default" and "high" TF32 if the chip has it, with "highest" float32. Nothing else
    # depends on it.
    matmul: str = choice(
        "default",
        ("default", "high", "highest"),
        'where compute is "float32": TF32, or with "highest" float32',
    )
    newton_schulz: str = choice(
        "compute",
        ("compute", "bfloat16", "float32"),
        "format of Muon's iteration, and of its directions between devices; compute: as"
        " precision.compute. float32 is never TF32",
    )
    momentum: str = choice("float32", FLOATS, "format of Muon's momentum")
    # Copies that products make anyway: a step gives the same bits.
    weights: str = choice(
        "compute",
        ("compute", "float32"),
        "the devices' copies of matrices whose gradients are reduced layer by layer (their owners"
        " have float32), and of other experts on a GPU, for the time of a step",
    )


@dataclasses.dataclass(frozen=True)
class Log:
    """Output during the run, and the sample at the end."""

    every: int = ranged(
        10, 1, MOST, "steps between lines on the terminal; the files get every step"
    )
    trackers: tuple[str, ...] = choice(
        (),
        ("wandb", "mlflow", "trackio"),
        "services that also receive each step's metrics; docs/metrics.md",
    )
    profile: str = text(
        "", "text", "STEP or STEP:STEPS to trace with jax.profiler; docs/howto/profile.md"
    )
    sample_prompt: str = text(
        "def ", "text", "text that the sample continues; with data.chats, the user's turn"
    )
    sample_tokens: int = ranged(256, 0, 2**20, "tokens of the sample")
    sample_temperature: float = ranged(0.7, 0, 1000, "temperature of the sample; 0: greedy")


@dataclasses.dataclass(frozen=True, repr=False)
class Config:
    """Everything that decides a run, checked and frozen."""

    name: str = text("unnamed", "name", "the run's name; without --workdir its folder is runs/NAME")
    model: Model = Model()
    data: Data = Data()
    optim: Optim = Optim()
    balance: Balance = Balance()
    schedule: Schedule = Schedule()
    mesh: Mesh = Mesh()
    run: Run = Run()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    hardware: Hardware = Hardware()
    precision: Precision = Precision()
    log: Log = Log()
    remat: str = choice(
        "none", REMATS, "the parts that the backward pass recomputes, to save memory"
    )
    kernels: tuple[str, ...] = text(
        ("auto",),
        "name",
        "operators that use this project's kernels on a GPU, by their folders in pallas_kernels; or"
        " one word: all, none, or auto: those that `python -m pallas_kernels.tune` chose on this"
        " card, otherwise all if the table has tiles for it",
    )

    def __repr__(self) -> str:
        model = self.model
        return (
            f"<Config {self.name}: {model.model_type} of {model.num_hidden_layers} layers of"
            f" {model.hidden_size}, {self.run.num_steps} steps>"
        )
