"""Reads text that needs no preparing: the interpreter's standard library, or a folder, file or glob
of text files.

Everything here is deterministic: files come in the order of their relative paths, and a file is
held out for evaluation by a hash of that path. So in a folder, adding a file moves no other one to
the other side, as long as the hash of one at least holds it out. (Paths are relative to the folder,
or for a glob to the deepest folder that has all of its files.)
"""

import collections
import dataclasses
import fnmatch
import glob
import hashlib
import json
import logging
import os
import pathlib
import re
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.text import tokenizers
from zaya_jax.text.tokenizers import Tokenizer

HELD_OUT_SHARE = 0.02
IN_MEMORY_LIMIT = 2 << 30  # bytes of text; above it a corpus belongs in prepared shards
# bytes of a file that is one text: while it is encoded, a token takes 420 to 490 bytes
LONGEST = 256 << 20
TOO_LONG = (
    f"has more than {LONGEST >> 20} MiB, too many for one document; split it, or make a JSONL file"
    " of it"
)
NAMED = 3  # files left out that are named; the others are counted
# What a file holds, by its suffix without that of a compression; others are text.
KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys((".7z", ".a", ".cpio", ".jar", ".rar", ".tar", ".tgz", ".warc"), "archive"),
    ".zip": "archive",
    **dict.fromkeys((".br", ".bz2", ".lz", ".lz4", ".lzma", ".xz", ".z"), "otherwise compressed"),
    **dict.fromkeys((".csv", ".tsv"), "table"),
}
COMPRESSION = (".gz", ".zst")
SHARD = re.compile(r"(train|held_out)-\d{5,}\.(arrayrecord|tokens)")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A run of tokens with their targets and flags: all arrays have the same length."""

    tokens: np.ndarray  # unsigned
    targets: np.ndarray  # unsigned: the token after each (whatever it is where `learn` is false)
    starts: np.ndarray  # bool: a document begins here
    learn: np.ndarray  # bool: the target is real and is to be learnt
    real: bool = True  # False: the tokens could not be read, padding takes their place

    def __len__(self) -> int:
        return len(self.tokens)


def list_files(path: str) -> list[tuple[str, pathlib.Path]]:
    """(name, path) of every text file that data.path names, ordered by name; "stdlib" is the
    standard library."""
    found = find(path)
    if path == "stdlib":
        root = stdlib()
    elif pathlib.Path(path).is_dir():
        root = pathlib.Path(path)
    else:
        root = pathlib.Path(os.path.commonpath([file.parent for file in found]) if found else "")
    refuse_shards(
        found, path, "give its directory, or continue its preparation if that has not finished"
    )
    if not found:
        raise UserError(
            f"{path!r} holds no text file; give 'stdlib', a directory, a file or a glob"
        )
    return sorted((p.relative_to(root).as_posix(), p) for p in found)


def find(pattern: str) -> list[pathlib.Path]:
    """The files that a path, a directory, a glob or "stdlib" names, each once.

    Links to files and folders are followed, and a file with several names counts once, under its
    own name rather than a link's. Hidden names are left out, unless the pattern spells them.
    """
    names: Iterator[pathlib.Path]
    if pattern == "stdlib":
        skip = ("site-packages", "dist-packages", "__pycache__")
        names = (path for folder in _folders(stdlib(), skip) for path in _entries(folder))
        names = (path for path in names if path.suffix == ".py")
    elif os.path.isdir(pattern):
        names = (path for folder in _folders(pathlib.Path(pattern)) for path in _entries(folder))
    elif os.path.lexists(pattern):
        names = iter([pathlib.Path(pattern)])
    else:
        names = _expand(pathlib.Path(), pathlib.Path(pattern).parts)
    # A dangling link must not vanish silently from the input: reading it will fail.
    found = [path for path in names if path.is_file() or (path.is_symlink() and not path.exists())]
    return once(_data_of_saved(pattern, found))


def _data_of_saved(pattern: str, paths: list[pathlib.Path]) -> list[pathlib.Path]:
    """Of a folder that `datasets` saved, the files that its state.json names: it keeps results of
    `map` and `filter` beside them. UserError where it is a dict of several splits."""
    found, splits = set(paths), collections.Counter[pathlib.Path]()
    for folder in sorted({path.parent for path in paths if kind_of(path.name) != "text"}):
        try:
            state = json.loads((folder / "state.json").read_bytes())
            named = {folder / file["filename"] for file in state["_data_files"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # `datasets` did not save it
        splits[folder.parent] += (folder.parent / "dataset_dict.json").exists()
        if splits[folder.parent] > 1:
            raise UserError(
                f"{pattern} has several splits of the DatasetDict {folder.parent}; name one, such"
                f" as {folder}"
            )
        # Where the whole folder is meant, a file that is not there fails when it is to be read.
        data = named if folder / "state.json" in found else named & found
        found = {path for path in found if path.parent != folder} | data
        found.discard(folder.parent / "dataset_dict.json")
    return sorted(found)


def once(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """One name for each file, that of no link where there is one."""
    names: dict[object, list[pathlib.Path]] = {}
    for path in paths:
        names.setdefault(identity(path), []).append(path)

    def rank(path: pathlib.Path) -> tuple:
        return path.is_symlink(), os.path.realpath(path) != os.path.abspath(path), path

    return sorted(
        min(several, key=rank) if len(several) > 1 else several[0] for several in names.values()
    )


def _folders(root: pathlib.Path, skip: Collection[str] = ()) -> Iterator[pathlib.Path]:
    """A folder and all below it, each once; those that links lead to come last, under the link's
    name."""
    seen: set[object] = set()
    waiting, linked = collections.deque([root]), collections.deque[pathlib.Path]()
    while waiting or linked:
        here = (waiting or linked).popleft()
        if (own := identity(here)) in seen:
            continue
        seen.add(own)
        yield here
        for path in _entries(here):
            if path.is_dir() and path.name not in skip:
                (linked if path.is_symlink() else waiting).append(path)


def _entries(folder: pathlib.Path, hidden: bool = False) -> list[pathlib.Path]:
    """The entries of a folder, sorted; UserError where it cannot be listed."""
    try:
        return sorted(
            folder / name for name in os.listdir(folder) if hidden or not name.startswith(".")
        )
    except OSError as error:
        raise UserError(
            f"cannot list {folder}: {error.strerror}; make it readable, or move it away"
        ) from None


def _expand(place: pathlib.Path, parts: Sequence[str]) -> Iterator[pathlib.Path]:
    """The paths that the parts of a glob name below a place."""
    if not parts:
        yield place
        return
    head, *rest = parts
    if not glob.has_magic(head):
        yield from _expand(place / head, rest)
    elif head == "**":
        for folder in _folders(place) if place.is_dir() else ():
            yield from _expand(folder, rest or ["*"])
    elif place.is_dir():
        for path in _entries(place, hidden=head.startswith(".")):
            if fnmatch.fnmatchcase(path.name, head):
                yield from _expand(path, rest)


def kind_of(name: str) -> str:
    """The kind of content by a file's name: text, jsonl, parquet, arrow, or one that is not read."""
    name = name.lower()
    for suffix in COMPRESSION:
        name = name.removesuffix(suffix)
    return KINDS.get(pathlib.Path(name).suffix, "text")


def identity(path: str | os.PathLike) -> object:
    """The identity of a file, the same under all of its names, symbolic and hard links included."""
    try:
        found = os.stat(path)
    except OSError:  # a dangling link: reading it will fail with its name
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


def identities(path: str) -> dict[object, pathlib.Path]:
    """The files of `list_files` by their identity."""
    return {identity(file): file for _, file in list_files(path)}


def refuse_shards(files: Iterable[pathlib.Path], what: str, way_out: str) -> None:
    """UserError where files that are to be read as text are a preparation's shards."""
    for path in files:
        if SHARD.fullmatch(path.name):
            raise UserError(
                f"{what} holds {path}, a shard of prepared tokens and no text; {way_out}"
            )


def stdlib() -> pathlib.Path:
    """Where the interpreter's standard library lies."""
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def stamp(path: str) -> tuple:
    """Names, sizes and times of a corpus's files, to tell whether they changed."""
    return tuple((name, *_stat(file)) for name, file in list_files(path))


def _stat(path: pathlib.Path) -> tuple:
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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
        sides.append(concatenate(tokenizers.encode_texts(tokenizer, texts), tokenizer))
    return sides[0], sides[1]


def files_for_memory(path: str) -> Iterator[tuple[str, pathlib.Path]]:
    """The files of `list_files`, one after another; UserError where they are too large to be read
    at every start."""
    total = 0
    for name, file in list_files(path):
        total += _stat(file)[2]
        if total > IN_MEMORY_LIMIT:
            raise UserError(
                f"{path!r} is above {IN_MEMORY_LIMIT >> 30} GiB, too much to"
                " tokenise at every start; prepare it once with python -m experiments.prepare_data"
                " and give that directory"
            )
        yield name, file


def named_texts(path: str) -> list[tuple[str, str]]:
    """(name, text) of each document of a text corpus; files that are none are counted and said."""
    documents: list[tuple[str, str]] = []
    unreadable: list[str] = []
    for name, file in files_for_memory(path):
        kind = kind_of(name)
        if kind in ("text", "jsonl"):
            if file.stat().st_size > LONGEST:
                raise UserError(f"{path!r}: {name} {TOO_LONG}")
            raw = file.read_bytes()
            try:
                text = raw.decode("utf-8-sig")
                kind = "binary" if b"\0" in raw else ""
            except UnicodeDecodeError:
                kind = "not UTF-8"
        if kind:
            unreadable.append(f"{ascii(name)[1:-1]} ({kind})")
        elif text.strip():
            documents.append((name, text))
    named = ", ".join(unreadable[:NAMED])
    if not documents:
        raise UserError(
            f"{path!r} has files, but none with UTF-8 text ({named or 'all empty'});"
            " give a corpus with text in it, or prepare it once with python -m"
            " experiments.prepare_data"
        )
    if unreadable and path != "stdlib":  # its few files of other encodings are Python's tests
        _log.warning(
            "%s: left out %d files that are not UTF-8 text, such as %s",
            path,
            len(unreadable),
            named,
        )
    records = [name for name, _ in documents if name.lower().endswith((".jsonl", ".ndjson"))]
    if records:
        _log.warning(
            "%s: %d of %d files are JSONL, taken as they stand with their braces and quotes (such"
            " as %s); prepare_data takes the text of their records, and data.chats their chats",
            path,
            len(records),
            len(documents),
            ascii(records[0])[1:-1],
        )
    return documents


def concatenate(
    documents: Sequence[np.ndarray], tokenizer: Tokenizer, learn: Sequence[np.ndarray] | None = None
) -> Bundle:
    """One bundle of documents one after another, each with its begin and end token."""
    lengths = [len(d) for d in documents]
    starts = np.zeros(sum(lengths), bool)
    starts[np.cumsum([0, *lengths])[:-1]] = True
    tokens = np.concatenate([np.empty(0, tokenizer.dtype), *documents])
    flags = None if learn is None else np.concatenate([np.empty(0, bool), *learn])
    return with_targets(tokens, starts, flags)


def with_targets(
    tokens: np.ndarray,
    starts: np.ndarray,
    learn: np.ndarray | None = None,
    after: tuple[int, bool] | None = None,
) -> Bundle:
    """The bundle of tokens: each one's target is the next, unless a document starts there.

    `learn[i]` says whether token i is to be predicted (all of them by default); `after` is the
    token that follows the last one, and whether it is to be predicted, where the document goes on
    in another bundle.
    """
    both = np.zeros(len(tokens) + 1, tokens.dtype)  # tokens and targets are two views of it
    both[:-1] = tokens
    predicted = np.zeros(len(tokens), bool)
    predicted[:-1] = ~starts[1:] if learn is None else learn[1:] & ~starts[1:]
    if after is not None and len(tokens):
        both[-1], predicted[-1] = after
    return Bundle(both[:-1], both[1:], starts, predicted)


def _hash_share(name: str) -> float:
    return (
        int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")
        / 2**64
    )
