"""The chat set of docs/finetuning.md: every Python of one version makes the same file in any
folder."""

import json
import os
import subprocess
import sys

import commands

from zaya_jax.text import chat

TOOL = commands.ROOT / "tools" / "example_chats.py"


def made(python, folder, *options):
    """(exit code, errors) of the tool."""
    done = subprocess.run(
        [python, TOOL, *options], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


def test_the_same_python_gives_the_same_file(tmp_path):
    """One of them in an environment: signatures quote the interpreter, the library's folder and the
    kind of install."""
    base = os.path.realpath(sys.executable)
    subprocess.run(
        [base, "-m", "venv", "--without-pip", tmp_path / "a venv"], check=True, timeout=120
    )
    pythons = {"plain": base, "venv": tmp_path / "a venv" / "bin" / "python"}
    for name, python in pythons.items():
        assert made(python, tmp_path, f"{name}.jsonl") == (0, "")
    lines = (tmp_path / "plain.jsonl").read_text(encoding="utf-8")
    assert (tmp_path / "venv.jsonl").read_text(encoding="utf-8") == lines
    assert not [place for place in (sys.prefix, sys.base_prefix, str(tmp_path)) if place in lines]
    chats = [chat.parse_chat(json.loads(line)["messages"]) for line in lines.splitlines()]
    assert len(chats) > 2000 and all(
        turns[-1].is_answer and len(turns) in (2, 3) for turns in chats
    )
