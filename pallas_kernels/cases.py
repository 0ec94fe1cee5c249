"""Operators as the model calls them, with arguments of a model's sizes: for all that compares and
times them.

A case runs whichever implementation the chip takes. Its backward pass is the work that `jax.vjp`
leaves once the forward pass has run. Numbers are drawn in the format of the products, so float32
can have the very same.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.attention import attention, softmax_scale
from pallas_kernels.cca_mix import mix
from pallas_kernels.grouped_mlp import hold, stacked_mlp, takes_unsorted_rows
from pallas_kernels.grouped_mlp.tokens import own_expert_mlp, sort_by_expert
from pallas_kernels.linear_attention import linear_attention
from pallas_kernels.residual_norm import Joining, join, join_and_read, read
from pallas_kernels.rotary import rope_table

ROPE_BASE, EPS = 1e6, 1e-5
DRAWN = 1_000_003  # numbers at most, repeated: a prime, so that no two rows or tiles are alike


class Size(NamedTuple):
    """Sequences on a device, and a model: anything with the names of `zaya_jax.config.Model`."""

    label: str
    batch: int
    length: int
    model: Any
    whole: int = 0  # tokens of the sequence of which `length` are here; 0: no more
    layers: int = 2  # of stacks of experts, whose last one is used

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return self.batch * self.length


class RandomInput(NamedTuple):
    """An argument: its shape and dtype, and numbers for it."""

    shape: tuple[int, ...]
    dtype: Any
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    layers: int = 0  # of a stack whose last layer it is, behind zeros; 0: none

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Its shape and number format alone."""
        stack = (self.layers,) if self.layers else ()
        return jax.ShapeDtypeStruct((*stack, *self.shape), self.dtype)


def normal(*shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> RandomInput:
    """Normal numbers."""

    def draw(rng, shape):
        count = int(np.prod(shape))
        return np.resize(scale * rng.standard_normal(min(count, DRAWN), np.float32), shape)

    return RandomInput(shape, dtype, draw)


def integers(most: int, *shape: int) -> RandomInput:
    """Integers from 0 on, below this one."""
    return RandomInput(shape, jnp.int32, lambda rng, shape: rng.integers(0, most, shape))


def documents(size: Size, padded: bool = False) -> RandomInput:
    """Ids of packed documents, of some 500 tokens on average, shorter where the sequence is; with a
    padded tail, whose id is 0."""
    length = size.whole or size.length

    def draw(rng, shape):
        ids = 1 + np.cumsum(rng.random(shape) < 1 / min(500, length / 4), axis=1)
        return np.where(np.arange(length) < length - length // 8, ids, 0) if padded else ids

    return RandomInput((size.batch, length), jnp.int32, draw)


@dataclasses.dataclass(frozen=True)
class OperatorCase:
    """An operator and its arguments; `call(dtype)` is the function, with products in that number
    format."""

    operator: str  # of pallas_kernels.chip.OPERATORS
    label: str
    call: Callable[[Any], Callable]
    arguments: Callable[[Size], tuple[RandomInput, ...]]

    def like(self, size: Size, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments' shapes; those in bfloat16 have `dtype`."""
        found = (a.like for a in self.arguments(size))
        return tuple(
            jax.ShapeDtypeStruct(x.shape, dtype) if x.dtype == jnp.bfloat16 else x for x in found
        )

    def values(self, size: Size, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
        """Arguments with numbers, see `values_of`."""
        return values_of(self.arguments(size), dtype, jnp.bfloat16)


def values_of(arrays: Sequence[RandomInput], dtype: Any, drawn: Any) -> tuple[jax.Array, ...]:
    """Arrays with numbers: those of bfloat16 drawn in the format `drawn`, and given in `dtype`."""
    rng = np.random.default_rng(0)

    def value(a: RandomInput) -> jax.Array:
        first, last = (drawn, dtype) if a.dtype == jnp.bfloat16 else (a.dtype, a.dtype)
        x = jnp.asarray(a.draw(rng, a.shape), first).astype(last)
        return _as_last(x, a.layers) if a.layers else x

    return tuple(map(value, arrays))


@functools.partial(jax.jit, static_argnums=1)
def _as_last(x: jax.Array, layers: int) -> jax.Array:
    return jnp.zeros((layers, *x.shape), x.dtype).at[-1].set(x)


def linearized(case: OperatorCase, dtype: Any = jnp.bfloat16) -> Callable:
    """(arguments) → (the operator's result, its backward pass as a function that JAX takes for
    arrays)."""
    return functools.partial(_vjp, case.call(dtype))


def _vjp(plain: Callable, *arguments: Any) -> tuple[Any, Callable]:
    """`jax.vjp` over those that are no integers."""
    moving = [jnp.issubdtype(x.dtype, jnp.floating) for x in arguments]

    def of_moving(*given):
        left = iter(given)
        return plain(*(next(left) if m else x for m, x in zip(moving, arguments, strict=True)))

    return jax.vjp(of_moving, *(x for m, x in zip(moving, arguments, strict=True) if m))


def attending(window: int | None = None, lse: bool = False) -> Callable[[Any], Callable]:
    """Attention of the last tokens of a sequence, of documents if ids are given; the output alone,
    or with the log-sum-exps."""

    def call(dtype):
        def attend(q, k, v, *ids):
            before = k.shape[1] - q.shape[1]
            q_ids, k_ids = (ids[0][:, before:], ids[0]) if ids else (None, None)
            scale = softmax_scale(q.shape[-1])
            both = attention(q, k, v, q_ids, k_ids, window, before, scale=scale)
            return both if lse else both[0]

        return attend

    return call


def qkv(size: Size) -> tuple[RandomInput, ...]:
    """Queries, keys and values."""
    m = size.model
    queries = normal(size.batch, size.length, m.num_attention_heads, m.head_dim)
    keys = normal(size.batch, size.whole or size.length, m.num_key_value_heads, m.head_dim)
    return queries, keys, keys


def _linear_attention(dtype):
    return lambda q, k, v, *segments: linear_attention(q, k, v, *segments)


def experts(size: Size) -> tuple[RandomInput, ...]:
    """Both weights of the experts."""
    m = size.model
    d, f, e = m.hidden_size, m.moe_intermediate_size, m.num_experts
    weights = functools.partial(normal, dtype=jnp.float32, scale=0.02)
    return weights(e, d, 2 * f), weights(e, f, d)


def _tokens(size: Size) -> tuple[RandomInput, ...]:
    """As the model has them: with a class past the last expert."""
    m = size.model
    choice = integers(m.num_experts + 1, size.tokens)
    return normal(size.tokens, m.hidden_size), choice, *experts(size)


def _own_expert(dtype):
    return lambda x, choice, *weights: own_expert_mlp(x.astype(dtype), choice, *weights)


def _stream(size: Size) -> tuple[RandomInput, ...]:
    """A block's output, the stream, and the join's scales and biases."""
    d = size.model.hidden_size
    wide = normal(size.batch, size.length, d), normal(size.batch, size.length, d, dtype=jnp.float32)
    return *wide, *(normal(d, dtype=jnp.float32) for _ in range(4))


def _join_and_read(dtype):
    def both(y, h, y_scale, y_bias, h_scale, h_bias, scale, kernel):
        how = Joining(y_scale, y_bias, h_scale, h_bias)
        return join_and_read(y, h, how, scale, kernel, EPS, dtype, jnp.float32)

    return both


def _norm_and_router(size: Size) -> tuple[RandomInput, ...]:
    d, r = size.model.hidden_size, size.model.router_hidden_size
    return normal(d, dtype=jnp.float32), normal(d, r, dtype=jnp.float32, scale=0.02)


def _gated_join(dtype):
    return lambda y, h, *rest: join(y, h, Joining(*rest[:4]), rest[4])


def _mixing(size: Size, padded: bool = False) -> tuple[RandomInput, ...]:
    """The columns of queries, keys and values; both convolutions, their bias, the temperature;
    documents, positions."""
    m = size.model
    heads, c = m.num_attention_heads + m.num_key_value_heads, m.head_dim
    columns = normal(size.batch, size.length, (heads + m.num_key_value_heads) * c)
    by_channel = normal(m.cca_time0, heads, c, dtype=jnp.float32)
    by_head = normal(m.cca_time1, heads, c, c, dtype=jnp.float32, scale=c**-0.5)
    bias = normal(heads, c, dtype=jnp.float32)
    temperature = normal(m.num_key_value_heads, dtype=jnp.float32)
    positions = RandomInput(
        (size.batch, size.length),
        jnp.int32,
        lambda rng, shape: np.broadcast_to(np.arange(shape[1]), shape),
    )
    ids = documents(size, padded)
    return columns, by_channel, by_head, bias, temperature, ids, positions


def _mix(parts: int = 2) -> Callable[[Any], Callable]:
    """The mixing, where one of so many parts of the channels turns."""

    def call(dtype):
        def mixed(columns, by_channel, by_head, bias, temperature, segments, positions):
            earlier = len(by_channel) + len(by_head) - 2
            segments = jnp.pad(segments, ((0, 0), (earlier, 0)), constant_values=-1)
            rope = [(True, rope_table(positions, ROPE_BASE, by_head.shape[-1] // parts))]
            return mix(
                columns, None, by_channel, by_head, bias, temperature, rope, segments, None, dtype
            )

        return mixed

    return call


CASES = (
    OperatorCase("attention", "causal, documents", attending(), lambda s: (*qkv(s), documents(s))),
    OperatorCase(
        "linear_attention",
        "causal, documents",
        _linear_attention,
        lambda s: (*qkv(s), documents(s)),
    ),
    OperatorCase("cca_mix", "documents", _mix(), _mixing),
    OperatorCase("grouped_mlp", "tokens where they lie", _own_expert, _tokens),
    OperatorCase(
        "residual_norm",
        "attention's join, the experts' norm",
        _join_and_read,
        lambda s: (*_stream(s), *_norm_and_router(s)),
    ),
    OperatorCase(
        "residual_norm",
        "experts' join",
        _gated_join,
        lambda s: (*_stream(s), normal(s.batch, s.length, dtype=jnp.float32)),
    ),
    OperatorCase(
        "residual_norm",
        "attention's norm",
        lambda dtype: lambda h, scale: read(h, scale, EPS, dtype),
        lambda s: (_stream(s)[1], _norm_and_router(s)[0]),
    ),
)


def rare_cases(operator: str, windows: Sequence[int] = ()) -> list[OperatorCase]:
    """What an operator must also do right: a run's windows, and what is rare in a step."""

    def padded_qkv(size: Size) -> tuple[RandomInput, ...]:
        return *qkv(size), documents(size, padded=True)

    if operator == "attention":
        calls = {f"window of {window}": attending(window) for window in windows}
        calls["log-sum-exps, padded tail"] = attending(lse=True)
        return [OperatorCase(operator, label, call, padded_qkv) for label, call in calls.items()]
    if operator == "linear_attention":
        return [OperatorCase(operator, "padded tail", _linear_attention, padded_qkv)]
    if operator == "cca_mix":
        padded_mixing = functools.partial(_mixing, padded=True)
        return [OperatorCase(operator, "all channels turn, padded tail", _mix(1), padded_mixing)]
    if operator == "grouped_mlp":
        return [OperatorCase(operator, "half of the experts idle", _own_expert, _tokens_of_few)]
    return []


def _tokens_of_few(size: Size) -> tuple[RandomInput, ...]:
    x, _, *weights = _tokens(size)
    return x, integers(max(size.model.num_experts // 2, 1), size.tokens), *weights


# ################################################################################################
# Experts as a training step has them
# ################################################################################################

# Pallas's Triton lowering has offsets of 64 bits in arrays of more bytes, which is other code.
WIDE = 2**32
SHARE = 0.75  # of a card's memory for stacks; XLA's implementation needs some beside them


def layers_like_step(size: Size, memory: float = math.inf) -> int:
    """The fewest layers whose stacks have offsets as wide as those of all the model's layers; two
    where a card's memory, in bytes, does not hold so many."""
    one = size._replace(layers=1)
    arrays = [*(a.like for a in stacked(one)[2:]), *sums(one), _kept(one)]
    of_layer = [x.size * x.dtype.itemsize for x in arrays]
    layers = getattr(size.model, "num_hidden_layers", 2)
    needed = max([2, *(WIDE // b + 1 for b in of_layer if b * layers > WIDE)])
    return needed if needed * sum(of_layer) <= SHARE * memory else 2


def stacked(size: Size) -> tuple[RandomInput, ...]:
    """Tokens, their experts, and both weights in stacks of layers, in the format of the step's
    copies."""
    x, choice, *weights = _tokens(size)
    dtype = jnp.dtype(getattr(size.model, "expert_weights", "bfloat16"))
    stacks = (
        normal(*w.shape, dtype=dtype, scale=0.02)._replace(layers=size.layers) for w in weights
    )
    return x, choice, *stacks


def sums(size: Size) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The stacks of gradients, to which a micro-batch adds its own; zeros at first."""
    return tuple(jax.ShapeDtypeStruct(w.like.shape, jnp.float32) for w in stacked(size)[2:])


def _kept(size: Size) -> jax.ShapeDtypeStruct:
    """The stack of what the backward pass needs."""
    shape = size.layers, size.tokens, 2 * size.model.moe_intermediate_size
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def mlp_in_stacks(
    x: jax.Array,
    choice: jax.Array,
    weights: Sequence[jax.Array],
    sums: Sequence[jax.Array],
    cotangent: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """The result, the gradient of the tokens, and the sums with the weights' gradients."""
    layers, experts = weights[0].shape[:2]
    if takes_unsorted_rows():
        order, _, counts = sort_by_expert(choice, experts + 1)
        refs = tuple(map(jax.new_ref, sums))
        kept = tiles.empty((layers, len(x), math.prod(weights[0].shape[3:])), x.dtype)

        def in_place(x: jax.Array) -> jax.Array:
            layer, sizes = jnp.int32(layers - 1), counts[:experts]
            return hold(*stacked_mlp(x, order, sizes, *weights, layer, refs, kept, True))

        out, pull = jax.vjp(in_place, x)
        (d_x,) = pull(cotangent(out))
        return out, d_x, tuple(map(jax.freeze, refs))

    out, pull = jax.vjp(
        lambda x, *own: own_expert_mlp(x, choice, *own), x, *(w[-1] for w in weights)
    )
    d_x, *of_weights = pull(cotangent(out))
    added = (s.at[-1].add(d) for s, d in zip(sums, of_weights, strict=True))
    return out, d_x, tuple(added)
