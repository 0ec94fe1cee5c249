"""Reads chats, or pairs of them, that need no preparing: JSONL or Parquet to documents that fit the
context, some of them held out.

A record that is no chat ends the run in one line that names file and line, before anything is
compiled; a preparation (`experiments.prepare_data`) can leave such records out. Everything is in
memory: prepare large sets.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.text import chat, chat_template, inputs, text_files, token_block
from zaya_jax.text.answer_spans import Incomplete, Refused
from zaya_jax.text.inputs import Sample
from zaya_jax.text.token_block import Document, TokenBlock
from zaya_jax.text.tokenizers import Tokenizer

HELD_OUT = 64  # chats at least, unless that is more than a tenth of all; then the tenth


@dataclasses.dataclass(frozen=True)
class Chats:
    """The chats of a path that fit, by the hash of what they say; of pairs, of their prompt.

    The two documents of a pair follow one another, the better answer first.
    """

    path: str
    unit: str  # "chats" or "pairs"
    documents: dict[bytes, list[Document]]
    hashes: frozenset[bytes]  # of those that do not fit, too
    counts: chat.Counts
    tokenizer: Tokenizer

    def number(self, documents: list[Document]) -> int:
        """How many chats or pairs these documents are."""
        if self.unit == "pairs":
            return len(documents) // 2
        return len(documents)

    def split(self, last_held_out: bytes) -> tuple[TokenBlock, TokenBlock, str]:
        """(those to learn, those held out, whose hashes are `last_held_out` and below, a note on
        how they were fitted)."""
        train: list[Document] = []
        held_out: list[Document] = []
        for key, documents in self.documents.items():
            (held_out if key <= last_held_out else train).extend(documents)
        blocks = [token_block.concatenate(side, self.tokenizer) for side in (train, held_out)]
        note = (
            f"{self.path}: {self.number(train):,} {self.unit} to learn and"
            f" {self.number(held_out):,} held out"
            f" ({self.counts}); {sum(map(len, blocks)):,} tokens, {self.counts.learnt_summary}"
        )
        return blocks[0], blocks[1], note


def last_held_out(sources: list[Chats]) -> bytes:
    """Chats with a hash up to this one are held out.

    One threshold serves all sources of a run, so that copies are on the same side. It is computed
    from all chats, whatever fits, so that phases of other contexts hold out the same. At least one
    chat of each source stays for training.
    """
    all_hashes = sorted(frozenset[bytes]().union(*(chats.hashes for chats in sources)))
    fitting = sorted(frozenset[bytes]().union(*(chats.documents for chats in sources)))
    share = round(text_files.HELD_OUT_SHARE * len(all_hashes))
    wanted = max(share, min(HELD_OUT, len(all_hashes) // 10), 1)
    threshold = max(all_hashes[wanted - 1], fitting[0])  # one that fits is held out at least
    limit = min(max(chats.documents) for chats in sources)  # for training, in some source
    if threshold < limit:
        return threshold
    below = [key for key in fitting if key < limit]
    return below[-1] if below else b""


def read_chats(path: str, tokenizer: Tokenizer, context: int, pairs: bool = False) -> Chats:
    """The chats or pairs of a file, directory or glob; UserError where a record is none, or none
    has an answer that fits."""
    template = chat_template.Template(tokenizer)
    counts = chat.PairCounts() if pairs else chat.Counts()
    form = inputs.ChatPair() if pairs else inputs.TextOrChat()
    documents: dict[bytes, list[Document]] = {}
    hashes = set()
    for sample in _samples(path, form):
        try:
            if pairs:
                encoded = _encode_pair(template, sample.content, context, counts)
                key = _hash(sample.content.shared or sample.content.chosen)
            else:
                document, outcome = template.encode_within(sample.content, context)
                counts.add(document, outcome, any(template.ending))
                encoded = [] if document is None else [document]
                key = _hash(sample.content)
        except Refused as error:
            raise UserError(f"{sample.where}: {error}; change it, or {form.way_out}") from None
        except UserError as error:
            raise UserError(f"{sample.where}: {error}") from None
        hashes.add(key)
        if encoded:
            documents.setdefault(key, []).extend(encoded)
    unit = "pairs" if pairs else "chats"
    if not hashes:
        raise UserError(f"{path!r} has no {unit}; {form.advice}")
    if not documents:
        raise UserError(
            f"{path!r}: its {counts.total():,} {unit} are all longer than the context of {context}"
            f" tokens or left out ({counts}); prompts and answers are never"
            " cut: give a longer context, or for those left out another chat template"
        )
    return Chats(path, unit, documents, frozenset(hashes), counts, tokenizer)


def _encode_pair(
    template: chat_template.Template, pair: chat.Pair, context: int, counts: chat.Counts
) -> list[Document]:
    """The documents of a pair, which fit into the context together; none where it is left out."""
    try:
        documents = [template.encode_chat(side) for side in (pair.chosen, pair.rejected)]
    except Incomplete as error:
        counts[str(error)] += 1
        return []
    if np.array_equal(documents[0].tokens, documents[1].tokens):
        counts[chat.IDENTICAL] += 1
        return []
    if sum(len(document.tokens) for document in documents) > context:
        counts[chat.DROPPED] += 1
        return []
    counts[chat.KEPT] += 1
    for document in documents:
        counts.add_learnt(document, any(template.ending))
    counts[chat.EMPTY] += any(
        all(turn.is_empty for turn in side[len(pair.shared) :])
        for side in (pair.chosen, pair.rejected)
    )
    return documents


def _hash(messages: list[chat.Message]) -> bytes:
    """Decides on which side a chat is, in all runs that there are: a test holds it."""
    calls = [message.extra_fields.get("tool_calls") for message in messages]
    content = repr(messages) + "".join(map(repr, filter(None, calls)))
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()


def read_whole(
    path: str, tokenizer: Tokenizer, context: int, pairs: bool = False
) -> tuple[TokenBlock, str]:
    """All chats or pairs of a file, directory or glob as one block, and a note on how many they
    are."""
    chats = read_chats(path, tokenizer, context, pairs)
    documents = list(itertools.chain.from_iterable(chats.documents.values()))
    note = f"{path}: {chats.number(documents):,} {chats.unit} to evaluate on ({chats.counts})"
    return token_block.concatenate(documents, tokenizer), note


def _samples(path: str, form: inputs.Form) -> Iterator[Sample]:
    """Every record; UserError where one is no chat or pair."""
    for _, file in text_files.files_for_memory(path):
        for piece in inputs.whole_file(str(file)):
            if piece.kind not in inputs.RECORDS:
                raise UserError(
                    f"config.data.chats is set, but {piece} is neither JSONL nor Parquet; name the"
                    f" files of chats with a glob; {form.advice}"
                )
            for sample in inputs.samples(piece, form):
                if isinstance(sample, inputs.BadInput):
                    raise UserError(f"{sample}; fix the record, or {form.way_out}")
                if isinstance(sample.content, str):
                    raise UserError(
                        f"{sample.where}: a text and no chat, but config.data.chats is set;"
                        f" {form.advice}"
                    )
                yield sample
