"""ZAYA1, or a dense model, as a pure function of a plain parameter tree.

`Zaya` (Flax NNX) declares the weights and the arithmetic; layers are stacked on a leading axis and
scanned, so one layer is traced for any number of them. Full and sliding attention differ only in
data; if some layers have linear attention, a period of layers is traced (zaya_jax/model/stack.py).
Outside this package parameters are nested dicts of arrays: `init` or `abstract` make them, `apply`
runs the model on them. Balancing biases [L, E + 1] are state, not parameters, and always come as an
argument.

    apply → Zaya → Embed → scan_layers (`stack`) of layers → final norm → Output.hidden → logits
                           each layer: CCA (`cca`) → Router (`router`) → Experts (`layer`, `experts`)
                           with a Placement (`placement`) and its weights by the hooks (`scan_hooks`)
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import chip, tiles
from pallas_kernels.attention import NO_WINDOW, SAVED
from pallas_kernels.cross_entropy import chunk_rows
from pallas_kernels.grouped_mlp import PRODUCTS, hold
from pallas_kernels.products import DOTS, times_rows
from pallas_kernels.residual_norm import rms_norm
from pallas_kernels.rotary import rope_table
from zaya_jax import trees
from zaya_jax.config import Model, Precision, UserError
from zaya_jax.model.dense import DenseLayer
from zaya_jax.model.layer import Layer
from zaya_jax.model.lookup import lookup
from zaya_jax.model.own_parts import own_class
from zaya_jax.model.placement import (
    ONE_DEVICE,
    CacheInput,
    Devices,
    LayerOutput,
    Placement,
    TokenRows,
)
from zaya_jax.model.scan_hooks import PLAIN, HookInputs, ScanHooks
from zaya_jax.model.stack import linear_pattern, pack_vectors, scan_layers
from zaya_jax.model.weights import RMSNorm, TokenSum, weight

SKIP_BIAS = -1.0  # the constant balancing bias of the skip class


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    """The result of a forward pass: the normed last hidden state and each layer's routing of the
    tokens."""

    hidden: Float[Array, "B S D"]
    counts: Float[Array, "L E1"]  # real tokens of each class
    sums: dict[str, Float[Array, "L"]]  # the layers' `TokenSum`s, by path
    cache: dict | None = None
    # the residual stream after each layer (trace=True)
    hidden_states: Float[Array, "L B S D"] | None = None
    router_logits: Float[Array, "L N E1"] | None = None
    expert_outputs: Float[Array, "L N D"] | None = None


LAYERS = {"zaya": Layer, "dense": DenseLayer}  # by model_type
PRODUCT_WEIGHTS = {  # the weights of a layer that are read only in `precision.compute`
    "cca": ("q", "k", "v_now", "v_prev", "o"),
    "experts": ("gate_up", "down"),
    "attention": ("q", "k", "v", "o"),
    "mlp": ("gate", "up", "down"),
}


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, model: Model):
        shape = (model.vocab_size, model.hidden_size)
        self.embedding = weight(rngs, shape, ("vocab", "embed"), model.initializer_range)
        self.bias = weight(rngs, shape[1:], ("embed",), "zeros")
        self.scale = weight(rngs, shape[1:], ("embed",), "ones")

    @jax.named_scope("embed")
    def __call__(self, tokens: Int[Array, "B S"], pad_id: int | None) -> Float[Array, "B S D"]:
        rows = lookup(self.embedding[...], tokens)
        # as in the port, looking up the padding id gives its row no gradient
        if pad_id is not None:
            rows = jnp.where((tokens == pad_id)[..., None], jax.lax.stop_gradient(rows), rows)
        return (rows + self.bias[...]) * self.scale[...]


class Head(nnx.Module):
    """The tied head's own weights: an optional bias."""

    def __init__(self, rngs: nnx.Rngs, model: Model):
        self.bias = weight(rngs, (model.vocab_size,), ("vocab",), "zeros")


class LayerCarry(NamedTuple):
    """What the scan hands on from each layer to the next."""

    h: Float[Array, "B S D"]
    router_state: Float[Array, "N R"]
    hidden_stack: Float[Array, "L N F2"] | None  # filled layer by layer (`ScanHooks.experts`)


class LayerInputs(NamedTuple):
    """What the scan hands to each layer; all stacked over layers."""

    weights: Any  # packed
    balance: Float[Array, "L E1"]
    kind: Int[Array, "L"]
    window: Int[Array, "L"] | None
    hooks: HookInputs


class Zaya(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, model: Model, precision: Precision):
        self.embed = Embed(rngs, model)
        layer = layer_class(model)
        stack = nnx.vmap(lambda key: layer(nnx.Rngs(key), model, precision))
        self.layers = stack(jax.random.split(rngs.params(), model.num_hidden_layers))
        self.final_norm = RMSNorm(rngs, model.hidden_size, "embed", model.rms_norm_eps)
        if model.lm_head_bias:
            self.head = Head(rngs, model)
        self.model, self.precision = model, precision

    def __call__(
        self,
        rows: TokenRows,
        balance: Float[Array, "L E1"],
        *,
        cached: CacheInput | None,
        remat: str,
        trace: bool,
        devices: Devices,
        hooks: ScanHooks,
    ) -> Output:
        model = self.model
        placement = devices.placement(model, self.precision.compute, rows, cached)
        tokens = placement.rows(rows.tokens)
        if rows.positions is None:
            positions = placement.positions(*tokens.shape)
        else:
            positions = placement.rows(rows.positions)
        h = self.embed(tokens, model.pad_token_id)
        router_state = jnp.zeros((rows.tokens.size, _router_width(model)), jnp.float32)
        kinds, tables, windows = _layer_kinds(model, positions)
        real = placement.real(h).reshape(-1).astype(jnp.float32)
        layer_def, layer_weights = nnx.split(self.layers)
        layer_weights, unpack = pack_vectors(layer_weights, chip.current().maker != "cpu")

        def step(linear: bool, carry: LayerCarry, inputs: LayerInputs, cache):
            weights, access = hooks.for_layer(
                inputs.hooks, unpack(inputs.weights), placement.weights, carry.hidden_stack
            )
            layer = nnx.merge(layer_def, access.local(weights))
            rope = [] if linear else _rope_of(inputs.kind, tables)
            own_placement = placement.for_layer(access, inputs.window, linear, cache)
            out = LayerOutput(
                *layer(carry.h, carry.router_state, inputs.balance, rope, own_placement)
            )
            classes = jnp.arange(model.num_experts + 1)
            counts = jnp.sum((out.choice[:, None] == classes) * real[:, None], axis=0)
            sums = trees.flat(nnx.to_pure_dict(nnx.pop(layer, TokenSum)), "/")
            experts = nnx.to_pure_dict(nnx.pop(layer, nnx.Intermediate)).get("experts", {})
            traced = (out.h, out.logits, experts.get("outputs")) if trace else None
            above = LayerCarry(out.h, out.router_state, out.hidden_stack)
            return above, (counts, sums, traced), out.cache

        policy = _remat_policy(remat, hooks, placement)
        pattern = linear_pattern(model)
        inputs = LayerInputs(
            layer_weights, balance, kinds, windows, hooks.scan_inputs(model.num_hidden_layers)
        )
        may_unroll = policy == "none" and cached is None and devices.alone
        hidden_stack = None
        if hooks.experts is not None and cached is None and policy in ("none", "elementwise"):
            hidden_stack = self._empty_hidden_stack(rows.tokens.size)
        top, (counts, sums, traced), cache = scan_layers(
            [functools.partial(step, linear) for linear in pattern],
            None if policy == "none" else functools.partial(_remat, policy=policy),
            pattern,
            LayerCarry(h, router_state, hidden_stack),
            inputs,
            None if cached is None else cached.arrays,
            unroll=may_unroll and chip.current().unrolls(model.num_hidden_layers, h.size),
        )
        h = top.h if top.hidden_stack is None else hold(top.h, top.hidden_stack)
        with jax.named_scope("head"):
            h = placement.joined(self.final_norm(h))
        return Output(h, counts, sums, cache, *(traced if trace else ()))

    def _empty_hidden_stack(self, num_tokens: int) -> Float[Array, "L N F2"]:
        """The stack that `stacked_mlp` fills, a layer at a time, for its backward pass."""
        layers, *_, gate_and_up, width = self.layers.experts.gate_up.shape
        shape = layers, num_tokens, gate_and_up * width
        return tiles.empty(shape, jnp.dtype(self.precision.compute))


def _remat_policy(remat: str, hooks: ScanHooks, placement: Placement) -> str:
    """The policy of `_remat`: the one that is asked for, or what the layers' weights need."""
    if remat != "none":
        return remat
    # Weights that others change are made again: kept, they would be a second copy of all.
    if hooks.beside:
        return "elementwise"
    # Weights that other devices keep are fetched again.
    return "fsdp" if placement.weights.fetched else "none"


def layer_class(model: Model) -> type:
    """The class of the model's layers."""
    return own_class(model, "layer") or LAYERS[model.model_type]


def layer_of(model: Model, params: dict, number: int, precision: Precision) -> nnx.Module:
    """One layer as a module, with its weights out of the stacked ones."""
    layers = range(model.num_hidden_layers)
    if not -len(layers) <= number < len(layers):  # JAX would give the last one
        raise UserError(f"there is no layer {number}; the model has layers 0 to {layers[-1]}")
    number = layers[number]
    graph, state = nnx.split(
        nnx.eval_shape(lambda: layer_class(model)(nnx.Rngs(0), model, precision))
    )
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: x[number], params["layers"]))
    return nnx.merge(graph, state)


def _router_width(model: Model) -> int:
    """The width of the router's own stream; dense layers have none."""
    return model.router_hidden_size if model.model_type == "zaya" else 0


def _layer_kinds(model: Model, positions):
    """Each layer's kind and window (None if no layer has a window), and each kind's rotary table.

    Linear layers have neither table nor window; their entries are not read.
    """
    names = sorted(set(model.kinds) - {"hybrid_linear"})
    tables = []
    for name in names:
        rope = getattr(model.rope_parameters, name)
        tables.append(
            rope_table(positions, rope.rope_theta, int(model.head_dim * rope.partial_rotary_factor))
        )
    kinds = jnp.asarray(
        [names.index(kind) if kind in names else 0 for kind in model.kinds], jnp.int32
    )
    windows = None
    if "hybrid_sliding" in names:
        widest = min(model.sliding_window or NO_WINDOW, NO_WINDOW)
        wide = [widest if kind == "hybrid_sliding" else NO_WINDOW for kind in model.kinds]
        windows = jnp.asarray(wide, jnp.int32)
    return kinds, tables, windows


def _rope_of(kind, tables):
    """(selected, table) pairs for CCA: one pair, unless kinds rotate different numbers of
    channels."""
    if len({table.shape for table in tables}) == 1:
        return [(None, jnp.stack(tables)[kind] if len(tables) > 1 else tables[0])]
    return [(kind == i, table) for i, table in enumerate(tables)]


def _remat(body, policy: str):
    """A layer that the backward pass recomputes.

    "layer" keeps only its input, "attention" also the attention's output, "offload" the same in the
    host's memory, "elementwise" also the results of all products.
    """
    policies, keep = jax.checkpoint_policies, None
    # Results of products, but no gathered weights: these are gathered again.
    if policy == "fsdp":
        keep = policies.save_from_both_policies(
            policies.checkpoint_dots, policies.save_only_these_names(SAVED, PRODUCTS)
        )
    elif policy == "elementwise":
        keep = policies.save_only_these_names(SAVED, PRODUCTS, DOTS)
    elif policy == "attention" or (policy == "offload" and chip.current().is_host):
        keep = policies.save_only_these_names(SAVED)
    elif policy == "offload":
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[SAVED],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint(body, prevent_cse=False, policy=keep)


@functools.lru_cache(maxsize=256)  # a search of shapes asks for each of them several times
def _abstract(model: Model, precision: Precision):
    return nnx.split(nnx.eval_shape(lambda: Zaya(nnx.Rngs(0), model, precision)), nnx.Param)


def abstract(model: Model, precision: Precision = Precision()) -> dict:
    """The parameter tree as ShapeDtypeStructs: nothing is allocated."""
    return nnx.to_pure_dict(_abstract(model, precision)[1])


def init(model: Model, key: jax.Array, precision: Precision = Precision()) -> dict:
    """Fresh parameters; a function of the key alone."""
    return nnx.to_pure_dict(nnx.split(Zaya(nnx.Rngs(key), model, precision), nnx.Param)[1])


def init_balance(model: Model) -> Float[Array, "L E1"]:
    """Balancing biases at the start: zero for experts, -1 for the skip class."""
    return jnp.zeros((model.num_hidden_layers, model.num_experts + 1)).at[:, -1].set(SKIP_BIAS)


def apply(
    model: Model,
    params: dict,
    balance: Float[Array, "L E1"],
    rows: TokenRows,
    *,
    precision: Precision = Precision(),
    cached: CacheInput | None = None,
    remat: str = "none",
    trace: bool = False,
    devices: Devices = ONE_DEVICE,
    hooks: ScanHooks = PLAIN,
) -> Output:
    """Runs the model on rows of tokens, which may continue a cache.

    If `devices` is not ONE_DEVICE this runs inside `shard_map`, on a device's part of weights and
    tokens, or, with a cache, of the cache's columns. `hooks` say where weights of layers are read
    and where their gradients go.
    """
    graph, state = _abstract(model, precision)
    state = jax.tree.map(lambda x: x, state)  # a copy: replacing is in place
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)(
        rows, balance, cached=cached, remat=remat, trace=trace, devices=devices, hooks=hooks
    )


def cast_for_products(model: Model, params: dict, precision: Precision) -> tuple[dict, dict]:
    """(parameters for many passes, those for `logits`), with the weights that only products read in
    the products' format.

    Results do not change: each pass would round these weights itself. All others are the same
    arrays. So are all weights of a custom layer, which may read them in another format.
    """
    dtype = jnp.dtype(precision.compute)

    def cast(x):
        return x if x.dtype == dtype else x.astype(dtype)

    layers = dict(params["layers"])
    if layer_class(model) in LAYERS.values():
        for block in PRODUCT_WEIGHTS.keys() & layers.keys():
            names = PRODUCT_WEIGHTS[block]
            layers[block] = layers[block] | {
                name: jax.tree.map(cast, layers[block][name]) for name in names
            }
    head = {name: params[name] for name in ("head",) if name in params}
    return params | {"layers": layers}, head | {
        "embed": {"embedding": cast(params["embed"]["embedding"])}
    }


def logit_lens(
    model: Model, params: dict, hidden: Float[Array, "*B D"], precision: Precision
) -> Float[Array, "*B V"]:
    """The head on a residual stream of any layer, through the last norm."""
    return logits(
        model,
        params,
        rms_norm(hidden, params["final_norm"]["scale"], model.rms_norm_eps),
        precision,
    )


@jax.named_scope("head")
def logits(
    model: Model, params: dict, hidden: Float[Array, "B S D"], precision: Precision
) -> Float[Array, "B S V"]:
    """The tied head on a normed hidden state, accumulated and given in float32."""
    dtype = jnp.dtype(precision.compute)
    embedding = params["embed"]["embedding"].astype(dtype)
    out = times_rows(hidden.astype(dtype).reshape(-1, hidden.shape[-1]), embedding)
    out = out.reshape(*hidden.shape[:-1], -1)
    return out + params["head"]["bias"] if model.lm_head_bias else out


def scores(
    model: Model,
    params: dict,
    hidden: Float[Array, "N D"],
    targets: Int[Array, "N"],
    precision: Precision,
) -> tuple[Float[Array, "N"], Bool[Array, "N"]]:
    """Each target's log-probability, and whether it is the likeliest, with the logits of a chunk of
    tokens at a time. For a target below 0 neither means anything."""
    chunk = max(chunk_rows(len(targets), model.vocab_size), 1)
    pad = -len(targets) % chunk

    def of_chunk(piece: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, wanted = piece
        of_tokens = logits(model, params, hidden[None], precision)[0]
        of_targets = jnp.take_along_axis(of_tokens, wanted[:, None], axis=-1)[:, 0]
        return of_targets - jax.nn.logsumexp(of_tokens, axis=-1), jnp.argmax(
            of_tokens, axis=-1
        ) == wanted

    pieces = jnp.pad(hidden, ((0, pad), (0, 0))), jnp.pad(targets, (0, pad))
    pieces = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), pieces)
    log_probs, likeliest = jax.lax.map(of_chunk, pieces)
    return log_probs.reshape(-1)[: len(targets)], likeliest.reshape(-1)[: len(targets)]


def param_axes(model: Model, precision: Precision = Precision()) -> dict:
    """The logical axes of every weight, in the shape of the parameter tree; stacked ones begin with
    "layers"."""
    state = _abstract(model, precision)[1]
    shapes = nnx.to_pure_dict(state)
    flat = {path: leaf.get_metadata()["axes"] for path, leaf in nnx.to_flat_state(state)}

    def axes(path, shape):
        names = flat[tuple(p.key for p in path)]
        return ("layers",) * (len(shape.shape) - len(names)) + tuple(names)

    return jax.tree_util.tree_map_with_path(axes, shapes)


def param_counts(model: Model) -> dict[str, int]:
    """Numbers of parameters, as the papers count them: total, without the embedding, and active for
    one token."""
    tree = abstract(model)
    # layer 0's EDA
    unused = _router_width(model) if "eda" in tree["layers"].get("router", ()) else 0
    total = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(tree)) - unused
    embedding = model.vocab_size * model.hidden_size
    expert = 3 * model.hidden_size * model.moe_intermediate_size
    idle = model.num_hidden_layers * (model.num_experts - 1) * expert
    return {
        "total": total,
        "without_embedding": total - embedding,
        "active_without_embedding": total - embedding - idle,
        "active": total - idle,
    }
