"""Puts the report together on one HTML page: headline figures, curves, expert load, sample, numbers, config.

Of the workdir it takes metrics.jsonl, config.json, sample.txt (prompt and continuation; the prompt is
marked where the text starts with the config's `log.sample_prompt`), samples.jsonl (those before),
environment.json (any facts, `device` among them), of a fork lineage.json and, of a supervised run,
aegis/events*.jsonl. Only `loss`, the step times, the time waiting for data, the expert load and the held-out
losses are known by name; any other number in metrics.jsonl gets a curve under its own name, `prefix/name`
metrics share one picture per prefix, and lists of one number per layer become heat maps.
"""

import math
import os
import pathlib
from collections.abc import Callable

from zaya_jax import config as config_module
from zaya_jax.config import files
from zaya_jax.report import aegis, curves, experts, saves, tables
from zaya_jax.report.read import Workdir, read_workdir
from zaya_jax.report.script import SCRIPT
from zaya_jax.report.style import style_sheet
from zaya_jax.report.svg import escape, number

FOOTER = (
    "Drawn from the files of the run’s workdir. Point at a picture, or go to it with Tab and use the arrow keys, to "
    "read its values. In curves, drag to zoom, or use + and −; double click or 0 shows all again."
)


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
    """Writes `report.html` into the workdir from what the run left there, whole or not at all."""
    path = pathlib.Path(workdir)
    if not path.is_dir():
        raise config_module.UserError(
            f"no report: workdir {str(path)!r} is not a directory; give the one a run wrote to"
        )
    target = path / "report.html"
    write_page(target, lambda: render(read_workdir(path)))
    return target


def write_page(target: pathlib.Path, page: Callable[[], str]) -> None:
    """Writes a page, whole or not at all; UserError where something cannot be read or written."""
    try:
        files.write(target, page().encode("utf-8", errors="replace"))
    except OSError as error:
        where, reason = error.filename or target, error.strerror or error
        raise config_module.UserError(
            f"no report: {str(where)!r}: {reason}; the workdir must be readable and {target.name} replaceable"
        ) from error


def check_target(target: pathlib.Path, option: str) -> pathlib.Path:
    """A page's file as an option gives it; UserError where that would be something else than a page."""
    if target.suffix.lower() not in (".html", ".htm"):
        raise config_module.UserError(
            f"{option}={target} does not end in .html; the page is HTML, and other files must not be lost"
        )
    if not target.parent.is_dir():
        raise config_module.UserError(
            f"{option}={target}: {str(target.parent)!r} is no folder; make it first, or give another place"
        )
    if target.is_dir():
        raise config_module.UserError(f"{option}={target} is a folder; give the name of a file in it")
    return target


def render(run: Workdir) -> str:
    """The whole page as one string of HTML."""
    return shell(title(run), parts(run))


def title(run: Workdir) -> str:
    """What the window is called."""
    return f"{run.name}: {_headline(run)}" if run.lines else run.name


def parts(run: Workdir) -> dict[str, str]:
    """The page's parts by name, in their order: those that have something to show."""
    made = {part.__name__.strip("_"): part(run) for part in SECTIONS}
    return {name: html for name, html in made.items() if html}


def shell(title: str, parts: dict[str, str], live: str = "") -> str:
    """A page around its parts; `live`: what is put below them where the page is one that is watched."""
    body = "".join(f'<div data-part="{name}">{html}</div>' for name, html in parts.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head>\n<body><main>\n{body}"
        f"<footer>{FOOTER}</footer>\n</main><script>{SCRIPT}</script>{live}</body></html>\n"
    )


def _headline(run: Workdir) -> str:
    steps = f"{run.last_step:,} step{'s' if run.last_step != 1 else ''}"
    held_out, train = run.last("eval/loss"), run.train_loss
    losses = [f"held-out {held_out:.4g}"] if math.isfinite(held_out) else []
    losses += [f"train {train:.4g}"] if math.isfinite(train) else []
    return f"{', '.join(losses)} {run.unit} after {steps}" if losses else steps


def duration(seconds: float) -> str:
    """Seconds as people read them, in their two largest units."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(i for i, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


def median_speed(run: Workdir) -> float:
    """The median over the run: the first step's compilation does not weigh in."""
    if "tokens_per_second" not in run.series:
        return math.nan
    means = sorted(b.mean for b in run.series["tokens_per_second"].bins.values() if b.count)
    return means[len(means) // 2] if means else math.nan


def _header(run: Workdir) -> str:
    model, data = run.config.get("model"), run.config.get("data")
    facts = [str(run.environment["device"])] if run.environment.get("device") else []
    if isinstance(model, dict) and model.get("num_hidden_layers"):
        kind = f" of {model.get('num_experts', '?')} experts" if model.get("model_type") != "dense" else ""
        facts.append(f"{model['num_hidden_layers']} layers{kind}")
        facts.append(f"width {model.get('hidden_size', '?')}")
    if isinstance(data, dict) and data.get("seq_len"):
        facts.append(f"{data.get('global_batch', '?')} × {data['seq_len']} tokens per step")
    sub = f'<p class="sub">{escape(" · ".join(facts))}</p>' if facts else ""
    tiles = "".join(
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd>{escape(c)}</dd></div>" for a, b, c in _tiles(run)
    )
    warnings = _warnings(run)
    warn = f'<div class="warn">{"".join(f"<p>{escape(w)}</p>" for w in warnings)}</div>' if warnings else ""
    return (
        f"<header><h1>{escape(run.name)} <span>training report</span></h1>{sub}"
        f'<dl class="tiles">{tiles}</dl>{warn}</header>\n'
    )


def _tiles(run: Workdir) -> list[tuple[str, str, str]]:
    unit = run.unit
    tiles = []
    held_out = run.series.get("eval/loss")
    if held_out:
        best = held_out.total
        lowest = f"; best {best.low:.4g} at step {held_out.low_step:,}" if best.count else ""
        lowest = lowest if held_out.last_step != held_out.low_step else ""
        tiles.append(("Held-out loss", number(held_out.last), unit + lowest))
    if "loss" in run.series:
        last = run.series["loss"].last
        if not math.isfinite(last):
            tiles.append(("Train loss", number(last), f"not finite at step {run.series['loss'].last_step:,}"))
        else:
            many = len(run.last_losses)
            tiles.append(
                (
                    "Train loss",
                    number(run.train_loss),
                    unit + (f", mean of last {many} steps" if many > 1 else ""),
                )
            )
    planned = run.setting("run.num_steps")
    of = ""
    if isinstance(planned, int) and run.lines:
        of = "complete" if run.last_step >= planned else f"of {planned:,} planned"
    tiles.append(("Steps", f"{run.last_step:,}", of))
    if "tokens" in run.series:
        before = run.lineage[0].get("tokens") if run.lineage else None
        of = f"; {number(before, 3)} of them before the fork" if isinstance(before, int) else ""
        tiles.append(("Tokens", number(run.last("tokens"), 3), f"trained on{of}"))
    if "tokens_per_second" in run.series:
        tiles.append(("Speed", number(median_speed(run), 3), "tokens per second, median"))
    if "step_seconds" in run.series:
        tiles.append(("Training time", duration(run.seconds), "sum of all steps"))
    return tiles


def _warnings(run: Workdir) -> list[str]:
    warnings = []
    for key in ("loss", "eval/loss", "grad_norm"):
        series = run.series.get(key)
        if series and series.total.bad:
            steps = f"{series.total.bad:,} step{'s' if series.total.bad > 1 else ''}"
            warnings.append(f"{key} was not finite at {steps}, first at step {series.total.bad_step:,}.")
    return warnings + run.notes


SECTIONS = (
    _header,
    tables.lineage_section,
    curves.loss_section,
    experts.experts_section,
    curves.optimiser_section,
    curves.speed_section,
    saves.saves_section,
    aegis.aegis_section,
    curves.other_section,
    tables.sample_section,
    tables.numbers_section,
    tables.config_section,
)
