"""Damages files as a disk, an editor or another program might."""

import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

CONTENTS = (
    b"",
    b"\0" * 64,
    b"{}",
    b"[]",
    b"null",
    b"1e999",
    b"[" * 3000,
    b'{"a": NaN}',
    b"\xff\xfe",
    b'"x"',
    b'{"step": -1}',
    b"{'a': 1}",
    b'{"model_type": "zaya"}',
    b"\n\n",
    b'{"": {"": {}}}',
    b"<html>",
)
# Values for a place of a JSON file: of another type, or beyond any sensible number.
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**64,
    10**30,
    1.5,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\u00fc",
    "../x",
    "\ud800",
    [],
    [1],
    ["x"],
    [[1]],
    {},
    {"x": 1},
    [None],
    [-1, 0],
    [10**12, 10**12],
    "float32",
    "NaN",
)
KINDS = (
    "flip",
    "cut",
    "grow",
    "content",
    "json",
    "json",
    "json",
    "gone",
    "folder",
    "link",
    "twice",
    "swap",
)


@st.composite
def damages(draw: Any, folder: Path, only: tuple[str, ...] = ()) -> tuple:
    """(file, what, how) of one damage to a folder, to one of these files alone if some are
    named."""
    files = list(only) or sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()
    )
    # Small files decide how the large ones are read, and there are fewer of them.
    named = [f for f in files if not f.split("/")[-1].startswith("c") or f.endswith(".json")]
    file = draw(st.one_of(st.sampled_from(files), st.sampled_from(named or files)))
    kind = draw(st.sampled_from(KINDS))
    if kind == "content":
        how: Any = draw(st.sampled_from(CONTENTS))
    elif kind == "json":
        how = draw(st.integers(0, 10**6)), draw(st.sampled_from([*VALUES, "gone"]))
    elif kind == "swap":
        how = draw(st.sampled_from(files))
    else:
        how = draw(st.integers(0, 10**6)), draw(st.integers(1, 255))
    return file, kind, how


def damage(folder: Path, file: str, kind: str, how: Any) -> None:
    """Does it."""
    path = folder / file
    if not path.is_file() or (kind == "swap" and not (folder / how).is_file()):
        return  # another damage was quicker
    raw = path.read_bytes()
    if kind == "content":
        path.write_bytes(how)
    elif kind == "json":
        path.write_bytes(_json(raw, *how))
    elif kind == "flip" and raw:
        place = how[0] % len(raw)
        path.write_bytes(raw[:place] + bytes([raw[place] ^ how[1]]) + raw[place + 1 :])
    elif kind == "cut":
        path.write_bytes(raw[: how[0] % (len(raw) + 1)])
    elif kind == "grow":
        path.write_bytes(raw + bytes([how[1]]) * (how[0] % 100 + 1))
    elif kind == "twice":
        path.write_bytes(raw + raw)
    elif kind == "swap":
        other = (folder / how).read_bytes()
        (folder / how).write_bytes(raw)
        path.write_bytes(other)
    elif kind in ("gone", "folder", "link"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("nowhere")


def copied(folder: Path, target: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(folder, target, symlinks=True)
    return target


def _json(raw: bytes, place: int, value: Any) -> bytes:
    """JSON (or its first line) with another value, or none, in one place; anything else becomes the
    value."""
    first, newline, rest = raw.partition(b"\n") if raw.count(b"}\n{") else (raw, b"", b"")
    try:
        tree = json.loads(first)
    except (ValueError, RecursionError):
        return json.dumps(value).encode()
    holders: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, below in node.items() if isinstance(node, dict) else enumerate(node):
            holders.append((node, key))
            if isinstance(below, dict | list):
                walk(below)

    if isinstance(tree, dict | list):
        walk(tree)
    if not holders:
        return json.dumps(value).encode()
    holder, key = holders[place % len(holders)]
    if value == "gone":
        del holder[key]
    else:
        holder[key] = value
    return json.dumps(tree).encode() + newline + rest
