"""Where text comes from: the interpreter's own standard library, or a folder, file or glob of text files.

Everything here is deterministic: files come in the order of their relative paths, and a file is held out for
evaluation by the hash of that path alone, so that adding a file never moves another from one side to the
other.
"""

import dataclasses
import glob
import hashlib
import logging
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterable

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.data import pieces
from zaya_jax.data.tokenizers import Tokenizer

HELD_OUT_SHARE = 0.02
IN_MEMORY_LIMIT = 2 << 30  # bytes of text; above it a corpus belongs in prepared shards
NAMED = 3  # files left out that are named; the others are counted
SHARD = re.compile(r"(train|held_out)-\d{5,}\.(arrayrecord|tokens)")
UNFINISHED = "is a preparation that has not finished: the prepare_data command that began it continues"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A run of tokens with what training needs to know of each: all arrays have the same length."""

    tokens: np.ndarray  # unsigned
    targets: np.ndarray  # unsigned: the token after each (whatever it is where `learn` is false)
    starts: np.ndarray  # bool: a document begins here
    learn: np.ndarray  # bool: the target is real and belongs to what is to be learnt
    real: bool = True  # False: the tokens could not be read, padding takes their place

    @property
    def num_bytes(self) -> int:
        """Memory that the arrays take."""
        return self.tokens.nbytes + self.starts.nbytes + self.learn.nbytes  # targets share their memory

    def __len__(self) -> int:
        return len(self.tokens)


def list_files(path: str) -> list[tuple[str, pathlib.Path]]:
    """(name, path) of every text file that data.path names, ordered by name; "stdlib" is the standard
    library.
    """
    if path == "stdlib":
        root = stdlib()
        skip = {"site-packages", "dist-packages", "__pycache__"}
        found = [p for p in root.rglob("*.py") if not skip.intersection(p.relative_to(root).parts)]
    elif not path:
        raise UserError(
            "config.data.path is empty; give 'stdlib', a directory (. for this one), a file or a glob"
        )
    elif pathlib.Path(path).is_dir():
        root = pathlib.Path(path)
        found = walk(root)
    else:
        exact = pathlib.Path(path)
        found = [exact] if exact.is_file() else [pathlib.Path(p) for p in glob.glob(path, recursive=True)]
        found = [p for p in found if is_file(p)]
        root = pathlib.Path(*_common_parts(found)) if found else pathlib.Path()
    if (root / ".work" / "plan.json").exists():
        raise UserError(f"config.data.path={path!r} {UNFINISHED}")
    refuse_shards(
        found, f"config.data.path={path!r}", f"give its directory; one without manifest.json {UNFINISHED}"
    )
    if not found:
        raise UserError(
            f"config.data.path={path!r} holds no text file; give 'stdlib', a directory, a file or a glob"
        )
    return sorted((p.relative_to(root).as_posix(), p) for p in found)


def walk(root: pathlib.Path) -> list[pathlib.Path]:
    """Every file below a directory but hidden ones; UserError where a part of it cannot be listed."""

    def stop(error: OSError) -> None:
        raise UserError(f"cannot list {error.filename}: {error.strerror}; make it readable, or move it away")

    found: list[pathlib.Path] = []
    for folder, folders, names in os.walk(root, onerror=stop):
        here = pathlib.Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (here / name for name in names if not name.startswith("."))
        found += [path for path in files if is_file(path)]
    return found


def is_file(path: pathlib.Path) -> bool:
    """Whether a path is a file, or a link to what is missing, which must not vanish from the input unsaid."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def identity(path: str | os.PathLike) -> object:
    """What a file is under all of its names, links of both kinds among them."""
    try:
        found = os.stat(path)
    except OSError:  # a link to what is missing: whoever reads it says so
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


def refuse_shards(files: Iterable[pathlib.Path], what: str, way_out: str) -> None:
    """UserError where files that are to be read as text are a preparation's shards."""
    for path in files:
        if SHARD.match(path.name):
            raise UserError(f"{what} holds {path}, a shard of prepared tokens and no text; {way_out}")


def stdlib() -> pathlib.Path:
    """Where the interpreter's standard library lies."""
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def read_text(path: pathlib.Path) -> str | None:
    """The file's text, or None where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def held_out(name: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether the document of this name is kept for evaluation."""
    return _hash_share(name) < share


def text_corpus(path: str, tokenizer: Tokenizer) -> tuple[Bundle, Bundle]:
    """(training, held-out) tokens of a whole text corpus, in memory."""
    documents = named_texts(path)
    chosen = [held_out(name) for name, _ in documents]
    if len(documents) == 1:
        name, text = documents[0]
        cut = len(text) - max(1, round(len(text) * HELD_OUT_SHARE))
        documents, chosen = [(name, text[:cut] or text), (name, text[cut:])], [False, True]
    elif not any(chosen) or all(chosen):
        lowest = min(range(len(documents)), key=lambda i: _hash_share(documents[i][0]))
        chosen = [i == lowest for i in range(len(documents))]
    sides = []
    for side in (False, True):
        texts = [text for (_, text), out in zip(documents, chosen, strict=True) if out == side]
        sides.append(concatenate(pieces.encode_all(tokenizer, texts), tokenizer))
    return sides[0], sides[1]


def named_texts(path: str) -> list[tuple[str, str]]:
    """(name, text) of each document of a text corpus; files that are none are counted and said."""
    documents: list[tuple[str, str]] = []
    unreadable: list[str] = []
    empty = size = 0
    for name, file in list_files(path):
        try:
            size += file.stat().st_size
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        if size > IN_MEMORY_LIMIT:
            raise UserError(
                f"config.data.path={path!r} is above {IN_MEMORY_LIMIT >> 30} GiB of text, too much to "
                f"tokenise at every "
                "start; prepare it once with python -m experiments.prepare_data and give that directory"
            )
        text = read_text(file)
        if text is None:
            unreadable.append(name)
        elif not text.strip():
            empty += 1
        else:
            documents.append((name, text))
    if not documents:
        raise UserError(
            f"config.data.path={path!r} has files, but none with UTF-8 text; give a corpus with text in it"
        )
    if unreadable and path != "stdlib":  # its few files of other encodings are Python's tests
        _log.warning(
            "%s: left out %d of %d files that are not UTF-8 text (%s), and %d empty ones",
            path, len(unreadable), len(unreadable) + empty + len(documents),
            ", ".join([ascii(n)[1:-1] for n in unreadable[:NAMED]] + ["..."] * (len(unreadable) > NAMED)), empty,
        )  # fmt: skip
    records = [name for name, _ in documents if name.lower().endswith((".jsonl", ".ndjson"))]
    if records:
        _log.warning(
            "%s: %d of %d files are JSONL, taken as they stand with their braces and quotes (such as %s); prepare_data "
            "takes the text of their records, and data.chats their chats",
            path, len(records), len(documents), ascii(records[0])[1:-1],
        )  # fmt: skip
    return documents


def concatenate(documents: Iterable[np.ndarray], tokenizer: Tokenizer) -> Bundle:
    """One bundle of documents one after another, each between a begin and an end token."""
    documents = list(documents)
    lengths = np.array([len(d) + 2 for d in documents], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.empty(offsets[-1], tokenizer.dtype)
    for start, document in zip(offsets[:-1], documents, strict=True):
        tokens[start] = tokenizer.bos_id
        tokens[start + 1 : start + 1 + len(document)] = document
        tokens[start + 1 + len(document)] = tokenizer.eos_id
    starts = np.zeros(len(tokens), bool)
    starts[offsets[:-1]] = True
    return with_targets(tokens, starts)


def with_targets(
    tokens: np.ndarray,
    starts: np.ndarray,
    learn: np.ndarray | None = None,
    after: tuple[int, bool] | None = None,
) -> Bundle:
    """The bundle of tokens: each one's target is the next, unless a document starts there.

    `learn[i]` says whether token i is to be predicted (all of them by default); `after` is the token that follows
    the last one, and whether it is to be predicted, where the document goes on in another bundle.
    """
    both = np.zeros(len(tokens) + 1, tokens.dtype)  # tokens and targets are two views of it
    both[:-1] = tokens
    predicted = np.zeros(len(tokens), bool)
    predicted[:-1] = ~starts[1:] if learn is None else learn[1:] & ~starts[1:]
    if after is not None and len(tokens):
        both[-1], predicted[-1] = after
    return Bundle(both[:-1], both[1:], starts, predicted)


def _common_parts(files: list[pathlib.Path]) -> tuple[str, ...]:
    parents = [f.parent.parts for f in files]
    shared = 0
    while all(len(p) > shared and p[shared] == parents[0][shared] for p in parents):
        shared += 1
    return parents[0][:shared]


def _hash_share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64
