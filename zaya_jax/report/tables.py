"""The report's words and numbers: a generated sample, every metric's last value, the config beside its
defaults.
"""

import json
from collections.abc import Iterable, Iterator, Sequence

from zaya_jax import config as config_module
from zaya_jax.report.read import Workdir
from zaya_jax.report.svg import escape, number

MOST_SAMPLES = 20  # of earlier ends
OPEN_ROWS = 24  # a longer table starts folded


def sample_section(run: Workdir) -> str:
    """The generated text, its prompt marked; folded below it what the run wrote when it ended before."""
    before = [one for one in run.samples if one.text != run.sample]
    if not run.sample and not before:
        return ""
    intro = "What the trained model writes" + (" after the marked prompt." if run.prompt else ".")
    out = f'<div class="card">{_marked(run.prompt, run.sample)}</div>' if run.sample else ""
    for one in reversed(before[-MOST_SAMPLES:]):
        out += folded(f"At step {one.step:,}", _marked(one.prompt, one.text), opened=not run.sample)
    if len(before) > MOST_SAMPLES:
        out += f'<p class="note">{len(before) - MOST_SAMPLES} earlier ones are in samples.jsonl.</p>'
    return f"<section><h2>Sample</h2><p>{intro}</p>{out}</section>\n"


def _marked(prompt: str, text: str) -> str:
    mark = f"<mark>{escape(prompt)}</mark>" if prompt else ""
    return f"<pre>{mark}{escape(text[len(prompt) :])}</pre>"


def lineage_section(run: Workdir) -> str:
    """Of a fork: from which runs it comes, and what each step on the way changed."""
    out = ""
    for parent in run.lineage:
        step, tokens, name = (parent.get(key) for key in ("step", "tokens", "run"))
        counts = (
            f"step {step:,}, {tokens:,} tokens" if isinstance(step, int) and isinstance(tokens, int) else "?"
        )
        folder = code(value_text(parent.get("folder")))
        out += f"<p>Forked from {folder} (run {code(value_text(name))}) at {counts}.</p>"
        changed = parent.get("changed")
        if isinstance(changed, dict) and changed:
            pairs = [(key, pair) for key, pair in changed.items() if isinstance(pair, list)]
            rows = [_row(code(key), [code(value_text(value)) for value in pair]) for key, pair in pairs]
            out += folded(
                f"What differs ({len(rows)})", _table(["key", "there", "here"], rows, "wide"), opened=True
            )
    return f"<section><h2>Lineage</h2>{out}</section>\n" if out else ""


def numbers_section(run: Workdir) -> str:
    """A table of all metrics: the pictures in numbers."""
    rows = []
    for key, series in sorted(run.series.items()):
        total = series.total
        ends = [number(total.low), number(total.high)] if total.count else ["–", "–"]
        bad = f"{total.bad:,}" if total.bad else "–"
        cells = [number(series.last, 5), f"{series.last_step:,}", *ends, bad]
        rows.append(_row(escape(key), cells))
    if not rows:
        return ""
    table = _table(["metric", "last", "at step", "lowest", "highest", "not finite"], rows, "wide num")
    fold = folded("All metrics", table, opened=len(rows) <= OPEN_ROWS)
    return f"<section><h2>Numbers</h2>{fold}</section>\n"


def config_section(run: Workdir) -> str:
    """The recorded config by group, what differs from the defaults marked; then where the run took place."""
    out = ""
    if run.config:
        rows, changed = _config_rows(run.config)
        note = f" <span>({changed} differ from the defaults, marked)</span>"
        out += folded(f"All keys{note}", _table(["key", "value", "default"], rows, "wide"))
    if run.environment:
        rows = [_row(code(key), [code(value_text(value))]) for key, value in flat(run.environment)]
        out += folded("Environment", _table(["fact", "value"], rows, "wide"))
    return f"<section><h2>Config</h2>{out}</section>\n" if out else ""


def _config_rows(config: dict) -> tuple[list[str], int]:
    """The table's rows, keys without a group first, and how many keys differ from the defaults."""
    defaults = dict(flat(config_module.to_dict(config_module.Config())))
    groups: dict[str, list[str]] = {"": []}
    changed = 0
    for key, value in flat(config):
        group, name = key.split(".", 1) if "." in key else ("", key)
        if group not in groups:
            groups[group] = [f'<tr class="group"><th scope="colgroup" colspan="3">{escape(group)}</th></tr>']
        differs = key not in defaults or not _same(value, defaults[key])
        changed += differs
        was = code(value_text(defaults[key])) if differs and key in defaults else "–" if differs else ""
        groups[group].append(_row(code(name), [code(value_text(value)), was], "changed" if differs else ""))
    return [row for rows in groups.values() for row in rows], changed


def _row(name: str, cells: Iterable[str], kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<tr{mark}><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _table(head: Iterable[str], rows: Iterable[str], kind: str) -> str:
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    return f'<table class="{kind}"><thead><tr>{columns}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def folded(summary: str, table: str, opened: bool = False) -> str:
    """A table that folds away, and scrolls in itself."""
    start = "<details open>" if opened else "<details>"
    return f'{start}<summary>{summary}</summary><div class="scroll">{table}</div></details>'


def code(text: str) -> str:
    """Text as it was typed."""
    return f"<code>{escape(text)}</code>"


def flat(value: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested groups by their dotted keys."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _same(value: object, default: object) -> bool:
    """Equal as a config takes it: 1 is 1.0, but not true."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def value_text(value: object) -> str:
    """A config's value as people read it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list) and len(value) > 4 and all(item == value[0] for item in value):
        return f"{len(value)} × {json.dumps(value[0], ensure_ascii=False)}"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def as_markdown(title: str, head: Sequence[str], rows: list[list[str]]) -> str:
    """A table of text under its title, in Markdown."""
    lines = [f"### {title}\n", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_in_cell, cells)) + " |" for cells in rows), ""])


def _in_cell(text: str) -> str:
    """Text that ends no cell and no row of Markdown."""
    return " ".join(text.replace("|", "\\|").splitlines())


def as_html(head: Sequence[str], rows: list[list[str]], kind: str = "wide") -> str:
    """A table of text, on a page; the first of a row names it."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(_row(escape(name), map(escape, cells)) for name, *cells in rows)
    return f'<table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
