"""Reads chats that need no preparing: JSONL or Parquet to documents that fit the context, some of
them held out.

A record that is no chat ends the run in one line that names file and line, before anything is
compiled; a preparation (`experiments.prepare_data`) can leave such records out. Everything is in
memory: prepare large sets.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator

from zaya_jax.config import UserError
from zaya_jax.text import chat, chat_template, inputs, text_files, token_block
from zaya_jax.text.inputs import Sample
from zaya_jax.text.token_block import Document, TokenBlock
from zaya_jax.text.tokenizers import Tokenizer

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

    def split(self, last_held_out: bytes) -> tuple[TokenBlock, TokenBlock, str]:
        """(those to learn, those held out, whose hashes are `last_held_out` and below, a note on
        how they were fitted)."""
        train: list[Document] = []
        held_out: list[Document] = []
        for key, documents in self.documents.items():
            (held_out if key <= last_held_out else train).extend(documents)
        blocks = [token_block.concatenate(side, self.tokenizer) for side in (train, held_out)]
        note = (
            f"{self.path}: {len(train):,} chats to learn and {len(held_out):,} held out"
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


def read_chats(path: str, tokenizer: Tokenizer, context: int) -> Chats:
    """The chats of a file, directory or glob; UserError where one is none, or none has an answer
    that fits."""
    template, counts = chat_template.Template(tokenizer), chat.Counts()
    documents: dict[bytes, list[Document]] = {}
    hashes = set()
    for sample in _samples(path):
        assert isinstance(sample.content, list)
        try:
            document, outcome = template.encode_within(sample.content, context)
        except UserError as error:
            raise UserError(f"{sample.where}: {error}") from None
        counts.add(document, outcome, any(template.ending))
        key = _hash(sample.content)
        hashes.add(key)
        if document is not None:
            documents.setdefault(key, []).append(document)
    if not hashes:
        raise UserError(f"{path!r} has no chat; give records with a list of turns under {FIELDS}")
    if not documents:
        raise UserError(
            f"{path!r}: its {counts.total():,} chats are all longer than the context of {context}"
            f" tokens or left out ({counts}); prompts and answers are never"
            " cut: give a longer context, or for chats left out another chat template"
        )
    return Chats(path, documents, frozenset(hashes), counts, tokenizer)


def _hash(messages: list[chat.Message]) -> bytes:
    """Decides on which side a chat is, in all runs that there are: a test holds it."""
    calls = [message.extra_fields.get("tool_calls") for message in messages]
    content = repr(messages) + "".join(map(repr, filter(None, calls)))
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()


def read_whole(path: str, tokenizer: Tokenizer, context: int) -> tuple[TokenBlock, str]:
    """All chats of a file, directory or glob as one block, and a note on how many they are."""
    chats = read_chats(path, tokenizer, context)
    documents = list(itertools.chain.from_iterable(chats.documents.values()))
    note = f"{path}: {len(documents):,} chats to evaluate on ({chats.counts})"
    return token_block.concatenate(documents, tokenizer), note


def _samples(path: str) -> Iterator[Sample]:
    """Every record; UserError where one is no chat."""
    for _, file in text_files.files_for_memory(path):
        for piece in inputs.whole_file(str(file)):
            if piece.kind not in inputs.RECORDS:
                raise UserError(
                    f"config.data.chats is set, but {piece} is neither JSONL nor Parquet; give"
                    f" records with a list of turns under {FIELDS}"
                )
            for sample in inputs.samples(piece, "text"):
                if isinstance(sample, inputs.BadInput):
                    raise UserError(
                        f"{sample}; fix the record, or use prepare_data with --skip_bad to skip it"
                    )
                if not isinstance(sample.content, list):
                    raise UserError(
                        f"{sample.where}: a text and no chat, but config.data.chats is set; give a"
                        f" list of turns under {FIELDS}"
                    )
                yield sample
