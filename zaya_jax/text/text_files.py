"""Finds input files: the interpreter's standard library, or a folder, file or glob.

Everything here is deterministic: files come in the order of their relative paths, and a file is
held out for evaluation by a hash of that path. So in a folder, adding a file moves no other one to
the other side, as long as the hash of one at least holds it out. (Paths are relative to the folder,
or for a glob to the deepest folder that has all of its files.)
"""

import collections
import fnmatch
import glob
import hashlib
import json
import os
import pathlib
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence

from zaya_jax.config import UserError

HELD_OUT_SHARE = 0.02
# bytes of a file that is one text: while it is encoded, a token takes 420 to 490 bytes
LONGEST_TEXT = 256 << 20
TOO_LONG = (
    f"has more than {LONGEST_TEXT >> 20} MiB, too many for one document; split it, or make a JSONL file"
    " of it"
)
# What a file holds, by its suffix without that of a compression; others are text.
FILE_KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys((".7z", ".a", ".cpio", ".jar", ".rar", ".tar", ".tgz", ".warc"), "archive"),
    ".zip": "archive",
    **dict.fromkeys((".br", ".bz2", ".lz", ".lz4", ".lzma", ".xz", ".z"), "otherwise compressed"),
    **dict.fromkeys((".csv", ".tsv"), "table"),
    ".tokens": "prepared tokens",
}
COMPRESSION = (".gz", ".zst")
HUB_PREFIX = "hf:"


def list_files(path: str) -> list[tuple[str, pathlib.Path]]:
    """(name, path) of every text file that data.path names, ordered by name; "stdlib" is the
    standard library."""
    files = find_files(path)
    if not files:
        raise UserError(
            f"{path!r} holds no text file; give 'stdlib', a directory, a file or a glob"
        )
    root = stdlib() if path == "stdlib" else pathlib.Path(path)
    if not root.is_dir():
        root = pathlib.Path(os.path.commonpath([file.parent for file in files]))
    return sorted((file.relative_to(root).as_posix(), file) for file in files)


def find_files(pattern: str) -> list[pathlib.Path]:
    """The files that a path, a directory, a glob or "stdlib" names, each once.

    Links to files and folders are followed, and a file with several names counts once, under its
    own name rather than a link's. Hidden names are left out, unless the pattern spells them.
    """
    paths: Iterable[pathlib.Path]
    if pattern == "stdlib":
        folders = _folders(stdlib(), skip=("site-packages", "dist-packages", "__pycache__"))
        paths = [path for folder in folders for path in _glob(folder, ["*.py"])]
    elif os.path.isdir(pattern):
        paths = _glob(pathlib.Path(pattern), ["**"])
    elif os.path.lexists(pattern):
        paths = [pathlib.Path(pattern)]
    else:
        paths = _glob(pathlib.Path(), pathlib.Path(pattern).parts)
    # A dangling link must not vanish silently from the input: reading it will fail.
    files = [path for path in paths if path.is_file() or (path.is_symlink() and not path.exists())]
    return unique_files(_only_saved_data(pattern, files))


def _only_saved_data(pattern: str, paths: list[pathlib.Path]) -> list[pathlib.Path]:
    """These files, but of a folder that `datasets` saved only those that its state.json names: it
    keeps results of `map` and `filter` beside them. UserError where it is a dict of several
    splits."""
    files = set(paths)
    splits = collections.Counter[pathlib.Path]()  # of each DatasetDict
    for folder in sorted({path.parent for path in paths if file_kind(path.name) != "text"}):
        try:
            state = json.loads((folder / "state.json").read_bytes())
            data = {folder / file["filename"] for file in state["_data_files"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # `datasets` did not save it
        if (folder.parent / "dataset_dict.json").exists():
            splits[folder.parent] += 1
        if splits[folder.parent] > 1:
            raise UserError(
                f"{pattern} has several splits of the DatasetDict {folder.parent}; name one, such"
                f" as {folder}"
            )
        # Where the whole folder is meant, a file that is not there fails when it is to be read.
        if folder / "state.json" not in files:
            data &= files
        files = {path for path in files if path.parent != folder} | data
        files.discard(folder.parent / "dataset_dict.json")
    return sorted(files)


def unique_files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """One name for each file, that of no link where there is one."""
    names: dict[object, list[pathlib.Path]] = {}
    for path in paths:
        names.setdefault(identity(path), []).append(path)

    def rank(path: pathlib.Path) -> tuple:
        return path.is_symlink(), os.path.realpath(path) != os.path.abspath(path), path

    return sorted(min(several, key=rank) for several in names.values())


def _folders(root: pathlib.Path, skip: Collection[str] = ()) -> Iterator[pathlib.Path]:
    """A folder and all below it, each once; those that links lead to come last, under the link's
    name."""
    seen: set[object] = set()
    waiting, linked = collections.deque([root]), collections.deque[pathlib.Path]()
    while waiting or linked:
        folder = (waiting or linked).popleft()
        if identity(folder) in seen:
            continue
        seen.add(identity(folder))
        yield folder
        for path in _entries(folder):
            if path.is_dir() and path.name not in skip:
                (linked if path.is_symlink() else waiting).append(path)


def _entries(folder: pathlib.Path, hidden: bool = False) -> list[pathlib.Path]:
    """The entries of a folder, sorted; UserError where it cannot be listed."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise UserError(
            f"cannot list {folder}: {error.strerror}; make it readable, or move it away"
        ) from None
    return sorted(folder / name for name in names if hidden or not name.startswith("."))


def _glob(folder: pathlib.Path, segments: Sequence[str]) -> Iterator[pathlib.Path]:
    """The paths that the segments of a glob name below a folder; "**" at its end names all."""
    if not segments:
        yield folder
        return
    head, *rest = segments
    if not glob.has_magic(head):
        yield from _glob(folder / head, rest)
    elif not folder.is_dir():
        return
    elif head == "**":
        for below in _folders(folder):
            yield from _glob(below, rest or ["*"])
    else:
        for path in _entries(folder, hidden=head.startswith(".")):
            if fnmatch.fnmatchcase(path.name, head):
                yield from _glob(path, rest)


def file_kind(name: str) -> str:
    """What a file's name says that it holds: text, jsonl, parquet, arrow, or what is not read; hub
    for a shard of the hub."""
    if name.startswith(HUB_PREFIX):
        return "hub"
    name = name.lower()
    for suffix in COMPRESSION:
        name = name.removesuffix(suffix)
    return FILE_KINDS.get(pathlib.Path(name).suffix, "text")


def printable(path: str) -> str:
    """A path on one line, whatever bytes it has."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]


def identity(path: str | os.PathLike) -> object:
    """The identity of a file, the same under all of its names, symbolic and hard links included."""
    try:
        status = os.stat(path)
    except OSError:  # a dangling link: reading it will fail with its name
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def identities(path: str) -> dict[object, pathlib.Path]:
    """The files of `list_files` by their identity."""
    return {identity(file): file for _, file in list_files(path)}


def stdlib() -> pathlib.Path:
    """The folder of the interpreter's standard library."""
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def corpus_stamp(path: str) -> tuple:
    """Names, sizes and times of a corpus's files, to tell whether they changed."""
    return tuple((name, *_stat(file)) for name, file in list_files(path))


def _stat(path: pathlib.Path) -> tuple:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def hash_below(name: str, share: float) -> bool:
    """Whether a name's hash is among the lowest `share` of all."""
    return name_hash(name) < share * 2**64


def name_hash(name: str) -> int:
    """The number that decides whether a document of this name is held out."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")
