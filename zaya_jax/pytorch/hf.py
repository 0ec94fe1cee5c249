"""Reading the public PyTorch ZAYA's directories, and a model object to run what was read.

    from zaya_jax.pytorch import hf
    model = hf.load("DIR", dtype="float32")
    model.logits(ids)                                   # [B, S, V]
    model.generate(ids, num_tokens=12)                  # [B, S + 12], greedy, cached
    loss, grads = model.loss_and_grads(ids, labels)     # gradients under the PyTorch names

No PyTorch is needed; every tensor's name, shape and dtype is checked before any is read.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chip
from pallas_kernels.cross_entropy import cross_entropy
from zaya_jax.config import Model, Precision, UserError, shown
from zaya_jax.config.fields import path_problem
from zaya_jax.config.files import read_json as json_of
from zaya_jax.model import decode, zaya
from zaya_jax.pytorch import hf_names as names
from zaya_jax.pytorch import tensor_files
from zaya_jax.pytorch.tensor_files import TensorFile

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
ANEW = "copy config.json and weights anew from one place"
IGNORED = -100  # a label that counts for nothing


class Directory:
    """A checked model directory: its config, and its tensors one at a time."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(
                f"{self.path} is not a directory; give one with config.json and model.safetensors"
            )
        self.json = read_json(self.path / "config.json")
        self.model = names.model_from_json(self.json, str(self.path / "config.json"))
        self._files = self._locate()
        self._check()

    def _locate(self) -> dict[str, TensorFile]:
        """The file of each tensor."""
        index = self.path / tensor_files.INDEX
        if (self.path / tensor_files.SINGLE).exists() or not index.exists():
            single = self._open(tensor_files.SINGLE)
            return dict.fromkeys(single.names(), single)
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise UserError(f"{index} has no weight_map, a map from tensor names to files; {ANEW}")
        files = {}
        for name, file in sorted(where.items()):
            if not isinstance(file, str) or path_problem(file) or Path(file).name != file:
                raise UserError(f"{index} places {name} in {shown(file)}, which is no file beside it; {ANEW}")
            if file not in files:
                files[file] = self._open(file)
            if name not in files[file].names():
                raise UserError(f"{self.path / file} lacks {name}, which {index.name} places there; {ANEW}")
        for file, held in files.items():
            extra = sorted(held.names() - set(where))
            if extra:
                raise UserError(
                    f"{self.path / file} holds {extra[0]}{_and_more(extra)}, unknown to {index.name}; {ANEW}"
                )
        return {name: files[file] for name, file in where.items()}

    def _open(self, file: str) -> TensorFile:
        path = self.path / file
        if not path.is_file():
            pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in PICKLES)
            if pickles and not list(self.path.glob("*.safetensors")):
                raise UserError(
                    f"{self.path} has no safetensors but {pickles[0]}{_and_more(pickles)}, which may run code when it "
                    "is read; load it with transformers and save_pretrained(DIR, safe_serialization=True)"
                )
            raise UserError(
                f"{path} is missing; a model directory has model.safetensors, or the files its index names: {ANEW}"
            )
        return TensorFile(path)

    def _check(self) -> None:
        expected = expected_shapes(self.model)
        missing = sorted(set(expected) - set(self._files), key=names.natural)
        # Some files repeat the tied embedding.
        extra = sorted(set(self._files) - set(expected) - {names.HEAD}, key=names.natural)
        if missing:
            raise UserError(
                f"{self.path} lacks tensor {missing[0]}{_and_more(missing)}, which its config.json implies; {ANEW}"
            )
        if extra:
            raise UserError(
                f"{self.path} has an unknown tensor {extra[0]}{_and_more(extra)}; its config.json implies none; {ANEW}"
            )
        if names.HEAD in self._files:
            expected[names.HEAD] = expected[names.EMBEDDING]
        for name, shape in expected.items():
            file = self._files[name]
            if file.shape(name) != shape:
                raise UserError(f"{self.path}: {name} has shape {file.shape(name)}, expected {shape}; {ANEW}")
            if file.dtype_name(name) not in tensor_files.DTYPES:
                known = ", ".join(tensor_files.DTYPES)
                raise UserError(
                    f"{self.path}: {name} has dtype {file.dtype_name(name)}, save it as one of {known}"
                )
        if names.HEAD in self._files and not np.array_equal(
            self.tensor(names.HEAD).view(np.uint8), self.tensor(names.EMBEDDING).view(np.uint8)
        ):
            raise UserError(
                f"{self.path}: {names.HEAD} differs from {names.EMBEDDING}; the head must be tied: ZAYA has no other"
            )

    def dtypes(self) -> dict[str, str]:
        """The stored dtype of every tensor: float32, float16 or bfloat16."""
        return {n: tensor_files.DTYPES[f.dtype_name(n)].name for n, f in self._files.items()}

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as it is stored; UserError where it has a NaN or an infinity, with which no run could begin."""
        x = self._files[name].read(name)
        bad = x.size - np.count_nonzero(np.isfinite(x))
        if bad:
            raise UserError(
                f"{self.path}: {name} has {bad:,} of {x.size:,} numbers that are not finite; {ANEW}, or take an "
                "earlier checkpoint of that model"
            )
        return x

    def leaves(self) -> Iterator[tuple[tuple[str, ...], int | None, np.ndarray]]:
        """(our path, layer or None, array in our layout and float32) of each parameter, tensor by tensor."""
        shapes = zaya.abstract(self.model)
        for name, row, layer in names.all_rows(self.model):
            shape = names.get(shapes, row.path, layer).shape
            x = row.from_torch(self.tensor(name), shape if layer is None else shape[1:])
            path = row.path if layer is None else ("layers", *row.path)
            yield path, layer, x.astype(np.float32, copy=False)

    def balance(self) -> np.ndarray:
        """Balancing biases [L, E + 1]."""
        layers = range(self.model.num_hidden_layers)
        return np.stack([self.tensor(names.balance_name(i)).astype(np.float32) for i in layers])

    def params(self) -> dict:
        """The whole parameter tree, float32, in memory."""
        return fill(zaya.abstract(self.model), self.leaves())


def fill(shapes: dict, leaves, make=np.zeros) -> dict:
    """A parameter tree of NumPy arrays filled leaf by leaf; `make(shape, dtype)` allocates. Unused EDA scales are 1."""
    tree = jax.tree.map(lambda s: make(s.shape, np.float32), shapes)
    tree["layers"]["router"]["eda"][0] = 1.0
    for path, layer, x in leaves:
        target = tree
        for key in path:
            target = target[key]
        target[... if layer is None else layer] = x
    return tree


def expected_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape in their layout."""
    shapes = zaya.abstract(model)
    out = {}
    for name, row, layer in names.all_rows(model):
        shape = names.get(shapes, row.path, layer).shape
        like = np.broadcast_to(np.float32(0), shape if layer is None else shape[1:])
        out[name] = row.to_torch(like).shape
    for layer in range(model.num_hidden_layers):
        out[names.balance_name(layer)] = (model.num_experts + 1,)
    return out


def load(path: str | os.PathLike, dtype: str = "float32") -> "Loaded":
    """The model of a directory, ready to run; `dtype` is what its matrices multiply in."""
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype={dtype!r} is not one of float32, bfloat16")
    directory = Directory(path)
    precision = Precision(
        compute=dtype, router="float32", matmul="highest" if dtype == "float32" else "default"
    )
    params = jax.tree.map(jnp.asarray, directory.params())
    return Loaded(directory.model, params, jnp.asarray(directory.balance()), precision)


@dataclasses.dataclass
class Loaded:
    """A model with its weights; takes and gives NumPy arrays. `mask` is 1 at real tokens, for left-padded rows."""

    model: Model
    params: dict
    balance: jax.Array
    precision: Precision

    def trace(self, ids, mask=None) -> dict[str, np.ndarray]:
        """logits, and every layer's residual stream and router logits (`hidden_states.I`, `router_logits.I`)."""
        with self._as_asked():
            out, logits = _forward(
                self.model, self.precision, True, self.params, self.balance, *self._inputs(ids, mask)
            )
        traced = {"logits": np.asarray(logits)}
        for layer in range(self.model.num_hidden_layers):
            traced[f"hidden_states.{layer}"] = np.asarray(out.hidden_states[layer])
            traced[f"router_logits.{layer}"] = np.asarray(out.router_logits[layer])
        return traced

    def logits(self, ids, mask=None) -> np.ndarray:
        """Next-token logits [B, S, V], float32."""
        with self._as_asked():
            return np.asarray(
                _forward(
                    self.model, self.precision, False, self.params, self.balance, *self._inputs(ids, mask)
                )[1]
            )

    def generate(self, ids, num_tokens: int, mask=None) -> np.ndarray:
        """ids [B, S] continued greedily by `num_tokens`, with the cache: [B, S + num_tokens]."""
        ids, mask = (None if x is None else np.asarray(x) for x in self._inputs(ids, mask))
        new = decode.generate(
            self.model, self.params, self.balance, ids, num_tokens, self.precision, mask=mask
        )
        return np.concatenate([ids, np.asarray(new, np.int32).reshape(len(ids), -1)], axis=1)

    def loss_and_grads(self, ids, labels) -> tuple[float, dict[str, np.ndarray]]:
        """Mean next-token loss (labels un-shifted, -100 ignored), and its gradients in the PyTorch names and shapes."""
        ids, _ = self._inputs(ids, None)
        labels = np.asarray(labels)
        if labels.shape != ids.shape:
            raise UserError(f"labels have shape {labels.shape}; expected that of the ids, {ids.shape}")
        self._inputs(np.where(labels == IGNORED, 0, labels), None)
        labels = jnp.asarray(labels.astype(np.int32))
        with self._as_asked():
            loss, grads = _loss_and_grads(self.model, self.precision, self.params, self.balance, ids, labels)
        return float(loss), to_torch_tree(self.model, grads)

    @contextlib.contextmanager
    def _as_asked(self):
        target = chip.made_for(self.params)
        with chip.making(target), jax.default_matmul_precision(self.precision.matmul):
            yield

    def _inputs(self, ids, mask):
        ids = np.asarray(ids)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(f"ids have shape {ids.shape} and dtype {ids.dtype}; expected integers [B, S]")
        for token in (ids.min(), ids.max()) if ids.size else ():
            if not 0 <= token < self.model.vocab_size:
                raise UserError(f"token {token} is outside the vocabulary of {self.model.vocab_size}")
        if mask is not None:
            mask = np.asarray(mask)
            if mask.shape != ids.shape:
                raise UserError(f"mask has shape {mask.shape}; expected that of the ids, {ids.shape}")
            mask = jnp.asarray(mask.astype(np.int32))
        return jnp.asarray(ids.astype(np.int32)), mask


def to_torch_tree(model: Model, tree: dict) -> dict[str, np.ndarray]:
    """A tree shaped like the parameters (gradients, say) under the PyTorch names and shapes."""
    tree = jax.tree.map(np.asarray, tree)
    out = {}
    for name, row, layer in names.all_rows(model):
        leaf = names.get(tree, row.path, layer)
        out[name] = np.ascontiguousarray(row.to_torch(leaf if layer is None else leaf[layer]))
    return out


def _forward(model, precision, trace, params, balance, ids, mask):
    return _forward_jit(params, balance, ids, mask, model=model, precision=precision, trace=trace)


def _forward_impl(params, balance, ids, mask, *, model, precision, trace):
    out = zaya.apply(model, params, balance, ids, precision=precision, mask=mask, trace=trace)
    return out, zaya.logits(model, params, out.hidden, precision)


def _loss_impl(params, balance, ids, labels, *, model, precision):
    def loss_fn(params):
        out = zaya.apply(model, params, balance, ids, precision=precision)
        targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED).reshape(-1)
        real = (targets >= 0).astype(jnp.float32)
        total, _ = cross_entropy(
            out.hidden.reshape(targets.size, -1), params["embed"]["embedding"],
            params["head"]["bias"] if model.lm_head_bias else None,
            jnp.maximum(targets, 0), real, dtype=jnp.dtype(precision.compute),
        )  # fmt: skip
        return total / real.sum()

    return jax.value_and_grad(loss_fn)(params)


_forward_jit = jax.jit(_forward_impl, static_argnames=("model", "precision", "trace"))
_loss_and_grads_jit = jax.jit(_loss_impl, static_argnames=("model", "precision"))


def _loss_and_grads(model, precision, params, balance, ids, labels):
    return _loss_and_grads_jit(params, balance, ids, labels, model=model, precision=precision)


def read_json(path: Path) -> dict:
    """What a JSON file of a model directory holds; UserError where it is no object."""
    try:
        out = json_of(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; give a model directory as transformers writes it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); copy it anew") from None
    if not isinstance(out, dict):
        raise UserError(f"{path} holds {type(out).__name__}, expected a JSON object; copy it anew")
    return out


def _and_more(items: list) -> str:
    return f" and {len(items) - 1} more" if len(items) > 1 else ""
