"""Continuing rows of tokens with the cache: prompts piece by piece, then one token a row at a time.

Rows of unequal length start in column 0, so a token's column is its position. The padding after a
short row is overwritten by its next tokens before any token sees it. Prompts go through the model
in pieces (`PIECE`), so scores and logits never exist for more than a piece. Compiled programs
depend on the number of rows, padded to a power of two, on the length of the cache and of a piece (a
few values each), and on `Sampling.variant`, but not on a prompt's length.

    prompts → `_prefill_piece`, once for each piece → the cache, and each row's last hidden state
            → `_first_token` → `_next_tokens`, up to TOKENS_PER_CALL a row, again and again

Several devices hold the keys and values in parts, for caches that one cannot hold
(`zaya_jax.parallel.tree.DecodeDevices`); everything else, including the prompts' pass, is the same on all
of them.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from pallas_kernels import chip
from pallas_kernels.loops import expected_turns
from zaya_jax.config import Model, Precision, UserError, shown
from zaya_jax.model import cca, dense, zaya
from zaya_jax.model.experts import read_in_place
from zaya_jax.model.layer import Layer
from zaya_jax.model.placement import ONE_DEVICE, CacheInput, Devices, TokenRows
from zaya_jax.model.sampling import Sampling, SamplingArrays, pick
from zaya_jax.model.scan_hooks import PLAIN, ScanHooks

# Tokens of each prompt that go through the model at once, and of all prompts together, at least
# LEAST_PIECE of each. On two CPU cores a prompt of 2048 took 2.2 s in one piece, 3.4 in two and 4.9
# in four (354M weights, eight experts): products of few rows are slow.
PIECE, PIECES = 2048, 16384
LEAST_PIECE = 16
# Lengths of last pieces: 50 sentences of any lengths take two programs, not 20.
SHORT_PIECES = (64, 256)
# Lengths of caches: each takes two programs, which compile for seconds.
CACHE_LENGTHS = 256, 512, 1024
TOKENS_PER_CALL = 16  # new tokens of each row between two checks for ended rows
REPLICATED = PartitionSpec()


class Decoder(NamedTuple):
    """A model to decode with, and its devices. `kernels`, from a config, are the operators with
    kernels on a GPU."""

    model: Model
    params: dict
    balance: jax.Array
    precision: Precision = Precision()
    devices: Devices = ONE_DEVICE
    kernels: tuple[str, ...] = ("all",)


class Drawing(NamedTuple):
    """How tokens are drawn, and which ones end a row, as arguments of a program."""

    options: SamplingArrays
    seeds: UInt32[Array, "B"] | np.ndarray
    ends: Int[Array, "N"] | np.ndarray


class Carry(NamedTuple):
    """The state of the rows besides the cache."""

    token: Int[Array, "B"]  # each row's last one
    column: Int[Array, "B"]  # that token's
    padding: Int[Array, "B"]  # columns before the row's first token
    number: Int[Array, ""]  # of new tokens so far


def generate(
    decoder: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """The next ids of each row, at most `num_tokens`, without the id that ended it; options are
    Continuation's."""
    rows = Continuation(decoder, prompts, num_tokens, **options)
    while not rows.ended:
        rows.more()
    return rows.ids


class Continuation:
    """Rows that are being continued. `more` gives each row's new ids; the caller may `end` a row.

    `seeds` is one for all rows, or one for each; a row's noise depends only on its own seed. `ends`
    are ids that end a row. `mask` (1 = real) is for prompts [B, S] padded at the left, whose
    padding has the same effect as in the public port: it leaves the projections' biases in the
    columns before the first token.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        sampling: Sampling = Sampling(),
        seeds: int | Sequence[int] = 0,
        ends: Iterable[int] = (),
        mask: Any = None,
    ):
        model, params, balance, precision, devices, kernels = decoder
        (num_tokens,) = _integers([num_tokens], "num_tokens=", model.max_position_embeddings)
        ids = _checked_prompts(model, prompts, num_tokens)
        row_seeds = _checked_seeds(seeds, len(ids))
        ends = _integers(ends, "ends: ", 2**31 - 1)
        mask = None if mask is None else _checked_mask(mask, ids)
        self._model, self._precision, self._devices = model, precision, devices
        self._variant, self._ends = sampling.variant, frozenset(ends)
        # Rows up to a power of two copy the first one, and have ended already.
        self._num_prompts, self.num_rows = len(ids), 1 << (len(ids) - 1).bit_length()
        self._left, self._done = num_tokens, np.arange(self.num_rows) >= self._num_prompts
        self._target = chip.made_for(devices.mesh or params).taking(kernels)
        self.ids: list[list[int]] = [[] for _ in ids]  # of each row, so far
        self.cache_length = 0  # tokens of a row that the cache has room for
        self._cache: dict | None = None
        self._carry: Carry | None = None
        if self.ended:
            return
        spare = self.num_rows - self._num_prompts
        ids += ids[:1] * spare
        params, self._head = self._everywhere(zaya.cast_for_products(model, params, precision))
        self._weights: Any = (params, self._everywhere(balance))
        row_seeds = np.pad(row_seeds, (0, spare))
        self._drawing = self._everywhere(Drawing(sampling.arrays(), row_seeds, _padded_ends(ends)))
        with chip.making(self._target):
            self._prefill(ids, mask, num_tokens)

    @property
    def ended(self) -> bool:
        """Whether all rows have ended."""
        return self._left < 1 or bool(self._done.all())

    def end(self, row: int) -> None:
        """Ends a row: it gets no further token, and does not change."""
        self._done[row] = True

    def more(self) -> list[list[int]]:
        """The next ids of each row (empty if it has ended): one at first, then up to
        TOKENS_PER_CALL."""
        assert not self.ended
        with chip.making(self._target):
            if self._carry is None:
                arguments = self._head, *self._after_prompts, self._drawing
                self._carry = _first_token(*arguments, self._model, self._precision, self._variant)
                return self._taken(np.asarray(self._carry.token)[:, None])
            num = min(TOKENS_PER_CALL, self._left)
            (tokens, self._carry), self._cache = _next_tokens(*self.arguments(num))
        return self._taken(np.asarray(tokens)[:, :num])

    def arguments(self, num: int) -> tuple:
        """Those of `_next_tokens` for the next `num` tokens of each row."""
        arrays = (*self._weights, self._head, self._carry, self._drawing, self._done, np.int32(num))
        return arrays, self._cache, *self._program, self._variant

    @property
    def _program(self) -> tuple[Model, Precision, Devices]:
        """What a compiled program depends on, besides shapes."""
        return self._model, self._precision, self._devices

    def _taken(self, tokens: np.ndarray) -> list[list[int]]:
        """The new tokens [B, T] of each row up to its end."""
        self._left -= tokens.shape[1]
        new: list[list[int]] = [[] for _ in range(self._num_prompts)]
        for row in np.flatnonzero(~self._done):
            ids = tokens[row].tolist()
            end = next((i for i, token in enumerate(ids) if token in self._ends), None)
            self._done[row] |= end is not None
            new[row] = ids[:end]
            self.ids[row] += new[row]
        return new

    def _prefill(self, prompts: list[list[int]], mask: np.ndarray | None, num_tokens: int) -> None:
        """Runs the prompts through the model, piece by piece, or in one pass if they are padded at
        the left; leaves the cache, and each row's last hidden state, length and padding."""
        lengths = np.asarray([len(ids) for ids in prompts], np.int32)
        longest, padding = int(lengths.max()), np.zeros_like(lengths)
        if mask is None:
            # All devices' columns of a cache in parts begin and end with a piece.
            parts = self._devices.cache_layout().parts
            sizes = split_prompt(longest, -(-piece_length(len(prompts)) // parts) * parts)
        else:
            sizes = [longest]
            mask = np.pad(mask, ((0, len(prompts) - len(mask)), (0, 0)), "edge")
            padding = lengths - mask.sum(1, dtype=np.int32)
        # The padding of the last piece is written too.
        self.cache_length = cache_length(max(longest + num_tokens, sum(sizes)))
        tokens = np.zeros((len(prompts), sum(sizes)), np.int32)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = ids
        hidden = np.zeros((len(prompts), self._model.hidden_size), np.float32)
        start = 0
        for size in sizes:
            counts = np.clip(lengths - start, 0, size)
            piece = tokens[:, start : start + size], mask, counts, hidden, np.int32(start)
            hidden, self._cache = _prefill_piece(
                (*self._weights, *piece), self._cache, self.cache_length, *self._program
            )
            start += size
        self._after_prompts = hidden, lengths, padding

    def _everywhere(self, arguments: Any) -> Any:
        """The arguments, on all devices of the mesh."""
        mesh = self._devices.mesh
        if mesh is None:
            return arguments
        return jax.device_put(arguments, NamedSharding(mesh, REPLICATED))


# ################################################################################################
# Sizes
# ################################################################################################


class CacheBytes(NamedTuple):
    """Bytes of a cache on a device: per token of a row, per row of any length, and in total."""

    per_token: int
    per_row: int
    total: int


def cache_bytes(
    model: Model, precision: Precision, batch: int, length: int, devices: Devices = ONE_DEVICE
) -> CacheBytes:
    """The bytes of a cache with `batch` rows of `length` columns."""

    def taken(batch: int, length: int) -> int:
        arrays = jax.eval_shape(lambda: _empty_cache(model, precision, batch, length))
        return sum(x.size * x.dtype.itemsize for x in arrays.values())

    per_row = taken(1, 0)
    total = taken(batch, devices.cache_layout().local_length(length))
    return CacheBytes(taken(1, 1) - per_row, per_row, total)


def cache_length(needed: int) -> int:
    """The length of a cache for this many columns: one of few; above CACHE_LENGTHS at most a
    quarter more."""
    step = 1 << max((needed - 1).bit_length() - 3, 0)
    return next((size for size in CACHE_LENGTHS if needed <= size), -(-needed // step) * step)


def piece_length(num_rows: int) -> int:
    """Tokens of each row that go through the model at once, with this many rows."""
    share = max(PIECES // num_rows, LEAST_PIECE)
    return min(PIECE, 1 << share.bit_length() - 1)


def split_prompt(length: int, piece: int) -> list[int]:
    """The pieces of prompts whose longest has this length; the last piece may be padded."""
    full, rest = divmod(length, piece)
    if not rest:
        return [piece] * full
    power_of_two = 1 << (rest - 1).bit_length()
    short = next((size for size in SHORT_PIECES if rest <= size), power_of_two)
    return [piece] * full + [min(piece, short)]


# ################################################################################################
# Input
# ################################################################################################


def _integers(values: Iterable[Any], name: str, most: int) -> list[int]:
    """The values as integers from 0 to `most`; UserError naming the first one that is none."""
    numbers = []
    for value in values:
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number <= most:
            raise UserError(f"{name}{shown(value)} must be an integer from 0 to {most}")
        numbers.append(number)
    return numbers


def _checked_prompts(
    model: Model, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """The prompts' ids; UserError if they cannot be continued that far."""
    rows = []
    for number, prompt in enumerate(prompts):
        name = f"prompt {number + 1} of {len(prompts)}"
        row = _integers(prompt, f"{name}: token ", model.vocab_size - 1)
        if not row:
            raise UserError(
                f"{name} is empty; give at least one token, such as the tokenizer's bos_id"
            )
        if len(row) + num_tokens > model.max_position_embeddings:
            raise UserError(
                f"{name} has {len(row):,} tokens; with num_tokens={num_tokens} that exceeds the"
                f" model's max_position_embeddings={model.max_position_embeddings}; give a shorter"
                " prompt, or fewer new tokens"
            )
        rows.append(row)
    if not rows:
        raise UserError("there are no prompts; give a list with at least one list of token ids")
    return rows


def _checked_seeds(seeds: int | Sequence[int], num: int) -> np.ndarray:
    """A seed for each row."""
    of_rows: Any = [seeds] * num if np.ndim(seeds) == 0 else seeds
    numbers = _integers(of_rows, "seed ", 2**32 - 1)  # keys would take it modulo that
    if len(numbers) != num:
        raise UserError(
            f"seeds has {len(numbers)} numbers for {num} prompts; give one for each, or a single"
            " one"
        )
    return np.asarray(numbers, np.uint32)


def _checked_mask(mask: Any, prompts: list[list[int]]) -> np.ndarray:
    """The mask of prompts that are padded at the left."""
    mask, lengths = np.asarray(mask), {len(ids) for ids in prompts}
    right = len(lengths) == 1 and mask.shape == (len(prompts), *lengths)
    right = right and np.isin(mask, (0, 1)).all() and mask[:, -1].all()
    if not (right and (mask[:, 1:] >= mask[:, :-1]).all()):
        raise UserError(
            "mask must be as the prompts, all of one length: of each row zeros for the padding at its"
            " left, then ones to its end"
        )
    return mask.astype(np.int32)


def _padded_ends(ends: list[int]) -> np.ndarray:
    """The ids that end a row, as an array of few lengths."""
    num = max(4, 1 << max(len(ends) - 1, 0).bit_length())
    return np.asarray([*ends, *[-1] * (num - len(ends))], np.int32)


# ################################################################################################
# Programs
# ################################################################################################


def _empty_cache(model: Model, precision: Precision, batch: int, length: int) -> dict:
    make = dense.empty_cache if model.model_type == "dense" else cca.empty_cache
    return make(model, precision, batch, length)


def _on_all(devices: Devices, model, precision, run, arguments, cache):
    """run(arguments, cache) → (anything, cache), on each device if there are several."""
    with jax.default_matmul_precision(precision.matmul):
        axis = devices.cache_layout().axis
        if axis is None:
            return run(arguments, cache)
        names = jax.eval_shape(lambda: _empty_cache(model, precision, 1, 1))
        specs = dict.fromkeys(names, REPLICATED)
        specs |= {name: PartitionSpec(None, None, axis) for name in ("k", "v") if name in names}
        # All devices compute the same values, but the check of replication cannot see that.
        mapped = jax.shard_map(
            run,
            mesh=devices.mesh,
            in_specs=(REPLICATED, None if cache is None else specs),
            out_specs=(REPLICATED, specs),
            check_vma=False,
        )
        return mapped(arguments, cache)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), donate_argnums=(1,))
def _prefill_piece(arguments, cache, length, model, precision, devices):
    """The cache after a piece [B, S] of the prompts, and the last hidden state of rows that end in
    it; others keep theirs. The first piece goes into a new cache of this length."""

    def run(arguments, cache):
        *weights, ids, mask, counts, hidden, start = arguments
        first = cache is None
        if first:
            local_length = devices.cache_layout().local_length(length)
            cache, start = _empty_cache(model, precision, len(ids), local_length), 0
        if mask is None:
            positions = start + jnp.arange(ids.shape[1], dtype=jnp.int32)
            rows = TokenRows(ids, positions=jnp.broadcast_to(positions, ids.shape))
            cached = CacheInput(cache, start, counts=counts, first=first)
        else:
            # A row's first real token is at position 0, as the port's generate counts.
            positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
            rows = TokenRows(ids, positions=positions, mask=mask)
            cached = CacheInput(cache, start)
        out = _forward(weights, rows, cached, model, precision, devices)
        last = jnp.maximum(counts - 1, 0)[:, None, None]
        last = jnp.take_along_axis(out.hidden, last, axis=1)[:, 0]
        return jnp.where(counts[:, None] > 0, last.astype(hidden.dtype), hidden), out.cache

    return _on_all(devices, model, precision, run, arguments, cache)


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _first_token(head, hidden, length, padding, drawing, model, precision, variant) -> Carry:
    """The rows with their first new token, in the column behind a prompt of this length, which
    begins with so much padding."""
    number = jnp.int32(0)
    with jax.default_matmul_precision(precision.matmul):
        token = _pick(model, head, hidden, precision, variant, drawing, number)
    return Carry(token, length, padding, number + 1)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), donate_argnums=(1,))
def _next_tokens(arguments, cache, model, precision, devices, variant):
    """Up to `num` more tokens [B, TOKENS_PER_CALL] of each unfinished row; fewer once all are
    finished."""

    def run(arguments, cache):
        *weights, head, rows, drawing, done, num = arguments
        length = cache["k"].shape[2] * devices.cache_layout().parts if "k" in cache else 1
        columns = jnp.arange(length)

        def unfinished(state):
            i, done = state[:2]
            return (i < num) & ~done.all()

        def step(state):
            i, done, token, column, tokens, cache = state
            visible = (columns <= column[:, None]) & (columns >= rows.padding[:, None])
            inputs = TokenRows(token[:, None], positions=(column - rows.padding)[:, None])
            cached = CacheInput(cache, column, valid=visible)
            out = _forward(weights, inputs, cached, model, precision, devices)
            new = _pick(model, head, out.hidden[:, 0], precision, variant, drawing, rows.number + i)
            token = jnp.where(done, token, new)
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, 1)
            column = jnp.where(done, column, column + 1)
            done |= (token[:, None] == drawing.ends).any(-1)
            return i + 1, done, token, column, tokens, out.cache

        tokens = jnp.zeros((len(rows.token), TOKENS_PER_CALL), jnp.int32)
        state = jnp.int32(0), done, rows.token, rows.column, tokens, cache
        with expected_turns(TOKENS_PER_CALL):
            i, _, token, column, tokens, cache = jax.lax.while_loop(unfinished, step, state)
        return (tokens, Carry(token, column, rows.padding, rows.number + i)), cache

    return _on_all(devices, model, precision, run, arguments, cache)


def _forward(weights, rows: TokenRows, cached: CacheInput, model, precision, devices):
    """The model on rows that continue a cache."""
    params, balance = weights
    # The experts' weights are read in place, unless a layer of the caller's may change them.
    hooks = PLAIN
    if zaya.layer_class(model) is Layer:
        hooks = ScanHooks(read_in_place(**params["layers"]["experts"]))
    return zaya.apply(
        model,
        params,
        balance,
        rows,
        precision=precision,
        cached=cached,
        devices=devices,
        hooks=hooks,
    )


def _pick(model, head, hidden, precision, variant, drawing, number) -> Int[Array, "B"]:
    logits = zaya.logits(model, head, hidden[:, None], precision)[:, 0]
    return pick(logits, variant, drawing.options, drawing.seeds, number)
