"""A corpus of some hundred megabytes from what a machine has: sources and docs of Python and its installed
packages.

    python benchmarks/make_corpus.py --out=DIR

Writes text/ (copies of files), packages.jsonl and packages.parquet (a share each of the packages' files as
samples) and chats.jsonl: conversations made from docstrings, one a function and one of several turns a class,
the source as reasoning and the docstring as the answer.
"""

import ast
import hashlib
import json
import pathlib
import shutil
import sysconfig
import warnings
from collections.abc import Iterator

import pyarrow
import pyarrow.parquet
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("out", None, "directory to write", required=True)

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".c", ".json", ".html", ".js", ".css"}


def main(_: list[str]) -> None:
    """Write the corpus and say how large it is."""
    out = pathlib.Path(FLAGS.out)
    (out / "text").mkdir(parents=True)
    rows: list[dict[str, str]] = []
    copied = chats = 0
    with (out / "packages.jsonl").open("w") as lines, (out / "chats.jsonl").open("w") as conversations:
        for name, path in files():
            text = read(path)
            if text is None:
                continue
            share = hashlib.sha256(name.encode()).digest()[0] % 4
            if share < 2:
                shutil.copyfile(path, out / "text" / f"{copied:06d}{path.suffix if path.suffix != '.json' else '.txt'}")
                copied += 1
            elif share == 2:
                lines.write(json.dumps({"text": text, "name": name}) + "\n")
            else:
                rows.append({"text": text, "name": name})
            if path.suffix == ".py":
                for messages in conversations_of(name, text):
                    conversations.write(json.dumps({"messages": messages}) + "\n")
                    chats += 1
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out / "packages.parquet", row_group_size=500)
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    print(f"{out}: {size / 1e6:.0f} MB, {copied:,} text files, {len(rows):,} Parquet rows, {chats:,} chats")


def files() -> Iterator[tuple[str, pathlib.Path]]:
    """(name, path) of every text file of the standard library and of the packages, in order of names."""
    paths = sysconfig.get_paths()
    for root in (pathlib.Path(paths["stdlib"]), pathlib.Path(paths["purelib"])):
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root).parts
            if path.suffix in SUFFIXES and path.is_file() and "site-packages" not in inside:
                yield "/".join(inside), path


def read(path: pathlib.Path) -> str | None:
    """The file's text, if it has one."""
    try:
        text = path.read_text("utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text if text.strip() else None


def conversations_of(name: str, text: str) -> Iterator[list[dict[str, str]]]:
    """A conversation for each documented function, and one of all documented methods for each class."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in tree.body:
        turns = []
        for item in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(item, ast.FunctionDef) and (doc := ast.get_docstring(item)):
                source = ast.get_source_segment(text, item) or ""
                turns.append({"role": "user", "content": f"What does {item.name} in {name} do?"})
                turns.append({"role": "assistant", "reasoning": source, "content": doc})
        if turns:
            yield turns


if __name__ == "__main__":
    app.run(main)
