"""Low-rank updates (LoRA): matrices of attention and experts stay as they are, small factors beside
them are trained.

A layer gets W + A B for a matrix W [.., a, b], with A [.., a, r] and B [.., r, b]
(`placement.Weights.local`); the experts' gate and up [.., a, 2, b] count as one matrix of 2 b
columns. A begins as random numbers of variance 1 / a, B as zeros, so a run
begins with the function of the weights under it. There is no factor on the product (PEFT's alpha is
r): the learning rate sets its pace.

Adapters are a tree like the parameters, with a pair {"a", "b"} in each place of an adapted matrix,
and no other places.
"""

import math

import jax
import jax.numpy as jnp

from zaya_jax import trees
from zaya_jax.config import Model, Precision
from zaya_jax.model import quantized, zaya
from zaya_jax.model.weights import PAIR

RANK = "rank"  # the logical axis between the factors


def targets(model: Model) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of each adapted matrix by its path, "layers/cca/q/kernel": of its stack,
    rows and columns."""
    axes = jax.tree_util.tree_flatten_with_path(
        zaya.param_axes(model), is_leaf=lambda x: isinstance(x, tuple)
    )[0]
    by_path = {trees.name_of(path, "/"): names for path, names in axes}
    return {
        path: tuple(name for name in names if name != PAIR)
        for path, names in by_path.items()
        if _is_product_weight(path) and not path.endswith("/bias")
    }


def _is_product_weight(path: str) -> bool:
    """Whether only products read a weight, rounded to their format."""
    parts = path.split("/")  # "layers", the block, the weight
    return len(parts) > 2 and parts[2] in zaya.PRODUCT_WEIGHTS.get(parts[1], ())


def param_axes(model: Model) -> dict:
    """The logical axes of the adapters, as `zaya.param_axes` has them."""
    pairs = {
        path: {"a": (*axes[:-1], RANK), "b": (*axes[:-2], RANK, axes[-1])}
        for path, axes in targets(model).items()
    }
    return trees.nested(pairs, "/")


def abstract(model: Model, rank: int) -> dict:
    """The adapters as ShapeDtypeStructs, float32."""
    shapes, pairs = trees.flat(zaya.abstract(model), "/"), {}
    for path, axes in targets(model).items():
        *stack, rows = shapes[path].shape[: len(axes) - 1]
        columns = math.prod(shapes[path].shape[len(axes) - 1 :])
        pairs[f"{path}/a"] = jax.ShapeDtypeStruct((*stack, rows, rank), jnp.float32)
        pairs[f"{path}/b"] = jax.ShapeDtypeStruct((*stack, rank, columns), jnp.float32)
    return trees.nested(pairs, "/")


def init(model: Model, rank: int, key: jax.Array) -> dict:
    """Fresh adapters, which change nothing yet; a function of the key alone."""
    adapters = {}
    for i, (path, x) in enumerate(trees.flat(abstract(model, rank), "/").items()):
        random = jax.random.normal(jax.random.fold_in(key, i), x.shape) * x.shape[-2] ** -0.5
        adapters[path] = random if path.endswith("/a") else jnp.zeros(x.shape)
    return trees.nested(adapters, "/")


def merged(base: dict, adapters: dict) -> dict:
    """The weights that layers compute with (`placement.Weights.local`), as a tree like the base."""
    weights, factors = trees.flat(base, "/"), trees.flat(adapters, "/")
    for path in {name.rpartition("/")[0] for name in factors}:
        x = weights[path]
        update = jnp.matmul(factors[f"{path}/a"], factors[f"{path}/b"], precision="highest")
        weights[path] = (x + update.reshape(x.shape)).astype(x.dtype)
    return trees.nested(weights, "/")


def abstract_base(model: Model, precision: Precision, form: str) -> dict:
    """The weights under the adapters as ShapeDtypeStructs: one copy of each, in the products'
    format where only those read it, and the embedding too.

    {"params", "scales"}: with a `form` of `quantized`, the experts' params are codes, and the
    scales of a layer's are at "experts/down/scale".
    """
    params, scales = {}, {}
    for path, x in trees.flat(zaya.abstract(model, precision), "/").items():
        dtype = precision.compute if is_narrow(path) else x.dtype
        params[path] = jax.ShapeDtypeStruct(x.shape, dtype)
    for name, axis in quantized.input_axes(form).items():
        path = f"layers/{name}"
        codes, scale = quantized.abstract(params[path].shape, form, axis)
        params[path], scales[f"{name}/scale"] = codes, scale
    return {"params": trees.nested(params, "/"), "scales": trees.nested(scales, "/")}


def base_axes(model: Model, precision: Precision, form: str) -> dict:
    """The logical axes of the weights under the adapters."""
    params, scales = zaya.param_axes(model, precision), {}
    for name in quantized.input_axes(form):
        block, weight = name.split("/")
        axes = quantized.scale_axes(name, params["layers"][block][weight])
        scales[f"{name}/scale"] = axes
    return {"params": params, "scales": trees.nested(scales, "/")}


def is_narrow(path: str) -> bool:
    """Whether a frozen weight is kept in the products' format."""
    return path == "embed/embedding" or _is_product_weight(path)
