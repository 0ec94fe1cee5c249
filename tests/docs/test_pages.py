"""Pages that list parts of the code agree with it; the chat set of docs/finetuning.md is that of any
machine."""

import json
import re
import subprocess
import sys

import commands

from tools import reference
from zaya_jax import cli
from zaya_jax.optim import chain
from zaya_jax.text import chat

ROOT = commands.ROOT


def test_the_page_of_programs_is_as_it_is_made():
    page = (ROOT / "docs/programs.md").read_text(encoding="utf-8")
    assert reference.page() == page, "python -m tools.reference > docs/programs.md"


def test_every_exit_code_is_on_its_page():
    text = (ROOT / "docs" / "exit_codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \|", text, re.M)
    listed = {int(code) for code in ", ".join(rows).split(",")}
    codes = {v for k, v in vars(cli).items() if k.isupper() and type(v) is int}
    assert listed == codes | {130, 143}  # those of a second signal, as of any program


def metrics() -> set[str]:
    """Every name on docs/metrics.md, those of groups of weights too."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^\| `([^`]+)` \|", text, re.M))
    groups = [
        *re.findall(r"`(\w+)`", text.partition("of a group of weights: ")[2].partition(";")[0]),
        "mlp",
    ]
    return names | {
        f"{name}/{group}" for name in names if name.endswith("_norm") for group in groups
    }


def test_every_group_of_weights_is_on_the_page_of_metrics():
    groups = {rule.group for rule in chain.TABLE}
    assert groups
    assert {f"grad_norm/{group}" for group in groups} <= metrics()


def test_every_name_on_the_page_of_metrics_is_one_that_the_code_writes():
    sources = "".join(
        p.read_text()
        for folder in ("zaya_jax", "experiments")
        for p in (ROOT / folder).rglob("*.py")
    )
    for name in metrics():
        plain = (
            name.partition("/")[0]
            if "_norm/" in name
            else name.removeprefix("checkpoint/").removesuffix("_seconds")
        )
        whole = re.search(rf'["\']{re.escape(name)}["\']', sources)
        assert whole or re.search(rf'["\']{re.escape(plain)}["\']', sources), name


def test_the_code_that_the_project_s_words_name_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = re.findall(r"`([\w/]+/\w+(?:\.py)?)`.*\|$", text, re.M)
    wrong = [p for p in places if not any((ROOT / top / p).exists() for top in ("", "zaya_jax"))]
    assert len(places) > 30 and not wrong, wrong


def test_the_chat_set_has_nothing_of_the_machine_that_makes_it(tmp_path):
    """Signatures quote the interpreter, the library's folder and the kind of install."""
    command = [sys.executable, ROOT / "tools" / "example_chats.py", "chats.jsonl"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    lines = (tmp_path / "chats.jsonl").read_text(encoding="utf-8")
    assert not [place for place in (sys.prefix, sys.base_prefix, str(tmp_path)) if place in lines]
    chats = [chat.parse_chat(json.loads(line)["messages"]) for line in lines.splitlines()]
    assert len(chats) > 2000
    assert all(turns[-1].is_answer and len(turns) in (2, 3) for turns in chats)
