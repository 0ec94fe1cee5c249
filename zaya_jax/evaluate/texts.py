"""The loss on text: files that prepare_data takes, prepared data, or a run's held-out part.

    figures = evaluate(scorer, documents("docs/*.md", tokenizer), context=2048)
    figures["loss"]     and perplexity, bits_per_byte, by_position, ...

A document is a row of tokens with its begin and end, as in training; every token except the first
is predicted, in a chat only the answers. A document longer than the context is read in windows that
advance by half of it, so every token beyond the first window is predicted after at least half a
context.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from zaya_jax.config import Config, UserError, fields
from zaya_jax.data import prepared_store, stores
from zaya_jax.evaluate.scorer import Scorer, TokenRow
from zaya_jax.text import chat_template, inputs
from zaya_jax.text.tokenizers import Tokenizer

BUCKETS = 32  # powers of two of positions in a document
# tokens of full windows that are scored at a time: enough for batches of similar lengths
TOKENS_AT_A_TIME = 1 << 22


@dataclasses.dataclass(frozen=True)
class ScoredDocument:
    """One text or chat: its tokens, a mask of the predicted ones, and the bytes that these
    represent."""

    tokens: np.ndarray
    predicted: np.ndarray  # never the first
    bytes: int


@dataclasses.dataclass
class _Sums:
    """Sums over predicted tokens. Buckets are of 1, 2 to 3, 4 to 7, ... tokens before."""

    documents: int = 0
    bytes: int = 0  # represented by these tokens
    likeliest: int = 0
    tokens_in: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    nats_in: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BUCKETS))

    def add(self, positions: np.ndarray, log_probs: np.ndarray, likeliest: np.ndarray) -> None:
        """Add tokens by their positions in a document."""
        self.likeliest += int(likeliest.sum())
        buckets = np.frexp(positions)[1] - 1
        self.tokens_in += np.bincount(buckets, minlength=BUCKETS)
        self.nats_in -= np.bincount(buckets, log_probs, minlength=BUCKETS)

    def figures(self) -> dict[str, Any]:
        """All figures, for JSON."""
        tokens, nats = int(self.tokens_in.sum()), float(self.nats_in.sum())
        loss = nats / tokens if tokens else math.nan
        by_position = []
        for bucket in np.flatnonzero(self.tokens_in).tolist():
            first, last = 1 << bucket, (2 << bucket) - 1
            count = int(self.tokens_in[bucket])
            mean = float(self.nats_in[bucket] / count)
            by_position.append({"from": first, "to": last, "tokens": count, "loss": mean})
        return {
            "documents": self.documents,
            "tokens": tokens,
            "bytes": self.bytes,
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": nats / math.log(2) / self.bytes if self.bytes else None,
            "accuracy": self.likeliest / tokens if tokens else math.nan,
            "by_position": by_position,
        }


def documents(
    path: str,
    tokenizer: Tokenizer,
    text_field: str = "text",
    limit: int | None = None,
    skipped: Callable[[str], None] = lambda what: None,
) -> Iterator[ScoredDocument]:
    """The documents of files, a glob or a directory, or of prepared data's held-out part; at most
    `limit`.

    `skipped` is called with a line for each sample left out: files that are not text, texts of
    only white space.
    """
    if not prepared_store.is_prepared(path):
        return itertools.islice(_of_files(path, tokenizer, text_field, skipped), limit)
    store = prepared_store.PreparedStore(path, "held_out")
    store.require_tokenizer(tokenizer, "the model's")
    return itertools.islice(_of_store(store, path, tokenizer), limit)


def held_out(
    config: Config, path: str, tokenizer: Tokenizer, limit: int | None = None
) -> Iterator[ScoredDocument]:
    """The held-out documents of one source of a run with this config; at most `limit`."""
    if config.run.takes_pairs:
        raise UserError(
            f"{path} has pairs of answers (config.run.preference={config.run.preference!r}), whose"
            " loss is in the run's own metrics; give chats or text with --data"
        )
    store = stores.open_store(config, path, tokenizer, "held_out")
    return itertools.islice(_of_store(store, path, tokenizer), limit)


def _of_files(
    path: str, tokenizer: Tokenizer, text_field: str, skipped: Callable[[str], None]
) -> Iterator[ScoredDocument]:
    template = chat_template.Template(tokenizer)
    for file in inputs.find_inputs([path], os.devnull):
        for sample in inputs.samples(inputs.whole_file(file, file), inputs.TextOrChat(text_field)):
            if isinstance(sample, inputs.NotText):
                skipped(str(sample))
            elif isinstance(sample, inputs.BadInput):
                raise UserError(str(sample))
            elif isinstance(sample.content, list):
                with fields.naming(sample.where):
                    document, outcome = template.encode_within(sample.content, None)
                if document is None:
                    skipped(f"{sample.where}: {outcome}")
                else:
                    assert document.predicted is not None  # None only for texts
                    yield _of_tokens(document.tokens, document.predicted, tokenizer)
            else:
                text = sample.content if sample.content.strip() else ""
                tokens = tokenizer.encode_document(text)
                if len(tokens) < 3:
                    skipped(f"{sample.where}: empty")  # prepare_data leaves it out too
                else:
                    predicted = np.arange(len(tokens)) > 0
                    yield ScoredDocument(tokens, predicted, len(text.encode()))


def _of_store(
    store: stores.TokenStore, path: str, tokenizer: Tokenizer
) -> Iterator[ScoredDocument]:
    if not store.num_tokens:
        raise UserError(f"{path} has no held-out part; prepare it with --held_out, or give --data")
    for shard in range(store.num_shards):
        begin = int(store.first_token[shard])
        for length in store.lengths(shard).tolist():
            (block,) = store.read_spans([(begin, begin + length)])
            begin += length
            # `learn` is of each token's target, which is the next token
            yield _of_tokens(block.tokens, np.append(False, block.learn[:-1]), tokenizer)


def _of_tokens(tokens: np.ndarray, predicted: np.ndarray, tokenizer: Tokenizer) -> ScoredDocument:
    """A document that has only tokens: its bytes are those of its predicted tokens, decoded."""
    predicted = predicted.copy()
    predicted[0] = False
    text = tokenizer.decode(tokens[predicted].tolist())
    return ScoredDocument(tokens, predicted, len(text.encode("utf-8", errors="replace")))


def windows(count: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first predicted) of the windows of a document of this length: each token is
    predicted once."""
    begin, first = 0, 1
    while first < count:
        end = min(begin + context + 1, count)
        yield begin, end, first
        first = end
        begin = max(end - 1 - context // 2, begin + 1)


def evaluate(
    scorer: Scorer,
    documents: Iterable[ScoredDocument],
    context: int,
    on_tokens: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Any]:
    """The figures of documents; `on_tokens` is called with the number of tokens of each batch."""

    def report(batch: list[TokenRow]) -> None:
        on_tokens(sum(len(row.ids) - row.first for row in batch))

    sums = _Sums()
    rows = _rows(documents, context, sums)
    for portion in itertools.batched(rows, max(TOKENS_AT_A_TIME // context, 1)):
        scores = scorer([row for row, *_ in portion], report)
        for (_, first, mask), (log_probs, likeliest) in zip(portion, scores, strict=True):
            positions = np.arange(first, first + len(mask))
            sums.add(positions[mask], log_probs[mask], likeliest[mask])
    return sums.figures()


def _rows(
    documents: Iterable[ScoredDocument], context: int, sums: _Sums
) -> Iterator[tuple[TokenRow, int, np.ndarray]]:
    """(row, the position in its document of the row's first scored token, a mask of the predicted
    ones among the scored)."""
    for document in documents:
        sums.documents += 1
        sums.bytes += document.bytes
        for begin, end, first in windows(len(document.tokens), context):
            mask = document.predicted[first:end]
            if mask.any():
                yield TokenRow(document.tokens[begin:end], first - begin), first, mask
