"""Continuing rows of tokens with the cache: prompts piece by piece, then one token a row at a time.

Rows of unequal length start in column 0, so a token's column is its position. The padding after a
short row is overwritten by its next tokens before any token sees it. Prompts go through the model
in pieces (`PIECE`), so scores and logits never exist for more than a piece. Compiled programs
depend on the number of rows, padded to a power of two, on the length of the cache and of a piece (a
few values each), and on `Sampling.kind`, but not on a prompt's length.

Several devices hold the keys and values in parts, for caches that one cannot hold
(`zaya_jax.parallel.tree.InParts`); everything else, including the prompts' pass, is the same on all
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
from jaxtyping import Array, Int

from pallas_kernels import chip
from pallas_kernels.loops import turning
from zaya_jax.config import Model, Precision, UserError, shown
from zaya_jax.model import cca, dense, zaya
from zaya_jax.model.experts import read_in_place
from zaya_jax.model.layer import Layer
from zaya_jax.model.placement import ALONE, Cached, Devices, Rows
from zaya_jax.model.sampling import Sampling, pick
from zaya_jax.model.stored import SCANNED, Stored

# Tokens of each prompt that go through the model at once, and of all prompts together, at least
# LEAST_PIECE of each. On two CPU cores a prompt of 2048 took 2.2 s in one piece, 3.4 in two and 4.9
# in four (354M weights, eight experts): products of few rows are slow.
PIECE, PIECES = 2048, 16384
LEAST_PIECE = 16
# columns of pieces of short rows: 50 sentences of any lengths take two programs, not 20
SHORT = (64, 256)
CACHES = 256, 512, 1024  # columns of caches: each takes two programs, which compile for seconds
TURN = 16  # new tokens of each row between two checks for ended rows
REPLICATED = PartitionSpec()


class Decoder(NamedTuple):
    """A model to decode with, and its devices. `kernels`, from a config, are the operators with
    kernels on a GPU."""

    model: Model
    params: dict
    balance: jax.Array
    precision: Precision = Precision()
    devices: Devices = ALONE
    kernels: tuple[str, ...] = ("all",)


def generate(
    decoder: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """The next ids of each row, at most `num_tokens`, without the id that ended it; options are
    Generation's."""
    rows = Generation(decoder, prompts, num_tokens, **options)
    found: list[list[int]] = [[] for _ in prompts]
    while not rows.ended:
        for row, ids in zip(found, rows.more(), strict=True):
            row += ids
    return found


class Generation:
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
        piece: int | None = None,
        mask: Any = None,
    ):
        model, params, balance, precision, devices, kernels = decoder
        ids, lengths = _rows(model, prompts, num_tokens)
        row_seeds = _seeds(seeds, len(ids))
        ends = end_ids(ends)
        if piece is not None and piece < 1:
            raise UserError(f"piece={shown(piece)} must be a whole number of at least 1, or None")
        mask = None if mask is None else _mask(mask, lengths)
        # the others copy the first, already ended
        self._asked, self.rows = (len(ids), 1 << (len(ids) - 1).bit_length())
        spare = self.rows - self._asked
        ids, lengths, row_seeds = (
            ids + ids[:1] * spare,
            lengths + lengths[:1] * spare,
            np.pad(row_seeds, (0, spare)),
        )
        mask = None if mask is None else np.pad(mask, ((0, spare), (0, 0)), "edge")
        num_tokens, size = int(num_tokens), int(piece or piece_of(self.rows))
        parts = 1 if devices.mesh is None else devices.mesh.size
        self._model, self._precision, self._devices = model, precision, devices
        self._kind, self._ends = sampling.kind, frozenset(ends)
        self._left, self._done = num_tokens, np.arange(self.rows) >= self._asked
        self._target = chip.made_for(params if devices.mesh is None else devices.mesh).taking(
            kernels
        )
        self.ids: list[list[int]] = [[] for _ in prompts]  # of each row, so far
        self.columns = 0  # tokens of a row that the cache has room for
        self._cache: dict | None = None
        self._carry: Any = None
        if self.ended:
            return
        params, self._head = self._everywhere(zaya.rounded(model, params, precision))
        self._weights: Any = (params, self._everywhere(balance))
        self._drawing = self._everywhere((sampling.numbers(), row_seeds, _padded_ends(ends)))
        self._start(ids, lengths, mask, num_tokens, -(-size // parts) * parts)

    @property
    def ended(self) -> bool:
        """Whether all rows have ended."""
        return self._left < 1 or bool(self._done.all())

    @property
    def cache_bytes(self) -> int:
        """The cache's bytes on all devices together, copies included."""
        return sum(
            part.data.nbytes for x in (self._cache or {}).values() for part in x.addressable_shards
        )

    def end(self, row: int) -> None:
        """Ends a row: it gets no further token, and does not change."""
        self._done[row] = True

    def more(self) -> list[list[int]]:
        """The next ids of each row (empty if it has ended): one at first, then up to TURN."""
        assert not self.ended
        if self._carry is None:
            statics = self._model, self._precision, self._devices, self._kind
            with chip.making(self._target):
                token, self._carry = _first(
                    self._head, self._hidden, self._index, self._drawing, *statics
                )
            return self._taken(np.asarray(token)[:, None])
        num = min(TURN, self._left)
        with chip.making(self._target):
            (tokens, self._carry), self._cache = _go_on(*self._going_on(num))
        return self._taken(np.asarray(tokens)[:, :num])

    def lowered(self) -> Any:
        """The compiled program of the tokens after the first one, for inspection."""
        with chip.making(self._target):
            return _go_on.lower(*self._going_on(1))

    def _going_on(self, num: int) -> tuple:
        arguments = (
            *self._weights,
            self._head,
            self._carry,
            self._drawing,
            self._done,
            np.int32(num),
        )
        return arguments, self._cache, self._model, self._precision, self._devices, self._kind

    def _taken(self, tokens: np.ndarray) -> list[list[int]]:
        """The new tokens [B, T] of each row up to its end."""
        self._left -= tokens.shape[1]
        new: list[list[int]] = [[] for _ in range(self._asked)]
        for row in np.flatnonzero(~self._done):
            ids = tokens[row].tolist()
            end = next((i for i, token in enumerate(ids) if token in self._ends), None)
            self._done[row] |= end is not None
            new[row] = ids[:end]
            self.ids[row] += new[row]
        return new

    def _start(self, ids, lengths, mask, num_tokens, piece):
        """Runs the prompts through the model, and keeps the cache and each row's last hidden
        state."""
        statics = self._model, self._precision, self._devices
        sizes = pieces(max(lengths), piece)
        if mask is not None:
            sizes = [max(lengths)]
        length = self.columns = columns(max(max(lengths) + num_tokens, sum(sizes)))
        rows = np.zeros((len(ids), sum(sizes)), np.int32)
        for row, own in zip(rows, ids, strict=True):
            row[: len(own)] = own
        lengths = np.asarray(lengths, np.int32)
        if mask is not None:
            arguments = (*self._weights, rows, mask)
            with chip.making(self._target):
                self._hidden, self._cache = _padded(arguments, None, length, *statics)
            self._index = lengths, lengths - mask.sum(1, dtype=np.int32)
            return
        start, hidden = 0, np.zeros((len(ids), self._model.hidden_size), np.float32)
        for size in sizes:
            counts = np.clip(lengths - start, 0, size)
            arguments = (*self._weights, rows[:, start : start + size], counts, hidden)
            arguments += (np.int32(start),) if start else ()
            with chip.making(self._target):
                hidden, self._cache = _piece(arguments, self._cache, length, *statics)
            start += size
        self._hidden, self._index = hidden, (lengths, np.zeros_like(lengths))

    def _everywhere(self, arguments):
        """The arguments, on all devices of the mesh."""
        mesh = self._devices.mesh
        return (
            arguments
            if mesh is None
            else jax.device_put(arguments, NamedSharding(mesh, REPLICATED))
        )


class CacheBytes(NamedTuple):
    """Bytes of a cache on a device: per token of a row, per row of any length, and in total."""

    a_token: int
    a_row: int
    total: int


def cache_bytes(
    model: Model, precision: Precision, batch: int, length: int, devices: Devices = ALONE
) -> CacheBytes:
    """The bytes of a cache with `batch` rows of `length` columns."""

    def taken(batch, length):
        arrays = jax.eval_shape(lambda: _empty_cache(model, precision, batch, length))
        return sum(x.size * x.dtype.itemsize for x in arrays.values())

    row = taken(1, 0)
    return CacheBytes(taken(1, 1) - row, row, taken(batch, devices.cache().columns(length)))


def columns(needed: int) -> int:
    """The size of a cache for this many columns: of few; above CACHES at most a quarter more."""
    step = 1 << max((needed - 1).bit_length() - 3, 0)
    return next((size for size in CACHES if needed <= size), -(-needed // step) * step)


def piece_of(rows: int) -> int:
    """Tokens of each row that go through the model at once, with this many rows."""
    share = max(PIECES // rows, LEAST_PIECE)
    return min(PIECE, 1 << share.bit_length() - 1)


def pieces(length: int, piece: int) -> list[int]:
    """The pieces of prompts whose longest has this length; the last piece may be padded."""
    rest = length % piece
    last = (
        [min(piece, next((size for size in SHORT if rest <= size), 1 << (rest - 1).bit_length()))]
        if rest
        else []
    )
    return [piece] * (length // piece) + last


def _rows(model: Model, prompts, num_tokens: int) -> tuple[list[list[int]], list[int]]:
    """The prompts' ids and lengths; UserError if they cannot be continued that far."""
    if num_tokens < 0:
        raise UserError(f"num_tokens={shown(num_tokens)} must be a whole number of at least 0")
    rows = [[operator.index(token) for token in prompt] for prompt in prompts]
    if not rows:
        raise UserError("there are no prompts; give a list with at least one list of token ids")
    for number, row in enumerate(rows):
        name = f"prompt {number + 1} of {len(rows)}"
        if not row:
            raise UserError(f"{name} is empty; give at least one token, the tokenizer's bos_id say")
        wrong = next((token for token in row if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"{name} has token {shown(wrong)}; the vocabulary has ids from 0 to"
                f" {model.vocab_size - 1}"
            )
        if len(row) + num_tokens > model.max_position_embeddings:
            raise UserError(
                f"{name} has {len(row):,} tokens, with num_tokens={shown(num_tokens)} more than the"
                f" model's max_position_embeddings={model.max_position_embeddings}; give fewer"
            )
    return rows, [len(row) for row in rows]


def _seeds(seeds: int | Sequence[int], num: int) -> np.ndarray:
    """A seed for each row."""
    given = [operator.index(seed) for seed in ([seeds] * num if np.ndim(seeds) == 0 else seeds)]  # type: ignore
    if len(given) != num:
        raise UserError(
            f"seeds has {len(given)} numbers for {num} prompts; give one for each, or a single one"
        )
    for seed in given:
        if not 0 <= seed < 2**32:  # keys would take it modulo that
            raise UserError(
                f"seed {shown(seed)} must be a whole number of at least 0 and below {2**32}"
            )
    return np.asarray(given, np.uint32)


def _mask(mask: Any, lengths: list[int]) -> np.ndarray:
    """The mask of prompts that are padded at the left."""
    found = np.asarray(mask)
    if found.shape != (len(lengths), max(lengths)) or len(set(lengths)) > 1:
        raise UserError(
            f"mask has shape {found.shape}; expected that of prompts of one length, padded"
        )
    if (
        not np.isin(found, (0, 1)).all()
        or not found[:, -1].all()
        or (found[:, 1:] < found[:, :-1]).any()
    ):
        raise UserError(
            "mask must have in each row zeros for the padding at the left, then ones to the end,"
            " one at least"
        )
    return found.astype(np.int32)


def end_ids(ends: Iterable[int]) -> list[int]:
    """The ids that end a row; UserError if they are not ids."""
    found = [operator.index(token) for token in ends]
    if not all(0 <= token < 2**31 for token in found):
        raise UserError(f"ends={shown(ends)} must be a list of token ids")
    return found


def _padded_ends(ends: list[int]) -> np.ndarray:
    """The ids that end a row, as an array of few lengths."""
    num = max(4, 1 << max(len(ends) - 1, 0).bit_length())
    return np.asarray([*ends, *[-1] * (num - len(ends))], np.int32)


def _empty_cache(model, precision, batch, length):
    make = dense.empty_cache if model.model_type == "dense" else cca.empty_cache
    return make(model, precision, batch, length)


def _on_all(devices: Devices, model, precision, run, arguments, cache):
    """run(arguments, cache) → (anything, cache), on each device if there are several."""
    with jax.default_matmul_precision(precision.matmul):
        axis = devices.cache().axis
        if axis is None:
            return run(arguments, cache)
        names = jax.eval_shape(lambda: _empty_cache(model, precision, 1, 1))
        in_parts = {name: PartitionSpec(None, None, axis) for name in ("k", "v")}
        specs = {name: in_parts.get(name, REPLICATED) for name in names}
        # All devices compute the same values, but the check of replication cannot see that.
        mapped = jax.shard_map(
            run,
            mesh=devices.mesh,
            in_specs=(REPLICATED, None if cache is None else specs),
            out_specs=(REPLICATED, specs),
            check_vma=False,
        )
        return mapped(arguments, cache)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _padded(arguments, cache, length, model, precision, devices):
    """Prompts with padding at the left: the last hidden states [B, D], and the cache."""

    def run(arguments, cache):
        params, balance, ids, mask = arguments
        cache = _empty_cache(model, precision, len(ids), devices.cache().columns(length))
        # A row's first real token is at position 0, as the port's generate counts.
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        out = zaya.apply(
            model,
            params,
            balance,
            Rows(ids, positions=positions, mask=mask),
            precision=precision,
            cached=Cached(cache, jnp.int32(0)),
            devices=devices,
            stored=_in_place(model, params),
        )
        return out.hidden[:, -1], out.cache

    return _on_all(devices, model, precision, run, arguments, cache)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), donate_argnums=(1,))
def _piece(arguments, cache, length, model, precision, devices):
    """A piece of the prompts; the first, without a start, goes into a new cache of this length."""

    def run(arguments, cache):
        if cache is None:
            columns = devices.cache().columns(length)
            cache = _empty_cache(model, precision, len(arguments[2]), columns)
            arguments = (*arguments, 0)
        *arguments, start = arguments
        return _through(arguments, start, cache, model, precision, devices)

    return _on_all(devices, model, precision, run, arguments, cache)


def _through(arguments, start, cache, model, precision, devices):
    """Runs a piece [B, S] through the model: the last hidden state of rows that end in it; others
    keep theirs."""
    params, balance, ids, counts, hidden = arguments
    positions = jnp.broadcast_to(start + jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    out = zaya.apply(
        model,
        params,
        balance,
        Rows(ids, positions=positions),
        precision=precision,
        cached=Cached(cache, start, counts=counts),
        devices=devices,
        stored=_in_place(model, params),
    )
    last = jnp.take_along_axis(out.hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(counts[:, None] > 0, last.astype(hidden.dtype), hidden), out.cache


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _first(head, hidden, index, drawing, model, precision, devices, kind):
    """The first new token [B], and the carry: that token, its column, the padding before the row,
    its number."""
    with jax.default_matmul_precision(precision.matmul):
        numbers, seeds, _ = drawing
        count = jnp.int32(0)
        token = _pick(model, head, hidden, precision, kind, numbers, seeds, count)
    return token, (token, *index, count + 1)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), donate_argnums=(1,))
def _go_on(arguments, cache, model, precision, devices, kind):
    """Up to `num` more tokens [B, TURN] of each unfinished row; fewer once all are finished."""

    def run(arguments, cache):
        params, balance, head, (token, index, padding, count), (numbers, seeds, ends), done, num = (
            arguments
        )
        places = jnp.arange(cache["k"].shape[2] * devices.cache().parts if "k" in cache else 1)

        def goes_on(carry):
            i, done = carry[0], carry[1]
            return (i < num) & ~done.all()

        def step(carry):
            i, done, token, index, tokens, cache = carry
            seen = (places <= index[:, None]) & (places >= padding[:, None])
            out = zaya.apply(
                model,
                params,
                balance,
                Rows(token[:, None], positions=(index - padding)[:, None]),
                precision=precision,
                cached=Cached(cache, index, valid=seen),
                devices=devices,
                stored=_in_place(model, params),
            )
            new = _pick(model, head, out.hidden[:, 0], precision, kind, numbers, seeds, count + i)
            token = jnp.where(done, token, new)
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, 1)
            index = jnp.where(done, index, index + 1)
            done |= (token[:, None] == ends).any(-1)
            return i + 1, done, token, index, tokens, out.cache

        tokens = jnp.zeros((len(token), TURN), jnp.int32)
        with turning(TURN):
            carry = jax.lax.while_loop(
                goes_on, step, (jnp.int32(0), done, token, index, tokens, cache)
            )
        i, _, token, index, tokens, cache = carry
        return (tokens, (token, index, padding, count + i)), cache

    return _on_all(devices, model, precision, run, arguments, cache)


def _in_place(model: Model, params: dict) -> Stored:
    """The experts' weights are read in place, unless a layer of the caller's may change them."""
    if zaya.layer_class(model) is Layer:
        return Stored(read_in_place(**params["layers"]["experts"]))
    return SCANNED


def _pick(model, head, hidden, precision, kind, numbers, seeds, count) -> Int[Array, "B"]:
    logits = zaya.logits(model, head, hidden[:, None], precision)[:, 0]
    return pick(logits, kind, numbers, seeds, count)
