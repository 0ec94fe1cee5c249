"""Lets mkdocs make a site of pages that are written for the repository: adds files outside docs/,
and links to them.

Pages of benchmarks/ and some others keep their path in the repository on the site, those of docs/
lose "docs/". A link to any other text file leads to a page with its text, so that the site is whole
without a repository's address. A link to a missing file is a warning, which strict mode turns into
an error.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = (
    "benchmarks/*.md",
    "benchmarks/*.png",
    "benchmarks/*.svg",
    "pallas_kernels/*.md",
    "C*.md",
)
OUTSIDE = sorted(
    path.relative_to(ROOT).as_posix() for pattern in PATTERNS for path in ROOT.glob(pattern)
)
LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".toml": "toml"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
OUTPUT = '<div class="language-text highlight'  # what a program prints
# a phone has its rows as paragraphs
OPTIONS = re.compile(r"<table>(?=\s*<thead>\s*<tr>\s*<th>(?:key|option)</th>)")
# text that looks like a link in code is not a link
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.M | re.S)

log = logging.getLogger("mkdocs.hooks.outside")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and pictures outside docs/, and a page for each other file that a page links
    to."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for file in list(files.documentation_pages()):
        for target in targets(file):
            path = ROOT / target
            name = site_name(target)
            if path.is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to files of the repository into links to their pages."""
    folder = posixpath.dirname(page.file.src_uri)

    def changed(match):
        begin, link, anchor = match[1], match[2], match[3] or ""
        target = repository_path(page.file, link)
        if target is None:
            return match[0]
        if not (ROOT / target).is_file():
            log.warning("%s: %s is no file of the repository", page.file.src_uri, link)
            return match[0]
        return begin + posixpath.relpath(site_name(target), folder or ".") + anchor

    parts = CODE.split(markdown)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(changed, part) for part in parts)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Marks output, for which the theme then makes no copy button, and tables of keys and options,
    for the style."""
    return OPTIONS.sub("<table data-options>", html.replace(OUTPUT, f"{OUTPUT} no-copy"))


def targets(file: File) -> list[str]:
    """The files of the repository that a page links to."""
    links = LINK.findall(CODE.sub("", file.content_string))
    paths = [repository_path(file, link) for _, link, _ in links]
    return [path for path in paths if path is not None]


def repository_path(file: File, link: str) -> str | None:
    """The target of a page's link, from the repository's root; None for an address, or a page made
    here."""
    if re.match(r"[a-z]+:", link) or file.src_uri.startswith("source/"):
        return None
    page = file.src_uri if file.generated_by else f"docs/{file.src_uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def site_name(target: str) -> str:
    """The path on the site of a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return target if target in OUTSIDE else f"source/{target}.md"


def source_page(path: Path) -> str:
    """A file's text as a page, which the search leaves out."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n"
    return f"{head}{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"
