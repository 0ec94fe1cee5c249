"""The site: its navigation, its links and anchors without mkdocs, and itself where mkdocs is
installed."""

import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import commands
import pytest
import yaml

ROOT = commands.ROOT
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(?:#([^)\s]*))?(?=\))")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.M | re.S)


def in_nav(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [
        path
        for part in (entry.values() if isinstance(entry, dict) else entry)
        for path in in_nav(part)
    ]


def linked_pages() -> list[Path]:
    folders = ("docs", "benchmarks", "pallas_kernels")
    return [
        *ROOT.glob("*.md"),
        *(page for folder in folders for page in sorted((ROOT / folder).rglob("*.md"))),
    ]


def anchors(text: str) -> set[str]:
    """What GitHub and mkdocs both call a page's headings; where they differ, or one is there twice,
    no link may go."""
    found: list[str] = []
    for title in re.findall(
        r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S), re.M
    ):
        title = re.sub(r"[`*]", "", title).strip().lower()
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        of_mkdocs = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain))
        of_github = re.sub(r"[^\w\s-]", "", title).replace(" ", "-")
        found += [of_mkdocs] if of_mkdocs == of_github else []
    return {slug for slug in found if found.count(slug) == 1}


def broken(page: Path, text: str) -> list[str]:
    """A page's links that lead to no file of the repository, or to no heading of it."""
    by_name = re.findall(r"^\[[^\]]+\]: .*$", CODE.sub("", text), re.M)
    wrong = [f"{page.name}: {line}: write it as [text](target)" for line in by_name]
    for path, anchor in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or not target.is_relative_to(ROOT):
            wrong.append(f"{page.relative_to(ROOT)}: {path}")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            wrong.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    return wrong


def test_links_and_anchors_lead_somewhere():
    wrong = [
        line for page in linked_pages() for line in broken(page, page.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_page_has_its_place():
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    there |= {str(page.relative_to(ROOT)) for page in (ROOT / "benchmarks").glob("*.md")}
    outside = {"pallas_kernels/TARGETS.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    listed = in_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(listed) == len(set(listed))
    wrong = set(listed) ^ (there | outside)
    assert not wrong, (
        f"in docs/ or benchmarks/ and not in mkdocs.yml, or the other way round: {wrong}"
    )


def mkdocs() -> str:
    """The path of mkdocs: next to this Python, or in the environment of `make setup-docs`."""
    places = [Path(sys.executable).parent / "mkdocs", ROOT / ".venv-docs" / "bin" / "mkdocs"]
    return next((str(place) for place in places if place.is_file()), shutil.which("mkdocs") or "")


@pytest.mark.skipif(not mkdocs(), reason="mkdocs is not installed: make setup-docs")
def test_the_site_is_built_strictly_and_loads_nothing_from_a_network(tmp_path):
    built = subprocess.run(
        [mkdocs(), "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    loads = re.compile(
        r'<(?:script|img|iframe|source|video)[^>]* src="?(?:https?:)?//|<link[^>]*'
        r' href="?(?:https?:)?//'
    )
    for page in pages:
        assert not loads.search(page.read_text(encoding="utf-8")), page
    text = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "loss_and_grads" in text and "[B, S, V]" in text
    assert "source/experiments/pretrain" not in text
    assert (tmp_path / "site" / "benchmarks" / "compile.html").is_file()
    assert (
        tmp_path / "site" / "source" / "experiments" / "configs" / "zaya1_base.py.html"
    ).is_file()
