"""Long texts to ids piece by piece, so that memory follows the ids and not what a tokenizer keeps of each.

The tokenizers library holds about 100 bytes per token while it encodes. A text is therefore cut where its tokenizer
says that a cut changes no id (`Tokenizer.cut`), and each piece is encoded on its own.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.data.tokenizers import Tokenizer

PIECE = 4 << 20  # characters that are encoded together, of one text or of several
WHOLE = 64 << 20  # a text of more than these must be cut somewhere


class TooLong(UserError):
    """A text that is too long to be encoded at once and has no place to cut it."""


def document(tokenizer: Tokenizer, text: Iterable[str]) -> np.ndarray:
    """The ids of a text that comes in pieces, between begin and end of document."""
    ids: np.ndarray = np.empty(1 << 16, tokenizer.dtype)
    ids[0], count = tokenizer.bos_id, 1
    for piece in _cut(tokenizer, text):
        new = tokenizer.encode_many([piece])[0]
        if count + len(new) >= len(ids):
            ids.resize((count + len(new)) * 9 // 8 + 1, refcheck=False)  # in place: two copies never exist
        ids[count : count + len(new)] = new
        count += len(new)
    ids[count] = tokenizer.eos_id
    return ids[: count + 1]


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of texts, encoded a few megabytes at a time, without begin or end."""
    found: list[np.ndarray] = []
    batch: list[str] = []
    size = 0
    for text in texts:
        if len(text) > PIECE:
            found += [*tokenizer.encode_many(batch), document(tokenizer, [text])[1:-1]]
            batch, size = [], 0
            continue
        batch.append(text)
        size += len(text)
        if size >= PIECE:
            found += tokenizer.encode_many(batch)
            batch, size = [], 0
    return found + tokenizer.encode_many(batch)


def _cut(tokenizer: Tokenizer, text: Iterable[str]) -> Iterator[str]:
    """The same text in pieces of about PIECE characters that end where the tokenizer allows it."""
    parts = (part[i : i + PIECE] for part in text for i in range(0, len(part), PIECE))
    rest = ""
    for part in parts:
        if len(rest) >= PIECE:
            at = tokenizer.cut(rest)
            if at:
                yield rest[:at]
                rest = rest[at:]
            elif len(rest) > WHOLE:
                raise TooLong(
                    f"a text of more than {WHOLE >> 20} Mi characters, which a {tokenizer.kind} tokenizer can only "
                    "encode as a whole here; give it as several documents, such as the lines of a JSONL file"
                )
        rest += part
    yield rest
