"""Tokenizers: text to ids and back, independent of any framework, stored in a workdir as plain
files.

`load` takes "bytes", a `tokenizer.json`, or a directory with one, such as `save` wrote. The
tokenizer of bytes is one like any other, only faster.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zaya_jax.config import Config, UserError, files, first_line

META_FILE = "zaya_tokenizer.json"
FILE = "tokenizer.json"
CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
TOOLS_FILE = "additional_chat_templates/tool_use.jinja"
EXTRA_FILES = (
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    TOOLS_FILE,
)

# The purposes of special tokens in chats, and the names under which vocabularies have each, ours
# first.
CHAT_TOKENS = {
    "turn": ("<|turn|>", "<start_of_turn>", "<|im_start|>", "<|start_header_id|>"),
    "end_turn": ("<|end_turn|>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>"),
    "think": ("<think>", "<|think|>", "<|start_thinking|>"),
    "end_think": ("</think>", "<|end_think|>", "<|end_thinking|>"),
}
BOS_NAMES = (
    "<|bos|>",
    "<bos>",
    "<s>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "[CLS]",
    "<|endoftext|>",
)
EOS_NAMES = ("<|eos|>", "<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[SEP]")
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")
ID_NAMES = {"bos_id": BOS_NAMES, "eos_id": EOS_NAMES, "pad_id": PAD_NAMES}

BYTES_CHAT_TOKENS = {"<|turn|>": 259, "<|end_turn|>": 260, "<think>": 261, "</think>": 262}

# Names of ids: those of transformers' and our models' configs, and those of tokenizers.
MODEL_IDS = {"bos_token_id": "bos_id", "eos_token_id": "eos_id", "pad_token_id": "pad_id"}


def utf8(text: str) -> bytes:
    """A text's bytes; UserError where it holds half of a surrogate pair, as JSON's \\u escapes can,
    which no tokenizer can spell."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text is not Unicode: character {error.start + 1:,} is"
            f" U+{ord(text[error.start]):04X}, half of a surrogate pair"
        ) from None


class Tokenizer:
    """A `tokenizer.json`, run by the tokenizers library, and its ids of begin, end and padding."""

    kind = "huggingface"
    bos_id: int
    eos_id: int
    pad_id: int

    def __init__(
        self,
        content: bytes,
        ids: dict[str, int],
        where: str,
        extra: Mapping[str, bytes] | None = None,
    ) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"tokenizer {where} is not a Hugging Face tokenizer.json: {first_line(error)}"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token stays text
        self.content = content
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.extra_files = extra or {}  # EXTRA_FILES, for other programs
        self._choose_ids(ids, where)
        # whether transformers would begin a text with BOS when encoding it
        self.adds_bos = self._tokenizer.encode("").ids[:1] == [self.bos_id]
        self.sha256 = self._hash(content)  # of everything that decides which ids a text becomes

    def __repr__(self) -> str:
        return f"<{self.kind} tokenizer of {self.vocab_size:,} ids, sha256 {self.sha256[:8]}>"

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without begin or end of document."""
        try:
            # the fast call leaves out the offsets of tokens
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions
            utf8(text)
            raise UserError(
                f"the tokenizer cannot encode {text[:40]!r}: {first_line(error)}"
            ) from None
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens give nothing, broken UTF-8 gives replacement
        characters."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def json(self) -> str:
        """The tokenizers library's tokenizer.json."""
        return self.content.decode("utf-8")

    def encode_document(self, text: str) -> np.ndarray:
        """The ids of a text between begin and end of document."""
        ids = self.encode(text)
        document: np.ndarray = np.empty(len(ids) + 2, self.dtype)
        document[0] = self.bos_id
        document[1:-1] = ids
        document[-1] = self.eos_id
        return document

    @property
    def dtype(self) -> type:
        """The smallest unsigned type that holds every id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def chat_special_text(self, purpose: str) -> str:
        """The name of the special id for a purpose (see CHAT_TOKENS), or our name where there is no
        such id, which is then spelt out as text."""
        names = CHAT_TOKENS[purpose]
        return next((name for name in names if self.special_id(name) is not None), names[0])

    def special_text(self, token: int) -> str:
        """The name of a special id, as a chat template spells it."""
        return self._tokenizer.id_to_token(token) or ""

    def special_id(self, name: str) -> int | None:
        """The id of a special token; None where the vocabulary has none of this name."""
        return self._tokenizer.token_to_id(name)

    def decode_with_specials(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones by their names."""
        return self._specials_tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_with_specials(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, the characters of each) of a text in which the names of special ids stand for
        these, as a template writes it."""
        encoding = self._specials_tokenizer.encode(utf8(text).decode(), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @functools.cached_property
    def _specials_tokenizer(self) -> Any:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self.json())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @functools.cached_property
    def specials(self) -> frozenset[int]:
        """The special ids: no text is encoded with them, and they decode to nothing."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @property
    def has_own_pad_id(self) -> bool:
        """Whether the padding id stands for nothing else: no text or chat ever has it."""
        others = {
            self.bos_id,
            self.eos_id,
            *(self.special_id(name) for names in CHAT_TOKENS.values() for name in names),
        }
        return self.pad_id not in others and self.pad_id in self.specials

    def save(self, directory: str | pathlib.Path) -> None:
        """Write the tokenizer as plain files; `load(directory)` gives an equal one."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in {**self.extra_files, FILE: self.content}.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        meta = {
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
            "sha256": self.sha256,
        }
        (directory / META_FILE).write_text(json.dumps(meta, indent=2) + "\n")

    def _hash(self, content: bytes) -> str:
        ids = f"{self.kind} {self.bos_id} {self.eos_id} {self.pad_id}\n".encode()
        return hashlib.sha256(ids + content).hexdigest()

    def _choose_ids(self, ids_beside: Mapping[str, int], where: str) -> None:
        """Sets the ids of begin, end and padding: those that files beside the tokenizer give, or
        else those of the names that its config gives, or of a known name; UserError where there are
        none."""
        configured = special_names(self.extra_files)
        ids: dict[str, int | None] = {}
        for theirs, ours in MODEL_IDS.items():
            names = [configured.get(theirs.removesuffix("_id")) or "", *ID_NAMES[ours]]
            candidates = [ids_beside.get(ours), *map(self.special_id, names)]
            ids[ours] = next((id_ for id_ in candidates if id_ is not None), None)
        end = ids["bos_id"] if ids["eos_id"] is None else ids["eos_id"]
        if end is None:
            raise UserError(
                f"tokenizer {where} has no begin- or end-of-document token under a known name "
                f"({', '.join(BOS_NAMES)}); "
                f"write its ids as bos_id, eos_id, pad_id into {META_FILE} next to it, and name the"
                f" file {FILE}"
            )
        for key, value in ids.items():
            chosen = end if value is None else value
            if type(chosen) is not int or not 0 <= chosen < self.vocab_size:
                raise UserError(
                    f"tokenizer {where} has ids below {self.vocab_size:,}, but {key}={chosen!r} in"
                    f" {META_FILE} or config.json next to it; write the right one into {META_FILE},"
                    f" and name the file {FILE}"
                )
            setattr(self, key, chosen)


class Bytes(Tokenizer):
    """UTF-8 bytes as ids 0..255, then eight specials: a vocabulary of 264."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__(_bytes_json(), {}, "bytes")
        self.sha256 = self._hash(json.dumps(BYTES_CHAT_TOKENS).encode())

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def encode_document(self, text: str) -> np.ndarray:
        ends: np.ndarray = np.array([self.bos_id, self.eos_id], self.dtype)
        return np.insert(ends, 1, np.frombuffer(utf8(text), np.uint8))


@functools.cache
def _bytes_json() -> bytes:
    """A BPE of bytes that merges nothing."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # GPT-2's names of bytes: printable characters, and U+0100 and on for the others
    vocabulary: dict[str, int] = {}
    others = itertools.count(0x100)
    for byte in range(256):
        printable = chr(byte).isprintable() and byte not in (0x20, 0xAD)
        vocabulary[chr(byte if printable else next(others))] = byte
    names = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258, **BYTES_CHAT_TOKENS, "<|unused|>": 263}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary | names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in names]
    )
    return _with_bos(tokenizer).to_str().encode()


def load(spec: str | pathlib.Path) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", a tokenizer.json, or a directory with one."""
    if str(spec) == "bytes":
        return Bytes()
    path = pathlib.Path(spec)
    if not path.exists():
        raise UserError(
            f"tokenizer {spec} does not exist; give bytes, a tokenizer.json or a directory"
        )
    directory = path.parent
    if path.is_dir():
        directory, path = path, path / FILE
    meta: dict[str, Any] = {}
    if path.name == FILE and (directory / META_FILE).exists():
        meta = files.read_object(directory / META_FILE)
    if meta.get("kind") == "bytes":
        return Bytes()
    if path.suffix == ".model" or not path.exists():
        raise UserError(
            f"{directory} holds no {META_FILE} or {FILE}; of a SentencePiece model transformers"
            " writes the latter:"
            f" AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained(FOLDER)"
        )
    ids = {key: meta[key] for key in MODEL_IDS.values() if key in meta} or _config_ids(directory)
    try:
        extra = {
            name: (directory / name).read_bytes()
            for name in EXTRA_FILES
            if (directory / name).is_file()
        }
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer {path} cannot be read: {error.strerror}") from None
    tokenizer = Tokenizer(content, ids, str(path), extra)
    if "sha256" in meta and meta["sha256"] != tokenizer.sha256:
        raise UserError(
            f"{path} is not the file that {META_FILE} next to it describes (SHA-256 differs);"
            " restore it"
        )
    return tokenizer


def read_tokenizer_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if it is missing or unreadable."""
    try:
        settings = json.loads(files.get(CONFIG_FILE, b"{}"))
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}


def special_names(files: Mapping[str, bytes]) -> dict[str, str | None]:
    """The names that tokenizer_config.json gives to special tokens, such as "eos_token"; None for
    one that it says is missing."""
    names: dict[str, str | None] = {}
    for key, value in read_tokenizer_config(files).items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str | None):
            names[key] = value
    return names


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` ids, specials first, trained on `texts`: it encodes
    any text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    specials = [
        BOS_NAMES[0],
        EOS_NAMES[0],
        PAD_NAMES[0],
        *(names[0] for names in CHAT_TOKENS.values()),
    ]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise UserError(
            f"the input gives a BPE of {size} ids, {vocab_size} were asked for; ask for {size}, or"
            " give more text"
        )
    return Tokenizer(_with_bos(tokenizer).to_str().encode("utf-8"), {}, "trained here")


def _with_bos(tokenizer: Any) -> Any:
    """The tokenizer, which now begins each text with BOS in other programs, as training does."""
    from tokenizers import processors

    name = BOS_NAMES[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A",
        pair=f"{name} $A $B",
        special_tokens=[(name, tokenizer.token_to_id(name))],
    )
    return tokenizer


def with_model_ids(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with the tokenizer's ids where it leaves them open (None); UserError where it has
    other ids.

    The model never learns the embedding row of its padding id (`zaya.Embedding`). So where the
    tokenizer pads with a token that has another use too (the end of documents or of a turn, a
    character), the model has no padding id.
    """
    ids: dict[str, Any] = {ours: getattr(tokenizer, theirs) for ours, theirs in MODEL_IDS.items()}
    if not tokenizer.has_own_pad_id:
        ids["pad_token_id"] = None
    for key, expected in ids.items():
        configured = getattr(config.model, key)
        if configured not in (None, expected):
            has = "no token of its own for it" if expected is None else str(expected)
            raise UserError(
                f"config.model.{key}={configured}, but tokenizer {config.data.tokenizer} has {has};"
                " leave the key at its default None, which takes the tokenizer's"
            )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **ids))


def _config_ids(directory: pathlib.Path) -> dict[str, int]:
    """The ids that transformers' config.json next to a tokenizer file gives to begin, end and
    padding."""
    config = directory / "config.json"
    if not config.exists():
        return {}
    content = files.read_object(config)
    ids: dict[str, int] = {}
    for theirs, ours in MODEL_IDS.items():
        value = content.get(theirs)
        if isinstance(value, list) and value:  # Gemma has several ends
            value = value[0]
        if isinstance(value, int) and value >= 0:  # some write -1 for none
            ids[ours] = value
    return ids
