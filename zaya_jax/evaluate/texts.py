"""The loss on text: files that prepare_data takes, prepared data, or a run's held-out part.

    loss = evaluate(scorer, documents("docs/*.md", tokenizer), context=2048)
    loss.figures()     loss, perplexity, bits_per_byte, by_position, ...

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

import numpy as np

from zaya_jax.config import Config, UserError
from zaya_jax.data import storage, stores
from zaya_jax.evaluate.scorer import Scorer, TokenRow
from zaya_jax.text import chat_template, inputs
from zaya_jax.text.tokenizers import Tokenizer

PART = 64 << 20  # bytes of an input file that are read at a time
BUCKETS = 32  # powers of two of places in a document
# tokens of full windows that are scored at a time: enough for batches of similar lengths
AT_ONCE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Document:
    """One text or chat: its tokens, a mask of the predicted ones, and the bytes that these
    represent."""

    tokens: np.ndarray
    learn: np.ndarray  # never the first
    bytes: int


@dataclasses.dataclass
class Loss:
    """Sums over predicted tokens. Buckets are of 1, 2 to 3, 4 to 7, ... tokens before."""

    documents: int = 0
    bytes: int = 0  # represented by these tokens
    likeliest: int = 0
    tokens_in: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    nats_in: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BUCKETS))

    def add(self, at: np.ndarray, log_probs: np.ndarray, likeliest: np.ndarray) -> None:
        """Tokens by their places in a document."""
        self.likeliest += int(likeliest.sum())
        buckets = np.frexp(at)[1] - 1
        self.tokens_in += np.bincount(buckets, minlength=BUCKETS)
        self.nats_in -= np.bincount(buckets, log_probs, minlength=BUCKETS)

    @property
    def tokens(self) -> int:
        """All of them."""
        return int(self.tokens_in.sum())

    @property
    def nats(self) -> float:
        """Of all tokens."""
        return float(self.nats_in.sum())

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens if self.tokens else math.nan

    def figures(self) -> dict:
        """All figures, for JSON."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": self.loss,
            "perplexity": math.exp(min(self.loss, 700.0)) if self.tokens else math.nan,
            "bits_per_byte": self.nats / math.log(2) / self.bytes if self.bytes else None,
            "accuracy": self.likeliest / self.tokens if self.tokens else math.nan,
            "by_position": [
                {
                    "from": 1 << bucket,
                    "to": (2 << bucket) - 1,
                    "tokens": int(tokens),
                    "loss": float(nats / tokens),
                }
                for bucket, (tokens, nats) in enumerate(
                    zip(self.tokens_in, self.nats_in, strict=True)
                )
                if tokens
            ],
        }


def documents(
    path: str,
    tokenizer: Tokenizer,
    text_field: str = "text",
    limit: int | None = None,
    skipped: Callable[[str], None] = lambda what: None,
) -> Iterator[Document]:
    """The documents of files, a glob or a directory, or of prepared data's held-out part; at most
    `limit`.

    `skipped` is called with a line for each sample left out: files that are not text, texts of
    white space alone.
    """
    if storage.is_prepared(path):
        return itertools.islice(_prepared(path, tokenizer), limit)
    return itertools.islice(_files(path, tokenizer, text_field, skipped), limit)


def files_of(path: str) -> list[str]:
    """The files of a path or glob, or prepared data's own folder."""
    return [path] if storage.is_prepared(path) else inputs.find([path], os.devnull)


def held_out(
    config: Config, path: str, tokenizer: Tokenizer, limit: int | None = None
) -> Iterator[Document]:
    """The held-out documents of one source of a run with this config; at most `limit`."""
    store = stores.open_store(config, path, tokenizer, "held_out")
    if not store.num_tokens:
        raise UserError(f"{path} of the run has no held-out part; give other data to evaluate on")
    return itertools.islice(_of_store(store, tokenizer), limit)


def _files(
    path: str, tokenizer: Tokenizer, text_field: str, skipped: Callable[[str], None]
) -> Iterator[Document]:
    template = chat_template.Template(tokenizer)
    files = [(name, *inputs.stamp(name)) for name in files_of(path)]
    for stretch in itertools.chain.from_iterable(inputs.split(files, PART)):
        for found in inputs.samples(stretch, text_field):
            if isinstance(found, inputs.NotText):
                skipped(str(found))
                continue
            if isinstance(found, inputs.BadInput):
                raise UserError(str(found))
            _, where, sample = found
            if isinstance(sample, list):
                made, outcome = template.prepare(sample, None)
                if made is None:
                    skipped(f"{where}: {outcome}")
                else:
                    assert made.learn is not None  # None only for texts
                    yield _learnt(np.asarray(made.tokens), made.learn, tokenizer)
                continue
            tokens = tokenizer.document(sample if sample.strip() else "")
            if len(tokens) < 3:
                skipped(f"{where}: empty")  # prepare_data leaves it out too
            else:
                yield Document(tokens, np.arange(len(tokens)) > 0, len(sample.encode()))


def _prepared(path: str, tokenizer: Tokenizer) -> Iterator[Document]:
    store = storage.Prepared(path, "held_out")
    store.require_tokenizer(tokenizer, "the model's")
    if not store.num_tokens:
        raise UserError(f"{path} has no held-out part; prepare it with --held_out, or give files")
    yield from _of_store(store, tokenizer)


def _of_store(store: stores.TokenStore, tokenizer: Tokenizer) -> Iterator[Document]:
    for shard in range(store.num_shards):
        begin = int(store.first_token[shard])
        for length in store.lengths(shard).tolist():
            (parts,) = store.parts([(begin, begin + length)])
            tokens = np.concatenate([bundle.tokens[start:stop] for bundle, start, stop in parts])
            # A target's mark is at the token before it.
            learn = np.concatenate([bundle.learn[start:stop] for bundle, start, stop in parts])
            begin += length
            yield _learnt(tokens, np.append(False, learn[:-1]), tokenizer)


def _learnt(tokens: np.ndarray, learn: np.ndarray, tokenizer: Tokenizer) -> Document:
    """A document that has only tokens: its bytes are those of its predicted tokens, decoded."""
    learn = learn.copy()
    learn[0] = False
    text = tokenizer.decode(tokens[learn].tolist())
    return Document(tokens, learn, len(text.encode("utf-8", errors="replace")))


def windows(count: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first predicted) of the windows of a document of this length: each token is
    predicted once."""
    begin, done = 0, 1
    while done < count:
        end = min(begin + context + 1, count)
        yield begin, end, done
        done, begin = end, max(end - 1 - context // 2, begin + 1)


def evaluate(
    scorer: Scorer,
    found: Iterable[Document],
    context: int,
    tell: Callable[[int], object] = lambda tokens: None,
) -> Loss:
    """The loss over documents; `tell` is called with the number of tokens of each batch."""
    loss = Loss()
    for some in itertools.batched(_rows(found, context, loss), max(AT_ONCE // context, 1)):
        counts = [len(mask) for *_, mask in some]
        scores = scorer([row for row, *_ in some], lambda done: tell(sum(counts[n] for n in done)))  # noqa: B023
        for (_, first, mask), (log_probs, likeliest) in zip(some, scores, strict=True):
            loss.add(np.arange(first, first + len(mask))[mask], log_probs[mask], likeliest[mask])
    return loss


def _rows(
    found: Iterable[Document], context: int, loss: Loss
) -> Iterator[tuple[TokenRow, int, np.ndarray]]:
    """(row, the place in its document of the row's first predicted token, a mask of the predicted
    ones)."""
    for document in found:
        loss.documents += 1
        loss.bytes += document.bytes
        for begin, end, first in windows(len(document.tokens), context):
            if document.learn[first:end].any():
                row = TokenRow(document.tokens[begin:end], first - begin)
                yield row, first, document.learn[first:end]


def together(losses: Iterable[Loss]) -> Loss:
    """The loss over several sets of documents."""
    total = Loss()
    for loss in losses:
        for name, value in vars(loss).items():
            setattr(total, name, getattr(total, name) + value)
    return total
