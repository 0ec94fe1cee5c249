"""The site: its links and anchors without mkdocs, and itself, its navigation too, where mkdocs is
installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import pytest

ROOT = commands.ROOT
# of a page, not of an address
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]*)(?:#([^)\s]*))?(?=\))")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.M | re.S)


def anchors(text: str) -> set[str]:
    """What GitHub calls a page's headings; the strict build knows what mkdocs does."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\s-]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def is_broken(page: Path, path: str, anchor: str) -> bool:
    """Whether a page's link leads to no file of the repository, or to no heading of it."""
    target = (page.parent / path).resolve() if path else page
    if not target.is_file() or not target.is_relative_to(ROOT):
        return True
    return bool(anchor) and anchor not in anchors(target.read_text(encoding="utf-8"))


def test_links_and_anchors_lead_somewhere():
    folders = (ROOT / folder for folder in ("docs", "benchmarks", "pallas_kernels"))
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    wrong = [
        f"{page.relative_to(ROOT)}: {path}#{anchor}"
        for page in pages
        for path, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
        if is_broken(page, path, anchor)
    ]
    assert len(pages) > 60 and not wrong, "\n".join(wrong)


def mkdocs() -> str:
    """The path of mkdocs: next to this Python, or in the environment of `make setup-docs`."""
    places = [Path(sys.executable).parent / "mkdocs", ROOT / ".venv-docs" / "bin" / "mkdocs"]
    return next((str(place) for place in places if place.is_file()), shutil.which("mkdocs") or "")


@pytest.mark.skipif(not mkdocs(), reason="mkdocs is not installed: make setup-docs")
def test_the_site_is_built_strictly_and_loads_nothing_from_a_network(tmp_path):
    built = subprocess.run(
        # Not --quiet, which keeps warnings from being counted.
        [mkdocs(), "build", "--strict", "--site-dir", str(tmp_path / "site")],
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
