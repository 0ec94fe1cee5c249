"""The operators that have kernels of their own, at ZAYA1's sizes: one row each for all that judges them.

`benchmarks.targets` compiles them for chips that are not here, tests/pallas_kernels/test_targets.py holds what must be
true of that, and `benchmarks.kernels` times them on a chip. A new kernel needs one more row of CASES.

A case is the operator as the model calls it, so whichever implementation the chip takes runs. Its backward pass is the
work that `jax.vjp` leaves once the forward pass has run.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import attention, softmax_scale
from pallas_kernels.cca_mix import mix
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.grouped_mlp import grouped_mlp
from pallas_kernels.linear_attention import CHUNK, linear_attention
from pallas_kernels.newton_schulz import orthogonalize
from pallas_kernels.residual_norm import Joining, join, join_and_read, read
from pallas_kernels.rotary import rope_table
from zaya_jax.config import Model
from zaya_jax.model.experts import expert_mlp
from zaya_jax.optim.muon import KELLER_JORDAN, newton_schulz_flops

ZAYA = Model()
ROPE = ZAYA.rope_parameters.hybrid
TINY = Model(
    vocab_size=300, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    moe_intermediate_size=64, num_experts=4, num_hidden_layers=1,
)  # fmt: skip


class Size(NamedTuple):
    """A number of tokens and a model."""

    label: str
    batch: int
    length: int
    model: Model = ZAYA

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return self.batch * self.length


# As a device of `zaya1_base` has them: four sequences in pretraining, one in midtraining and SFT, whose context two and
# eight devices share; here each has all of it.
SIZES = {s.label: s for s in (Size("4K", 4, 4096), Size("32K", 1, 32_768), Size("131K", 1, 131_072))}
SMALL = Size("tiny", 2, 64, TINY)


class Array(NamedTuple):
    """An argument: its shape and dtype, and numbers for it."""

    shape: tuple[int, ...]
    dtype: Any
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Its shape and number format alone."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def normal(*shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> Array:
    """Normal numbers."""
    return Array(shape, dtype, lambda rng, shape: scale * rng.standard_normal(shape, np.float32))


def below(most: int, *shape: int) -> Array:
    """Integers."""
    return Array(shape, jnp.int32, lambda rng, shape: rng.integers(0, most, shape))


def documents(size: Size) -> Array:
    """Ids of packed documents, of some 500 tokens on average."""

    def draw(rng, shape):
        return np.cumsum(rng.random(shape) < 1 / 500, axis=1)

    return Array((size.batch, size.length), jnp.int32, draw)


def loads(size: Size) -> Array:
    """Tokens by expert, uneven, the last of them given to none."""

    def draw(rng, shape):
        shares = rng.dirichlet(np.full(shape[0] + 1, 4.0))[:-1]
        return np.floor(shares * size.tokens).astype(np.int32)

    return Array((size.model.num_experts,), jnp.int32, draw)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator and its arguments; `call(dtype)` is the function, with products in that number format."""

    operator: str  # of pallas_kernels.chip.OPERATORS
    label: str
    call: Callable[[Any], Callable]
    arguments: Callable[[Size], tuple[Array, ...]]
    # Of use, by direction: "forward" and "backward" are judged apart, "gradients" are both in one, "alone" has none. 0
    # where memory counts.
    flops: Callable[[Size], dict[str, float]]
    sizes: tuple[str, ...] = ("4K",)  # at which TARGETS.md has it: more where the tiles meet other work

    @property
    def directions(self) -> tuple[str, ...]:
        """The parts that are compiled and timed separately."""
        return tuple(self.flops(SMALL))

    def like(self, size: Size, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments' shapes; those in bfloat16 have `dtype`."""
        found = (a.like for a in self.arguments(size))
        return tuple(jax.ShapeDtypeStruct(x.shape, dtype) if x.dtype == jnp.bfloat16 else x for x in found)

    def values(self, size: Size, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[jax.Array, ...]:
        """Arguments with numbers, those of bfloat16 for any `dtype`."""
        rng = np.random.default_rng(seed)
        drawn = (jnp.asarray(a.draw(rng, a.shape), a.dtype) for a in self.arguments(size))
        return tuple(x.astype(dtype) if x.dtype == jnp.bfloat16 else x for x in drawn)


def function(case: Case, direction: str, dtype: Any = jnp.bfloat16) -> Callable:
    """The function of a direction: of the arguments, or for "backward" of `linearized`'s results and the cotangent."""
    plain = case.call(dtype)
    if direction == "alone":
        return plain
    if direction == "backward":
        return lambda pull, cotangent: pull(cotangent)
    if direction == "forward":

        def forward(*arguments):
            out, pull = _vjp(plain, *arguments)
            kept = [x for x in jax.tree.leaves(pull) if not any(x is given for given in arguments)]
            return out, kept  # arrays that the caller already has need not be copied

        return forward

    def gradients(*arguments):
        out, pull = _vjp(plain, *arguments)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return gradients


def linearized(case: Case, dtype: Any = jnp.bfloat16) -> Callable:
    """(arguments) → (the operator's result, its backward pass as a function that JAX takes for arrays)."""
    return functools.partial(_vjp, case.call(dtype))


def program(
    case: Case, direction: str, size: Size, dtype: Any = jnp.bfloat16, placed: Callable = lambda f: f
) -> tuple[Callable, tuple[Any, ...]]:
    """The same for the chip of `chip.making`: the values that a forward pass keeps depend on it.

    `placed` puts a function where it will run (`absent.alone`).
    """
    like = case.like(size, dtype)
    if direction == "backward":
        out, pull = jax.eval_shape(placed(linearized(case, dtype)), *like)
        like = (pull, out)
    return function(case, direction, dtype), like


def _vjp(plain: Callable, *arguments: Any) -> tuple[Any, Callable]:
    """`jax.vjp` over those that are no integers."""
    moving = [jnp.issubdtype(x.dtype, jnp.floating) for x in arguments]

    def of_moving(*given):
        left = iter(given)
        return plain(*(next(left) if m else x for m, x in zip(moving, arguments, strict=True)))

    return jax.vjp(of_moving, *(x for m, x in zip(moving, arguments, strict=True) if m))


def _attention(dtype):
    return lambda q, k, v, *segments: attention(q, k, v, *(2 * segments), scale=softmax_scale(q.shape[-1]))[0]


def _qkv(size: Size) -> tuple[Array, ...]:
    m = size.model
    shape = size.batch, size.length
    heads = m.num_attention_heads, m.num_key_value_heads, m.num_key_value_heads
    return tuple(normal(*shape, h, m.head_dim) for h in heads)


def _attention_flops(size: Size) -> dict[str, float]:
    m = size.model
    product = 2.0 * size.tokens * m.num_attention_heads * m.head_dim * (size.length + 1) / 2
    return {"forward": 2 * product, "backward": 5 * product}


def _linear_attention(dtype):
    return lambda q, k, v, *segments: linear_attention(q, k, v, *segments)


def _linear_flops(size: Size) -> dict[str, float]:
    """In chunks; products with states are one of queries and one of keys forward, two of each backward."""
    m, c = size.model, size.model.head_dim
    of_keys, of_state = ((CHUNK + 1) / 2 * m.num_attention_heads, c * (m.num_attention_heads + m.num_key_value_heads))
    token = 2.0 * size.tokens * c
    return {"forward": token * (2 * of_keys + of_state), "backward": token * (5 * of_keys + 2 * of_state)}


def _experts(size: Size) -> tuple[Array, ...]:
    m = size.model
    d, f, e = m.hidden_size, m.moe_intermediate_size, m.num_experts
    weights = (normal(e, d, 2 * f, dtype=jnp.float32, scale=0.02), normal(e, f, d, dtype=jnp.float32, scale=0.02))
    return normal(size.tokens, d), loads(size), *weights


def _expert_mlp(dtype):
    return lambda x, choice, *weights: expert_mlp(x, choice, None, *weights, dtype=dtype)


def _tokens(size: Size) -> tuple[Array, ...]:
    """As the model has them: with a class past the last expert."""
    n, choices = size.tokens, size.model.num_experts + 1
    rows, _, *weights = _experts(size)
    return rows, below(choices, n), *weights


def _experts_flops(size: Size) -> dict[str, float]:
    product = 6.0 * size.tokens * size.model.hidden_size * size.model.moe_intermediate_size
    return {"forward": product, "backward": 2 * product}


def _stream(size: Size) -> tuple[Array, ...]:
    """A block's output, the stream, and the join's scales and biases."""
    d = size.model.hidden_size
    wide = normal(size.batch, size.length, d), normal(size.batch, size.length, d, dtype=jnp.float32)
    return *wide, *(normal(d, dtype=jnp.float32) for _ in range(4))


def _join_and_read(dtype):
    def both(y, h, y_scale, y_bias, h_scale, h_bias, scale, kernel):
        how = Joining(y_scale, y_bias, h_scale, h_bias)
        return join_and_read(y, h, how, scale, kernel, ZAYA.rms_norm_eps, dtype, jnp.float32)

    return both


def _norm_and_router(size: Size) -> tuple[Array, ...]:
    d, r = size.model.hidden_size, size.model.router_hidden_size
    return normal(d, dtype=jnp.float32), normal(d, r, dtype=jnp.float32, scale=0.02)


def _gated_join(dtype):
    return lambda y, h, *rest: join(y, h, Joining(*rest[:4]), rest[4])


def _moves_alone(size: Size) -> dict[str, float]:
    return {"forward": 0.0, "backward": 0.0}


def _mixing(size: Size) -> tuple[Array, ...]:
    """The columns of queries, keys and values; both convolutions, their bias, the temperature; documents, positions."""
    m = size.model
    heads, c = m.num_attention_heads + m.num_key_value_heads, m.head_dim
    columns = normal(size.batch, size.length, (heads + m.num_key_value_heads) * c)
    by_channel = normal(m.cca_time0, heads, c, dtype=jnp.float32)
    by_head = normal(m.cca_time1, heads, c, c, dtype=jnp.float32, scale=c**-0.5)
    more = normal(heads, c, dtype=jnp.float32), normal(m.num_key_value_heads, dtype=jnp.float32)
    counted = Array(
        (size.batch, size.length), jnp.int32, lambda rng, shape: np.broadcast_to(np.arange(shape[1]), shape)
    )
    return columns, by_channel, by_head, *more, documents(size), counted


def _mix(dtype):
    def mixed(columns, by_channel, by_head, bias, temperature, segments, positions):
        earlier = len(by_channel) + len(by_head) - 2
        segments = jnp.pad(segments, ((0, 0), (earlier, 0)), constant_values=-1)
        rope = [(True, rope_table(positions, ROPE.rope_theta, by_head.shape[-1] // 2))]
        return mix(columns, None, by_channel, by_head, bias, temperature, rope, segments, None, dtype)

    return mixed


def _mixing_flops(size: Size) -> dict[str, float]:
    m = size.model
    heads = m.num_attention_heads + m.num_key_value_heads
    product = 2.0 * size.tokens * heads * m.head_dim**2 * m.cca_time1
    return {"forward": product, "backward": 2 * product}


def _head(size: Size) -> tuple[Array, ...]:
    m, n = size.model, size.tokens
    return (
        normal(n, m.hidden_size),
        normal(m.vocab_size, m.hidden_size, dtype=jnp.float32, scale=0.02),
        below(m.vocab_size, n),
    )


def _loss(dtype):
    def loss(hidden, table, targets):
        return cross_entropy(hidden, table, None, targets, jnp.ones(len(hidden)), dtype=dtype)[0]

    return loss


def _newton_schulz_flops(size: Size) -> float:
    a, b = size.model.hidden_size, 2 * size.model.moe_intermediate_size
    return newton_schulz_flops((4, a, b))


CASES = (
    Case("attention", "causal", _attention, _qkv, _attention_flops, ("4K", "32K")),
    Case(
        "attention", "causal, documents", _attention, lambda s: (*_qkv(s), documents(s)),
        _moves_alone,
    ),
    Case("linear_attention", "causal", _linear_attention, _qkv, _linear_flops, ("4K", "32K")),
    Case(
        "linear_attention", "causal, documents", _linear_attention, lambda s: (*_qkv(s), documents(s)),
        _moves_alone,
    ),
    Case("cca_mix", "documents", _mix, _mixing, _mixing_flops),
    Case("grouped_mlp", "tokens where they lie", _expert_mlp, _tokens, _experts_flops),
    Case("grouped_mlp", "sorted rows", lambda dtype: grouped_mlp, _experts, _experts_flops),
    Case(
        "cross_entropy", "tied head", _loss, _head,
        lambda s: {"gradients": 6.0 * s.tokens * s.model.hidden_size * s.model.vocab_size},
    ),
    Case(
        "residual_norm", "attention's join, the experts' norm", _join_and_read,
        lambda s: (*_stream(s), *_norm_and_router(s)), _moves_alone,
    ),
    Case(
        "residual_norm", "experts' join", _gated_join,
        lambda s: (*_stream(s), normal(s.batch, s.length, dtype=jnp.float32)), _moves_alone,
    ),
    Case(
        "residual_norm", "attention's norm",
        lambda dtype: lambda h, scale: read(h, scale, ZAYA.rms_norm_eps, dtype),
        lambda s: (_stream(s)[1], _norm_and_router(s)[0]), _moves_alone,
    ),
    Case(
        "newton_schulz", "gate and up of four experts",
        lambda dtype: lambda x: orthogonalize(x, (KELLER_JORDAN,) * 5, dtype),
        lambda s: (normal(4, s.model.hidden_size, 2 * s.model.moe_intermediate_size, dtype=jnp.float32),),
        lambda s: {"alone": _newton_schulz_flops(s)},
    ),
)  # fmt: skip


def of_operator(name: str) -> list[Case]:
    """All cases of an operator."""
    return [case for case in CASES if case.operator == name]


def bytes_of(*trees: Any) -> int:
    """The bytes of all arrays, each counted once."""
    leaves = jax.tree.leaves(trees)
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)
