"""Tokenizers: text to ids and back, bound to no framework, stored in a workdir as plain files.

`load` takes "bytes", a `tokenizer.json`, a SentencePiece `.model`, or a directory that `save` wrote. Every
tokenizer has the same few attributes, so nothing behind this module asks which kind it has.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from zaya_jax.config import UserError

META_FILE = "zaya_tokenizer.json"

# The roles a special token plays in chats, and the names under which vocabularies have it, ours first.
CHAT_TOKENS = {
    "turn": ("<|turn|>", "<start_of_turn>", "<|im_start|>", "<|start_header_id|>"),
    "end_turn": ("<|end_turn|>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>"),
    "think": ("<think>", "<|think|>", "<|start_thinking|>"),
    "end_think": ("</think>", "<|end_think|>", "<|end_thinking|>"),
}
BOS_NAMES = ("<|bos|>", "<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]", "<|endoftext|>")
EOS_NAMES = ("<|eos|>", "<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[SEP]")
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")


class Tokenizer:
    """What all tokenizers share; a kind adds `encode`, `decode`, `_files` and `_id`."""

    kind: str
    vocab_size: int  # greatest id + 1
    bos_id: int
    eos_id: int
    pad_id: int
    sha256: str  # of everything that decides which ids a text becomes

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without begin or end of document."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens give nothing, broken UTF-8 gives replacement characters."""
        raise NotImplementedError

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of many texts, each as an array of `dtype`: the fast way for whole corpora."""
        return [np.asarray(self.encode(text), self.dtype) for text in texts]

    @property
    def dtype(self) -> type:
        """The smallest unsigned type that holds every id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def chat_token(self, role: str) -> list[int]:
        """The ids that mark `role` (see CHAT_TOKENS): one special id, or its name spelt out where there is
        none.
        """
        for name in CHAT_TOKENS[role]:
            found = self._id(name)
            if found is not None:
                return [found]
        return self.encode(CHAT_TOKENS[role][0])

    def save(self, directory: str | pathlib.Path) -> None:
        """Write the tokenizer as plain files; `load(directory)` gives an equal one."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._files().items():
            (directory / name).write_bytes(content)
        meta = {
            "kind": self.kind, "vocab_size": self.vocab_size, "bos_id": self.bos_id, "eos_id": self.eos_id,
            "pad_id": self.pad_id, "sha256": self.sha256,
        }  # fmt: skip
        (directory / META_FILE).write_text(json.dumps(meta, indent=2) + "\n")

    def _files(self) -> dict[str, bytes]:
        return {}

    def _id(self, name: str) -> int | None:
        raise NotImplementedError

    def _hash(self, content: bytes) -> str:
        ids = f"{self.kind} {self.bos_id} {self.eos_id} {self.pad_id}\n".encode()
        return hashlib.sha256(ids + content).hexdigest()


class Bytes(Tokenizer):
    """UTF-8 bytes as ids 0..255, then eight specials: a vocabulary of 264."""

    kind = "bytes"
    vocab_size, bos_id, eos_id, pad_id = 264, 256, 257, 258
    _specials: ClassVar = {
        "<|turn|>": 259,
        "<|end_turn|>": 260,
        "<think>": 261,
        "</think>": 262,
    }  # 263 is free

    def __init__(self) -> None:
        self.sha256 = self._hash(json.dumps(self._specials).encode())

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogatepass"))

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = (text.encode("utf-8", errors="surrogatepass") for text in texts)
        return [np.frombuffer(raw, np.uint8).astype(np.uint16) for raw in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def _id(self, name: str) -> int | None:
        return self._specials.get(name)


class HuggingFace(Tokenizer):
    """A `tokenizer.json`, run by the tokenizers library."""

    kind = "huggingface"

    def __init__(self, content: bytes, ids: dict[str, int], where: str) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"tokenizer {where} is not a Hugging Face tokenizer.json: {_one_line(error)}"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token stays text
        self._content = content
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"tokenizer {where} has an empty vocabulary; train it first")
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id, self.eos_id, self.pad_id = _special_ids(self._id, ids, where)
        self.sha256 = self._hash(content)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, self.dtype) for item in batch]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._content}

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)


class SentencePiece(Tokenizer):
    """A SentencePiece `.model` file."""

    kind = "sentencepiece"

    def __init__(self, content: bytes, ids: dict[str, int], where: str) -> None:
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise UserError(f"tokenizer {where} is not a SentencePiece model: {_one_line(error)}") from None
        self._content = content
        self.vocab_size = self._processor.GetPieceSize()
        own = {
            "bos_id": self._processor.bos_id(),
            "eos_id": self._processor.eos_id(),
            "pad_id": self._processor.pad_id(),
        }
        ids = {**{key: value for key, value in own.items() if value >= 0}, **ids}
        self.bos_id, self.eos_id, self.pad_id = _special_ids(self._id, ids, where)
        self.sha256 = self._hash(content)

    def encode(self, text: str) -> list[int]:
        return self._processor.EncodeAsIds(text)

    def decode(self, ids: Sequence[int]) -> str:
        skip = {self.bos_id, self.eos_id, self.pad_id}
        return self._processor.DecodeIds([int(i) for i in ids if int(i) not in skip])

    def _files(self) -> dict[str, bytes]:
        return {"tokenizer.model": self._content}

    def _id(self, name: str) -> int | None:
        found = self._processor.PieceToId(name)
        return None if found == self._processor.unk_id() else found


def load(spec: str | pathlib.Path) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", a tokenizer.json, a .model file, or a directory with either."""
    if str(spec) == "bytes":
        return Bytes()
    path = pathlib.Path(spec)
    if not path.exists():
        raise UserError(
            f"tokenizer {spec} does not exist; give bytes, a tokenizer.json, a .model file or a directory"
        )
    meta: dict[str, Any] = {}
    if path.is_dir():
        directory = path
        if (directory / META_FILE).exists():
            meta = _read_json(directory / META_FILE)
            if meta.get("kind") == "bytes":
                return Bytes()
        path = next(
            (directory / n for n in ("tokenizer.json", "tokenizer.model") if (directory / n).exists()), path
        )
        if path is directory:
            raise UserError(
                f"{directory} holds no tokenizer: expected {META_FILE}, tokenizer.json or tokenizer.model"
            )
        stored: dict[str, int] = {key: meta[key] for key in ("bos_id", "eos_id", "pad_id") if key in meta}
        ids = stored or _config_ids(directory, path)
    else:
        ids = _config_ids(path.parent, path)
    kind = SentencePiece if path.suffix == ".model" else HuggingFace
    tokenizer = kind(path.read_bytes(), ids, str(path))
    if "sha256" in meta and meta["sha256"] != tokenizer.sha256:
        raise UserError(
            f"{path} is not the file that {META_FILE} beside it describes (SHA-256 differs); restore it"
        )
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFace:
    """A byte-level BPE of exactly `vocab_size` ids (specials first) trained on `texts`: no text is
    unencodable.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    specials = [BOS_NAMES[0], EOS_NAMES[0], PAD_NAMES[0], *(names[0] for names in CHAT_TOKENS.values())]
    if vocab_size < 256 + len(specials):
        raise UserError(
            f"a BPE vocabulary of {vocab_size} is too small; bytes and specials take {256 + len(specials)}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"the input gives a BPE of only {tokenizer.get_vocab_size()} ids, {vocab_size} were asked for; "
            "give more text or a smaller vocabulary"
        )
    return HuggingFace(tokenizer.to_str().encode("utf-8"), {}, "trained here")


def _special_ids(lookup, given: dict[str, int], where: str) -> tuple[int, int, int]:
    def find(key: str, names: Sequence[str]) -> int | None:
        if key in given:
            return given[key]
        return next((found for found in map(lookup, names) if found is not None), None)

    bos, eos, pad = find("bos_id", BOS_NAMES), find("eos_id", EOS_NAMES), find("pad_id", PAD_NAMES)
    if bos is None and eos is None:
        raise UserError(
            f"tokenizer {where} has no begin- or end-of-document token under a known name "
            f"({', '.join(BOS_NAMES)}); "
            f"write its ids as bos_id, eos_id, pad_id into {META_FILE} beside it"
        )
    bos = eos if bos is None else bos
    eos = bos if eos is None else eos
    assert bos is not None and eos is not None
    return bos, eos, eos if pad is None else pad


def _config_ids(directory: pathlib.Path, path: pathlib.Path) -> dict[str, int]:
    """The ids that transformers' config.json beside a tokenizer file gives to begin, end and padding."""
    config = directory / "config.json"
    if path.name not in ("tokenizer.json", "tokenizer.model") or not config.exists():
        return {}
    keys = {"bos_id": "bos_token_id", "eos_id": "eos_token_id", "pad_id": "pad_token_id"}
    held = _read_json(config)
    return {ours: held[theirs] for ours, theirs in keys.items() if isinstance(held.get(theirs), int)}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not readable JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
