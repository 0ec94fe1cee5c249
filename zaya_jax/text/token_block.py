"""Tokens of documents, and what is to be predicted of them: of one document, and of several one
after another.

The two say it in different ways. `Document.predicted[i]` is of token i itself.
`TokenBlock.learn[i]` is of its *target*, which is token i + 1.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from zaya_jax.text.tokenizers import Tokenizer


@dataclasses.dataclass
class Document:
    """Tokens of one document, begin and end included."""

    tokens: np.ndarray
    predicted: np.ndarray | None = None  # bool: the token is to be predicted; None: all of them
    # of a chat: answers and tokens that are learnt, answers that its template rewrites
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TokenBlock:
    """A run of tokens with their targets and flags: all arrays have the same length."""

    tokens: np.ndarray  # unsigned
    targets: np.ndarray  # unsigned: the token after each (whatever it is where `learn` is false)
    starts: np.ndarray  # bool: a document begins here
    learn: np.ndarray  # bool: the target is real and is to be learnt
    real: np.ndarray  # bool: the token could be read; otherwise padding takes its place

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "TokenBlock":
        """Some of its tokens."""
        return TokenBlock(*(array[start:stop] for array in vars(self).values()))


def join(parts: Sequence[TokenBlock]) -> TokenBlock:
    """Several blocks as one."""
    if len(parts) == 1:
        return parts[0]
    arrays = zip(*(vars(part).values() for part in parts), strict=True)
    return TokenBlock(*map(np.concatenate, arrays))


def concatenate(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenBlock:
    """The tokens of documents one after another; these are all texts, or all chats."""
    lengths = [len(document.tokens) for document in documents]
    starts = np.zeros(sum(lengths), bool)
    starts[np.cumsum([0, *lengths])[:-1]] = True
    tokens = [document.tokens for document in documents]
    masks = [document.predicted for document in documents if document.predicted is not None]
    assert len(masks) in (0, len(documents))
    return with_targets(
        np.concatenate([np.empty(0, tokenizer.dtype), *tokens]),
        starts,
        np.concatenate(masks) if masks else None,
    )


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> TokenBlock:
    """The documents of texts, encoded by all cores."""

    def encode(text: str) -> Document:
        return Document(tokenizer.encode_document(text))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return concatenate(list(pool.map(encode, texts)), tokenizer)


def with_targets(
    tokens: np.ndarray, starts: np.ndarray, predicted: np.ndarray | None = None
) -> TokenBlock:
    """The block of whole documents' tokens: each one's target is the next, unless a document starts
    there. `predicted` is of the tokens (all by default).
    """
    both = np.zeros(len(tokens) + 1, tokens.dtype)  # tokens and targets are two views of it
    both[:-1] = tokens
    learn = np.zeros(len(tokens), bool)
    learn[:-1] = ~starts[1:]
    if predicted is not None:
        learn[:-1] &= predicted[1:]
    return TokenBlock(both[:-1], both[1:], starts, learn, all_true(len(learn)))


def all_true(count: int) -> np.ndarray:
    """So many flags, all of them true, which take no memory."""
    return np.broadcast_to(np.True_, count)
