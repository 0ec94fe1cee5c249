"""zaya_jax in a notebook: one object for a model with its weights, whatever their source.

    import zaya_jax as zj
    model = zj.load("runs/tiny")             a run's newest step; "runs/tiny@200" another; or transformers' directory
    model = zj.create("tiny", seed=0)        fresh weights
    model.logits(ids), model.loss(ids, labels), model.loss_and_grads(ids, labels)
    model.generate("def "), model.trace(ids), model.save(DIR), model.to_hf(DIR)
    model = zj.train("tiny", "runs/tiny")    the run of experiments.pretrain

Arrays go in and come out as NumPy arrays, except parameters and gradients, which stay on the
devices. docs/library.md.
"""

import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from pallas_kernels import chip
from zaya_jax import arguments, cli, functions, generation, run, schedule
from zaya_jax.arguments import AnyConfig
from zaya_jax.cluster import leaving, multihost
from zaya_jax.config import Config, UserError, shown
from zaya_jax.hardware import host, sizing
from zaya_jax.model import decode, zaya
from zaya_jax.model.own_parts import BASES, customized, own_class, require_same_source
from zaya_jax.model.router import Router
from zaya_jax.model.sampling import Sampling
from zaya_jax.parallel import tree
from zaya_jax.pytorch import any_model, exchange, hf
from zaya_jax.pytorch.any_model import AnyModel
from zaya_jax.text import tokenizers
from zaya_jax.training import kernels
from zaya_jax.training.observers import Observer
from zaya_jax.training.workdir import folder_of, read_config


class TrainingStopped(RuntimeError):
    """A run that ended before it was done; `code` is the exit code of the program."""

    def __init__(self, code: int, workdir: Path):
        saved = "it was stopped and has saved: the same call continues"
        meaning = saved if code == cli.PREEMPTED else "see above, and docs/exit_codes.md"
        super().__init__(f"{workdir}: training ended with exit code {code}: {meaning}")
        self.code, self.workdir = code, workdir


@dataclasses.dataclass(frozen=True, repr=False)
class Trace:
    """The inside of a forward pass. Letters: L layers, B batch, S sequence, D model, E experts, H
    heads, V vocab."""

    logits: np.ndarray  # [B, S, V]
    hidden_states: np.ndarray  # [L, B, S, D], the residual stream after each layer
    # [L, B, S, E + 1], the last class skips; a dense model has no router
    router_probs: np.ndarray | None
    # [L, B, S], the class that each token goes to, balancing biases included
    choices: np.ndarray | None
    # [L, B, S, D], of the chosen expert, before its p; zero where a token skips
    expert_outputs: np.ndarray | None
    attention: np.ndarray | None  # [L, B, H, S, S], a query's weight on each key; only on request
    # [L, B, S, heads, channels], as attention gets them; only with `attention`
    queries: np.ndarray | None
    keys: np.ndarray | None
    values: np.ndarray | None

    def __repr__(self) -> str:
        shapes = [f"{name} {list(x.shape)}" for name, x in vars(self).items() if x is not None]
        return f"<Trace {', '.join(shapes)}>"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "balance"],
    meta_fields=["config", "tokenizer", "mesh", "source", "_origin"],
)
@dataclasses.dataclass(eq=False, repr=False)
class LanguageModel:
    """A model with its weights, a pytree of them: made by `zj.load`, `zj.create` or `zj.train`."""

    config: Config
    params: dict
    balance: jax.Array
    tokenizer: tokenizers.Tokenizer | None
    mesh: Mesh | None
    source: str  # where the weights came from
    _origin: AnyModel  # without its weights

    def __repr__(self) -> str:
        counts = zaya.param_counts(self.config.model)
        sizes = dict(self.mesh.shape) if self.mesh else {}
        where = " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1 or axis == "data")
        return (
            f"<LanguageModel {self.config.name} from {self.source}: {counts['total']:,} parameters,"
            f" {counts['active']:,} active, computes in {self.config.precision.compute}, on"
            f" {where or 'one device'}>"
        )

    @property
    def num_params(self) -> int:
        """The number of parameters, as the papers count them."""
        return zaya.param_counts(self.config.model)["total"]

    def __call__(self, ids: Any, *, segments: Any = None) -> jax.Array:
        """Next-token logits [B, S, V] as `zj.apply` gives them: for programs of one's own, and
        differentiable.

        >>> jax.grad(lambda m: m(ids).mean())(model).params.keys() == model.params.keys()
        True
        """
        essence = functions.essence(self.config, self.mesh)
        return functions.jitted["forward"](
            essence, self.params, self.balance, jnp.asarray(ids), segments=segments, mesh=self.mesh
        )["logits"]

    def layer(self, number: int) -> nnx.Module:
        """A layer as a Flax module with its own weights: `cca`, `router`, `experts`, norms and
        joins.

        >>> model.layer(1).router.fc1.kernel.shape
        (8, 8)
        """
        return zaya.layer_of(self.config.model, self.params, number, self.config.precision)

    def lens(self, hidden_states: Any) -> np.ndarray:
        """The logit lens: logits of residual streams [.., S, D] such as a trace's, through the last
        norm and the head.

        >>> seen = model.trace(ids)
        >>> bool(np.allclose(model.lens(seen.hidden_states)[-1], seen.logits, atol=1e-6))
        True
        """
        essence, params = functions.essence(self.config, self.mesh), self._where_it_computes()[0]
        return np.asarray(functions.jitted["lens"](essence, params, jnp.asarray(hidden_states)))

    def logits(self, ids: Any, *, segments: Any = None) -> np.ndarray:
        """Next-token logits [B, S, V] of ids [B, S].

        >>> model.logits(ids).shape
        (2, 7, 264)
        """
        return self._run("forward", *self._inputs(ids, segments))["logits"]

    def loss(self, ids: Any, labels: Any, *, segments: Any = None, shifted: bool = False) -> float:
        """Mean cross entropy in nats; labels stand at their own tokens, -100 counts for nothing;
        see `zj.loss`.

        >>> bool(abs(model.loss(ids, ids) - np.log(264)) < 0.5)  # fresh weights know nothing
        True
        """
        ids, labels, segments = self._labelled(ids, labels, segments, shifted)
        return float(self._run("loss", ids, segments, labels=labels, shifted=shifted))

    def scores(
        self, ids: Any, labels: Any, *, segments: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(log-probabilities, whether each is the likeliest) [B, S] of labels placed one before;
        `zj.scores`.

        >>> log_probs, likeliest = model.scores(ids[:, :-1], ids[:, 1:])
        >>> log_probs.shape, bool(np.allclose(-log_probs.mean(), model.loss(ids, ids)))
        ((2, 6), True)
        """
        ids, labels, segments = self._labelled(ids, labels, segments, True)
        return self._run("scores", ids, segments, labels=labels)

    def loss_and_grads(
        self, ids: Any, labels: Any, *, segments: Any = None, shifted: bool = False
    ) -> tuple[float, dict]:
        """The loss, and its gradients as a tree like `params`, on the same devices.

        >>> value, grads = model.loss_and_grads(ids, ids)
        >>> bool(value == model.loss(ids, ids)), grads["embed"]["embedding"].shape
        (True, (264, 16))
        """
        ids, labels, segments = self._labelled(ids, labels, segments, shifted)
        value, grads = self._run("loss_and_grads", ids, segments, labels=labels, shifted=shifted)
        return float(value), grads

    def trace(self, ids: Any, *, segments: Any = None, attention: bool = False) -> Trace:
        """The inside of a forward pass over these ids; `attention` takes L B H S S numbers more,
        and one device.

        >>> seen = model.trace(ids, attention=True)
        >>> seen.hidden_states.shape, seen.choices.shape, seen.attention.shape
        ((2, 2, 7, 16), (2, 2, 7), (2, 2, 4, 7, 7))
        """
        if attention and self.mesh is not None:
            raise UserError("attention is traced only on one device; load the model without a mesh")
        if attention and "hybrid_linear" in self.config.model.kinds:
            raise UserError(
                "a layer of linear attention gives no key a weight; trace with attention=False"
            )
        inputs = self._inputs(ids, segments)
        arrays = self._run("forward", *inputs, trace=True, attention=attention)
        if "router_probs" in arrays:
            biased = arrays["router_probs"] + np.asarray(self.balance)[:, None, None]
            arrays["choices"] = biased.argmax(-1)
        return Trace(**{field.name: arrays.get(field.name) for field in dataclasses.fields(Trace)})

    def generate(
        self,
        prompt: Any,
        num_tokens: int = 200,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
        samples: int | None = None,
        log_probs: bool = False,
    ) -> Any:
        """Continues a text, ids or a conversation, or a list of them of any lengths. See
        docs/generation.md.

        A text or ids come back with their prompt, a conversation ([{"role": "user", "content": ..},
        ..]) as its answer. A text ends at the tokenizer's end of document or before one of `stop`,
        an answer at the end of its turn too, and any at one of `ends`. `temperature`, `top_k`,
        `top_p` and `min_p` are those of `Sampling`. `seed` is one for all rows, or one for each.
        With `samples` each prompt gets a list of that many continuations, by its seed and the ones
        after it. With `log_probs` the result is a pair: the continuations, and the log-probability
        of each new token before sampling changes it.

        >>> model.generate("ab", 4).startswith("ab"), model.generate(ids, 4).shape
        (True, (2, 11))
        >>> len(model.generate("ab", 4, temperature=1.0, samples=3)), len(model.generate([97, 98], 4))
        (3, 6)
        """
        parsed = generation.parse_prompt(prompt, self.tokenizer, self.source, stop)
        count = 1 if samples is None else samples
        seeds: Any = [seed] * len(parsed.ids) if np.ndim(seed) == 0 else seed
        rows = [row for row in parsed.ids for _ in range(count)]
        continued = self.continued(
            rows,
            num_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=[x + i for x in seeds for i in range(count)],
            ends=[*parsed.ends, *ends],
        )
        results: Any = generation.results(continued, parsed, rows, self.tokenizer)
        scored: Any = self._log_probs(rows, continued.ids) if log_probs else []
        if samples is not None:
            results = [results[i : i + count] for i in range(0, len(results), count)]
            scored = [scored[i : i + count] for i in range(0, len(scored), count)]
        if parsed.single:
            return (results[0], scored[0]) if log_probs else results[0]
        if isinstance(prompt, np.ndarray | jax.Array) and samples is None and not ends:
            results = np.asarray(results)
        return (results, scored) if log_probs else results

    def _log_probs(
        self, rows: Sequence[Sequence[int]], new: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """The log-probability of each new token, given all before it."""
        wholes = [[*row, *added] for row, added in zip(rows, new, strict=True)]
        longest = max(map(len, wholes))
        # One more column, since a prompt of one token may have gained none.
        ids = np.asarray([[*whole, *[0] * (longest + 1 - len(whole))] for whole in wholes])
        scores = self.scores(ids[:, :-1], ids[:, 1:])[0]
        return [
            scores[i, len(row) - 1 :][: len(added)]
            for i, (row, added) in enumerate(zip(rows, new, strict=True))
        ]

    def stream(
        self,
        prompt: Any,
        num_tokens: int = 200,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
    ) -> Iterator[str]:
        """The new text of one text or conversation, as it comes; the options are those of
        `generate`.

        >>> "".join(model.stream("ab", 4)) == model.generate("ab", 4)[2:]
        True
        """
        parsed = generation.parse_prompt(prompt, self.tokenizer, self.source, stop)
        if parsed.form == "ids" or not parsed.single:
            raise UserError(
                "stream takes one text or conversation; `continued` gives the ids of several as"
                " they come"
            )
        assert self.tokenizer is not None
        continued = self.continued(
            parsed.ids,
            num_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            ends=[*parsed.ends, *ends],
        )
        for (new,) in generation.stream(
            continued, self.tokenizer, parsed.ids, parsed.stop, follows=parsed.form == "text"
        ):
            yield new

    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int = 200,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | Sequence[int] = 0,
        ends: Sequence[int] = (),
        mask: Any = None,
    ) -> decode.Continuation:
        """Continues lists of ids of any lengths piece by piece. The options are those of
        `generate`; `mask` (1 = real) is for ids [B, S] padded at the left.

        A mesh with several devices on `context` holds the cache in parts over them. On another one,
        the weights are gathered on the first device.

        >>> [len(new) for new in model.continued([[256, 97], [256]], 4).more()]
        [1, 1]
        """
        sampling = Sampling(temperature, top_k, top_p, min_p)
        if sampling.unused:
            warnings.warn(sampling.unused, stacklevel=2)
        return decode.Continuation(
            self._decoder(),
            prompts,
            num_tokens,
            sampling=sampling,
            seeds=seed,
            ends=ends,
            mask=mask,
        )

    def on_one_device(self) -> tuple[dict, jax.Array]:
        """(parameters, balancing biases) as they are, or gathered from a mesh on its first device.

        >>> params, balance = model.on_one_device()
        >>> balance.devices() == {jax.devices()[0]}, params.keys() == model.params.keys()
        (True, True)
        """
        first = jax.local_devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        return jax.device_put((self.params, self.balance), first)

    def save(self, directory: str | os.PathLike) -> Path:
        """Writes a workdir with these weights as step 0: for `zj.load`, `experiments.checkpoint`,
        and to train on.

        >>> zj.load(model.save(folder / "saved")).loss(ids, ids) == model.loss(ids, ids)
        True
        """
        target = arguments.new_folder(directory)
        config = arguments.as_begun(
            self.config, target / "tokenizer" if self._origin.tokenizer_file_contents() else None
        )
        return exchange.write_workdir(target, self._as_any_model(), config)

    def to_hf(self, directory: str | os.PathLike, dtype: str | None = None) -> Path:
        """Writes a directory that transformers' `zaya` loads; `dtype` is by default as imported,
        otherwise float32.

        >>> model.to_hf(folder / "hf").name
        'hf'
        """
        return exchange.to_hf(self._as_any_model(), arguments.new_folder(directory), dtype)

    def _as_any_model(self) -> AnyModel:
        """As `any_model.find` would give it, with these weights."""
        weights = exchange.InMemory({"params": self.params, "balance": {"bias": self.balance}})
        return dataclasses.replace(
            self._origin, name=self.source, config=self.config, source=weights
        )

    def _decoder(self) -> decode.Decoder:
        self._as_any_model().check()  # they may have been replaced
        devices, config = tree.cache_over(self.mesh), self.config
        weights = self.on_one_device() if devices.mesh is None else (self.params, self.balance)
        return decode.Decoder(config.model, *weights, config.precision, devices, config.kernels)

    def _run(self, name: str, ids: Any, segments: Any, labels: Any = None, **further: Any) -> Any:
        """The result of one of `functions.jitted`, on the host but for gradients.

        Rows without segments are padded to one of few shapes: a token sees none after it, and none
        of another row.
        """
        self._as_any_model().check()  # the weights may have been replaced
        rows, columns = ids.shape
        if segments is None:
            to = functions.roomy(rows, columns, self.config.model.max_position_embeddings)
            more = [(0, to[0] - rows), (0, to[1] - columns)]
            ids = np.pad(ids, more)
            if labels is not None:
                labels = np.pad(labels, more, constant_values=functions.IGNORED)
        if labels is not None:
            further["labels"] = labels
        params, balance = self._where_it_computes()
        with chip.making(chip.made_for(params if self.mesh is None else self.mesh)):
            results = functions.jitted[name](
                functions.essence(self.config, self.mesh),
                params,
                balance,
                ids,
                segments=segments,
                mesh=self.mesh,
                **further,
            )
        if name == "scores":
            return tuple(np.asarray(x)[:rows, :columns] for x in results)
        if name != "forward":
            return results
        cut = {
            "logits": np.s_[:rows, :columns],
            "attention": np.s_[:, :rows, :, :columns, :columns],
        }
        return {
            key: np.asarray(x)[cut.get(key, np.s_[:, :rows, :columns])]
            for key, x in results.items()
        }

    def _where_it_computes(self) -> tuple[dict, jax.Array]:
        """(parameters, balancing biases) on the model's devices: replaced ones may lie on
        others."""
        if self.mesh is None:
            return self.on_one_device()
        at = functions.shardings(self.config, self.mesh)
        return jax.device_put((self.params, self.balance), (at["params"], at["balance"]["bias"]))

    def _inputs(self, ids: Any, segments: Any) -> tuple[np.ndarray, np.ndarray | None]:
        model = self.config.model
        ids = arguments.integers("ids", ids, None, model.vocab_size)
        if ids.shape[1] > model.max_position_embeddings:
            raise UserError(
                f"ids have {ids.shape[1]} columns, above the model's max_position_embeddings="
                f"{model.max_position_embeddings}; give shorter rows"
            )
        if segments is not None:
            segments = arguments.integers("segments", segments, ids.shape, 2**31)
        return ids, segments

    def _labelled(
        self, ids: Any, labels: Any, segments: Any, shifted: bool
    ) -> tuple[Any, Any, Any]:
        ids, segments = self._inputs(ids, segments)
        labels = arguments.integers(
            "labels", labels, ids.shape, self.config.model.vocab_size, functions.IGNORED
        )
        if not (functions.to_targets(labels, segments, shifted, np) >= 0).any():
            raise UserError(
                "no label counts, so there is no loss; the first of a row has no token before it"
            )
        return ids, labels, segments


def create(
    config: AnyConfig,
    seed: int | None = None,
    *,
    mesh: Mapping[str, Any] | None = None,
    layer: type[nnx.Module] | str | None = None,
    router: type[Router] | str | None = None,
) -> LanguageModel:
    """A model with fresh weights, the same as a run of this config and seed begins with.

    `config` is a ConfigDict or nested dict, a Config, a config file's path, or the name of one of
    experiments/configs. `seed` is by default its `run.seed`. `layer` and `router`: subclasses of
    `zj.Layer` and `zj.Router` in the place of these, or their names, "MODULE:CLASS"
    (docs/howto/own_layer.md).

    >>> zj.create(model.config, seed=1).logits(ids).shape
    (2, 7, 264)
    """
    host.keep_compiled()
    settings = arguments.config_of(config)
    seed = settings.run.seed if seed is None else seed
    tokenizer: tokenizers.Tokenizer | None = tokenizers.load(settings.data.tokenizer)
    if tokenizer and tokenizer.vocab_size > settings.model.vocab_size:
        tokenizer = None  # a model for custom ids
    elif tokenizer:
        settings = tokenizers.with_model_ids(settings, tokenizer)
    settings = dataclasses.replace(
        settings, model=customized(settings.model, layer=layer, router=router)
    )
    settings, device_mesh = arguments.with_mesh(settings, mesh)
    kernels.choose_tiles(settings, jax.devices()[0])
    params, balance = functions.init(settings, seed, device_mesh)
    name, place = f"seed {seed}", settings.data.tokenizer if tokenizer else None
    origin = AnyModel(name, Path(), settings, exchange.InMemory({}), place)
    return LanguageModel(settings, params, balance, tokenizer, device_mesh, name, origin)


def load(
    place: str | os.PathLike,
    *,
    mesh: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    config: AnyConfig | None = None,
    layer: type[nnx.Module] | str | None = None,
    router: type[Router] | str | None = None,
    changed_source: bool = False,
) -> LanguageModel:
    """The model of any name: a run's folder, FOLDER@STEP, a directory of transformers, or
    OWNER/NAME on the hub.

    `mesh`: sizes and switches as config.mesh has them: {"expert": 2, "fsdp": True}. Matrices
    multiply in `dtype`; by default as the run did, and in float32 where the model was imported.
    Each of several processes gets the whole model, on its own devices. A state that Orbax saved has
    no config: give it, as for `create`. A run with a layer or router of your own needs these, as
    `create` takes them; with `changed_source` their file may have changed since.

    >>> zj.load(run).tokenizer.kind
    'bytes'
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise UserError(f"dtype={shown(dtype)} is not one of float32, bfloat16")
    host.keep_compiled()
    settings = None if config is None else arguments.config_of(config)
    model = any_model.find(place, settings)
    own = customized(model.config.model, layer=layer, router=router)
    require_same_source(own, model.source.meta(), model.name, changed_source, print)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, model=own))
    if model.source.warning:
        print(f"note: {model.name}{model.source.warning}")
    if dtype is None and isinstance(model.source, hf.Directory):  # it is being imported now
        dtype = "float32"
    settings = arguments.with_dtype(dataclasses.replace(model.config, model=model.model), dtype)
    settings, device_mesh = arguments.with_mesh(settings, mesh)
    kernels.choose_tiles(settings, jax.devices()[0])
    places = functions.shardings(settings, device_mesh) if device_mesh else None
    params, balance = model.load_weights(places)
    origin = dataclasses.replace(model, source=exchange.InMemory({}))
    return LanguageModel(
        settings, params, balance, model.tokenizer(), device_mesh, model.name, origin
    )


def train(
    config: AnyConfig,
    workdir: str | os.PathLike | None = None,
    *,
    tracker: Callable[[int, dict], None] | None = None,
    observers: Sequence[Observer] = (),
) -> LanguageModel:
    """Trains or resumes as `python -m experiments.pretrain` does, and returns the model of the last
    step.

    TrainingStopped if the run is not done. An interrupt saves the step in flight and stops; a
    second one ends the whole process at once. The model lies on the run's mesh if that has several
    devices. `tracker` is called with each step and its figures, in a thread of its own; each of
    `observers` after every `every` steps, with the state too (`zj.Observer`).

    >>> zj.train(config, run).source.endswith("@4")  # it was complete
    True
    """
    if multihost.process_index_and_count()[1] > 1:
        raise UserError("a model object is of one process; several train by experiments.pretrain")
    if threading.current_thread() is not threading.main_thread():
        raise UserError("training listens to signals, so it needs the process's main thread")
    settings = arguments.config_of(config)
    sizing.set_for_platform(settings)
    folder = folder_of(settings, workdir)
    with leaving.signals_as_they_were():
        code = run.train(settings, folder, None, tracker, observers)
    if code != cli.DONE:
        raise TrainingStopped(code, folder)
    mesh = None
    if jax.device_count() > 1:
        recorded = read_config(folder)  # with a fork's parent filled in
        last_phase = schedule.phase_at(recorded, recorded.run.num_steps)
        mesh = dataclasses.asdict(schedule.phase_config(recorded, last_phase).mesh)
    own: dict[str, Any] = {part: own_class(settings.model, part) for part in BASES}
    return load(folder, mesh=mesh, changed_source=settings.run.changed_source, **own)
