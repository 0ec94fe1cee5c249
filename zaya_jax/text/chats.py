"""Reads chats that need no preparing: JSONL or Parquet to documents that fit the context, some of
them held out.

A record that is no chat ends the run in one line that names file and line, before anything is
compiled; a preparation (`experiments.prepare_data`) can leave such records out. Everything is in
memory: prepare large sets.
"""

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator

from zaya_jax.config import UserError
from zaya_jax.text import chat, chat_template, inputs, sources
from zaya_jax.text.sources import Bundle
from zaya_jax.text.tokenizers import Tokenizer
from zaya_jax.text.tokens import Document

FIELDS = ", ".join(inputs.CHAT_FIELDS)
HELD_OUT = 64  # chats at least, unless that is more than a tenth of all; then the tenth


@dataclasses.dataclass(frozen=True)
class Chats:
    """The chats of a path that fit, by the hash of what they say."""

    path: str
    documents: dict[bytes, list[Document]]
    hashes: frozenset[bytes]  # of those that do not fit, too
    counts: chat.Counts
    tokenizer: Tokenizer

    def split(self, last: bytes) -> tuple[Bundle, Bundle, str]:
        """(those to learn, those held out, whose hashes are `last` and below, a note on how they
        were fitted)."""
        sides = [
            [d for key, held in self.documents.items() if (key <= last) == out for d in held]
            for out in (False, True)
        ]
        train, held_out = (_bundle(side, self.tokenizer) for side in sides)
        note = (
            f"{self.path}: {len(sides[0]):,} chats to learn and {len(sides[1]):,} held out"
            f" ({self.counts}); {len(train) + len(held_out):,} tokens, {self.counts.learnt}"
        )
        return train, held_out, note


def last_held_out(found: Iterable[Chats]) -> bytes:
    """The greatest hash of a chat that is held out: one for all sources of a run, so that copies
    are on one side.

    By all chats, whatever the context, so that phases of other contexts hold out the same. Each
    source keeps one to learn.
    """
    found = list(found)
    hashes = sorted(frozenset[bytes]().union(*(one.hashes for one in found)))
    fitted = sorted({key for one in found for key in one.documents})
    wanted = max(round(sources.HELD_OUT_SHARE * len(hashes)), min(HELD_OUT, len(hashes) // 10), 1)
    last = max(hashes[wanted - 1], fitted[0])  # one that fits is held out
    learnt = min(max(one.documents) for one in found)  # and one of each source is not
    return last if last < learnt else max((key for key in fitted if key < learnt), default=b"")


def read_chats(path: str, tokenizer: Tokenizer, context: int) -> Chats:
    """The chats of a file, directory or glob; UserError where one is none, or none has an answer
    that fits."""
    form, counts = chat_template.Template(tokenizer), chat.Counts()
    documents: dict[bytes, list[Document]] = {}
    hashes = set()
    for place, messages in _samples(path):
        try:
            document, outcome = form.prepare(messages, context)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        counts.add(document, outcome, any(form.ending))
        # A test holds these bytes: where they change, chats change sides.
        said = repr(messages) + "".join(
            repr(calls) for one in messages if (calls := one.more.get("tool_calls"))
        )
        hashes.add(key := hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest())
        if document is not None:
            documents.setdefault(key, []).append(document)
    if not counts:
        raise UserError(f"{path!r} has no chat; give records with a list of turns under {FIELDS}")
    if not documents:
        raise UserError(
            f"{path!r}: its {counts.total():,} chats are all longer than the context of {context}"
            f" tokens or left out ({counts}); prompts and answers are never"
            " cut: give a longer context, or for chats left out another chat template"
        )
    return Chats(path, documents, frozenset(hashes), counts, tokenizer)


def whole(path: str, tokenizer: Tokenizer, context: int) -> tuple[Bundle, str]:
    """All chats of a file, directory or glob as one bundle, and how many they are."""
    read_here = read_chats(path, tokenizer, context)
    found = list(itertools.chain.from_iterable(read_here.documents.values()))
    return (
        _bundle(found, tokenizer),
        f"{path}: {len(found):,} chats to evaluate on ({read_here.counts})",
    )


def _bundle(documents: list[Document], tokenizer: Tokenizer) -> Bundle:
    learnt = [d.learn for d in documents]
    return sources.concatenate([d.tokens for d in documents], tokenizer, learnt)  # type: ignore


def _samples(path: str) -> Iterator[tuple[str, list[chat.Message]]]:
    """(a name for messages, turns) of every record."""
    for _, file in sources.files_for_memory(path):
        for part in itertools.chain(
            *inputs.split([(str(file), *inputs.stamp(str(file)))], sys.maxsize)
        ):
            if part.kind not in inputs.RECORDS:
                raise UserError(
                    f"config.data.chats is set, but {part} is neither JSONL nor Parquet; give"
                    f" records with a list of turns under {FIELDS}"
                )
            for sample in inputs.samples(part, "text"):
                if isinstance(sample, inputs.BadInput):
                    raise UserError(
                        f"{sample}; mend it, or let prepare_data --skip_bad leave it out"
                    )
                if not isinstance(sample.content, list):
                    raise UserError(
                        f"{sample.where}: a text and no chat, but config.data.chats is set; give a"
                        f" list of turns under {FIELDS}"
                    )
                yield sample.where, sample.content
