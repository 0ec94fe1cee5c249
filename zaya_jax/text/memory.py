"""Reads what needs no preparing when a run starts: text, chats or pairs of chats, in the forms that
`inputs` reads, to documents in memory, some of them held out.

Of texts, what cannot be read is left out and said. A record that is no chat ends the run in one
line that names file and line, before anything is compiled; a preparation
(`experiments.prepare_data`) can leave such records out. Prepare large sets.
"""

import collections
import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterator

import numpy as np

from zaya_jax.config import UserError, fields
from zaya_jax.text import chat, chat_template, inputs, text_files, token_block
from zaya_jax.text.answer_spans import Incomplete
from zaya_jax.text.inputs import BadInput, Sample
from zaya_jax.text.token_block import Document, TokenBlock, encode_texts
from zaya_jax.text.tokenizers import Tokenizer

LIMIT = 2 << 30  # bytes of files; above it a corpus belongs in prepared shards
EXAMPLES = 3  # of what is left out; the rest is counted
HELD_OUT = 64  # chats at least, unless that is more than a tenth of all; then the tenth
UNITS = {False: "chats", True: "pairs"}
_log = logging.getLogger(__name__)


def split_texts(path: str, tokenizer: Tokenizer) -> tuple[TokenBlock, TokenBlock]:
    """(training, held-out) tokens of all texts of a path."""
    documents = named_texts(path)
    if len(documents) == 1:
        ((_, text),) = documents
        cut = len(text) - max(1, round(len(text) * text_files.HELD_OUT_SHARE))
        return encode_texts([text[:cut] or text], tokenizer), encode_texts([text[cut:]], tokenizer)
    names = [name for name, _ in documents]
    held_out = {name for name in names if text_files.hash_below(name, text_files.HELD_OUT_SHARE)}
    if len(held_out) in (0, len(documents)):
        held_out = {min(names, key=text_files.name_hash)}
    return (
        encode_texts([text for name, text in documents if name not in held_out], tokenizer),
        encode_texts([text for name, text in documents if name in held_out], tokenizer),
    )


def named_texts(path: str) -> list[tuple[str, str]]:
    """(name, text) of each document of a path; what is no text is counted and reported."""
    documents: list[tuple[str, str]] = []
    left_out: list[str] = []
    for sample in _samples(path, inputs.TextOrChat()):
        if isinstance(sample, BadInput):
            left_out.append(str(sample))
        elif not isinstance(sample.content, str):
            raise UserError(
                f"{sample.where}: a chat; set config.data.chats=True to learn its answers, or"
                " prepare chats and texts together with python -m experiments.prepare_data"
            )
        elif sample.content.strip():
            documents.append((sample.name, sample.content))
    examples = "; ".join(left_out[:EXAMPLES])
    if not documents:
        raise UserError(
            f"{path!r} has files, but none with text ({examples or 'all empty'});"
            " give a corpus with text in it"
        )
    if left_out and path != "stdlib":  # there, some of Python's tests have other encodings
        _log.warning(
            "%s: left out %d files or records that are no text, such as %s",
            path,
            len(left_out),
            examples,
        )
    return documents


@dataclasses.dataclass(frozen=True)
class Chats:
    """The chats of a path that fit, by the hash of what they say; of pairs, of their prompt.

    The two documents of a pair follow one another, the better answer first.
    """

    path: str
    are_pairs: bool
    documents: dict[bytes, list[Document]]
    hashes: frozenset[bytes]  # of those that do not fit, too
    counts: collections.Counter[str]
    tokenizer: Tokenizer

    def number(self, documents: list[Document]) -> str:
        """How many chats or pairs these documents are."""
        return f"{len(documents) // (2 if self.are_pairs else 1):,}"

    def split(self, last_held_out: bytes) -> tuple[TokenBlock, TokenBlock, str]:
        """(those to learn, those held out, whose hashes are `last_held_out` and below, a note on
        how they were fitted)."""
        train: list[Document] = []
        held_out: list[Document] = []
        for key, documents in self.documents.items():
            (held_out if key <= last_held_out else train).extend(documents)
        blocks = [token_block.concatenate(side, self.tokenizer) for side in (train, held_out)]
        note = (
            f"{self.path}: {self.number(train)} {UNITS[self.are_pairs]} to learn and"
            f" {self.number(held_out)} held out, {sum(map(len, blocks)):,} tokens"
            f" ({chat.in_words(self.counts)})"
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
    counts = collections.Counter[str]()
    form = inputs.ChatPair() if pairs else inputs.TextOrChat()
    documents: dict[bytes, list[Document]] = {}
    hashes = set()
    for sample in _chats(path, form):
        with fields.naming(sample.where):
            if pairs:
                encoded, outcome = _encode_pair(template, sample.content, context)
                key = _hash(sample.content.shared or sample.content.chosen)
            else:
                document, outcome = template.encode_within(sample.content, context)
                encoded = [] if document is None else [document]
                key = _hash(sample.content)
        hashes.add(key)
        counts[outcome] += 1
        for document in encoded:
            counts.update(document.counts)
        if encoded:
            documents.setdefault(key, []).extend(encoded)
    if not hashes:
        raise UserError(f"{path!r} has no {UNITS[pairs]}; {form.wanted}")
    if not documents:
        raise UserError(
            f"{path!r}: its {UNITS[pairs]} are all longer than the context of {context}"
            f" tokens or left out ({chat.in_words(counts)}); prompts and answers are never"
            " cut: give a longer context, or for those left out another chat template"
        )
    return Chats(path, pairs, documents, frozenset(hashes), counts, tokenizer)


def _encode_pair(
    template: chat_template.Template, pair: chat.Pair, context: int
) -> tuple[list[Document], str]:
    """(the documents of a pair, none where it is left out; how it fits into the context)."""
    try:
        documents = [template.encode_chat(side) for side in (pair.chosen, pair.rejected)]
    except Incomplete as error:
        return [], str(error)
    if np.array_equal(documents[0].tokens, documents[1].tokens):
        return [], "identical"
    if sum(len(document.tokens) for document in documents) > context:
        return [], chat.DROPPED
    return documents, chat.KEPT


def _hash(messages: list[chat.Message]) -> bytes:
    """The hash that decides whether a chat is held out. It must stay as it is (a test holds it), or
    runs that go on would learn chats that they have held out."""
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
    note = (
        f"{path}: {chats.number(documents)} {UNITS[pairs]} to evaluate on"
        f" ({chat.in_words(chats.counts)})"
    )
    return token_block.concatenate(documents, tokenizer), note


def _chats(path: str, form: inputs.Form) -> Iterator[Sample]:
    """Every record; UserError where one is no chat or pair."""
    for sample in _samples(path, form):
        if isinstance(sample, BadInput):
            raise UserError(f"{sample}; fix it, or {form.way_out}")
        if isinstance(sample.content, str):
            raise UserError(
                f"{sample.where}: a text and no chat, but config.data.chats is set; name the files"
                " of chats with a glob"
            )
        yield sample


def _samples(path: str, form: inputs.Form) -> Iterator[Sample | BadInput]:
    """What `inputs` reads of the files of a path; UserError where they are too large to be read at
    every start."""
    total = 0
    for name, file in text_files.list_files(path):
        whole = inputs.whole_file(str(file), name)
        total += whole.cost
        if total > LIMIT:
            raise UserError(
                f"{path!r} is above {LIMIT >> 30} GiB, too much to tokenise at every start;"
                " prepare it once with python -m experiments.prepare_data and give that directory"
            )
        yield from inputs.samples(whole, form)
