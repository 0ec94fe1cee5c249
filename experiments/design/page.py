"""Compares the shapes that a search found, in numbers and in words, for `experiments.design`."""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

from experiments.design import picture, search
from experiments.design.search import Ask, Candidate
from zaya_jax import cli
from zaya_jax.config import UserError, files
from zaya_jax.hardware import clusters
from zaya_jax.plan import footprint, serving
from zaya_jax.plan import rates as rates_lib
from zaya_jax.plan.rates import Rate, Rates
from zaya_jax.report import svg
from zaya_jax.report.document import Page, Section, Table, write_results
from zaya_jax.report.text import byte_size

BATCHES = (1, 8, 64)  # texts that are answered at once; the front is of the first
PROMPTS = (4096, 32_768)  # tokens
OF_WHAT = (
    "Of training throughput against the time of a token, at each depth: no other shape with as many"
    " layers or more trains as fast and answers one text as soon. Shapes that strain a rule are left"
    " out of it."
)
BESIDE = (
    "For each assumption: the shape that trains fastest and answers no later, and the one that"
    " answers first and trains no slower. Where it is ZAYA1-base, nothing beats it."
)
UNSEEN = (
    "Budgets of weights are held, the loss is not. Whether 22 layers of wide experts learn as well"
    " as 40 of narrower ones, only training shows; depth is the one thing that the front takes for"
    " a gain in itself.",
    "Formulas, nothing was compiled or run. They cannot tell differences of a few percent; ratios"
    " of two shapes are more reliable than seconds.",
    "A shape may miss each budget by 2%, and owe its speed to that.",
    "A token waits for 33 launches a layer, as in this project's programs. An engine that records a"
    " token's kernels as one graph comes nearer to the rows without launches.",
    "Tokens choose experts evenly and independently. Stragglers, uneven experts and the host are"
    " left out, and so is all that a server does beside the model.",
)
CONFIG = '''"""{title}, from experiments.design.

    python -m experiments.pretrain --config={file} --workdir=DIR --config.data.path=ROOT
    python -m experiments.plan --config={file} --cluster={cluster} --devices={devices} --out=DIR

Planned on {date}: {speed:,.0f} training tokens per second of a device, {ms:.2f} ms a token of one text.
Data, optimizer and balancing are those of zaya1_base's first phase.
"""

import dataclasses

from ml_collections import ConfigDict

from experiments.configs import zaya1_base


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = zaya1_base.get_config()
    c.name = {name!r}
{settings}
    first = c.schedule.phases[0]
    c.schedule.phases = (
        dataclasses.replace(first, seq_len=0, global_batch=0, ramp_from=0, ramp_tokens=0),
    )
    return c
'''
HEAD = (
    "shape",
    "experts",
    "layers",
    "width",
    "heads",
    "tokens/s a device",
    "low to high",
    *(f"ms a token, batch {batch}" for batch in BATCHES),
    *(f"ms, prompt of {length:,}" for length in PROMPTS),
    "memory",
    "strains",
)


def run(args: argparse.Namespace) -> int:
    """Formulas in, three files out, and perhaps a config."""
    out = cli.out_folder(args.out, "the comparison")
    jax.config.update("jax_platforms", "cpu")  # shapes alone are asked of JAX
    name, cluster = next(row for row in clusters.CLUSTERS.items() if row[1].chip == args.chip)
    ask = Ask(
        cluster, args.devices, args.active, args.total, args.context, args.vocab, args.figures
    )
    result = compare(ask, rates_lib.for_cluster(cluster, args.figures))
    if args.write and args.write > len(result["shapes"]):
        raise UserError(
            f"--write={args.write} is none of the shapes, which have the numbers 1 to"
            f" {len(result['shapes'])}"
        )
    write_results(out, "design", result, document(result))
    files.write(out / "design.svg", svg.standalone(picture.draw(result)).encode())
    if args.write:
        path = out / f"shape_{args.write}.py"
        files.write(path, config_file(result, args.write, path, name).encode())
        print(f"written: {path}")
    return cli.DONE


def compare(ask: Ask, rates: Rates) -> dict[str, Any]:
    """All that is known of the shapes, fastest to train first; UserError where there are none."""
    models = list(search.shapes(ask))
    candidates = [candidate for model in models if (candidate := search.planned(ask, model))]
    if not candidates:
        raise UserError(
            f"{ask.active:g} active and {ask.total:g} weights in all: {len(models)} shapes are near"
            f" that, and none of them fits the memory of {ask.devices} devices; give more devices,"
            " or a total of 5 to 60 times the active weights"
        )
    candidates.sort(key=lambda candidate: -search.gains(ask, candidate.case, rates, BATCHES[0])[1])
    return {
        "chip": ask.cluster.chip,
        "devices": ask.devices,
        "active": ask.active,
        "total": ask.total,
        "context": ask.context,
        "vocab": ask.vocab,
        "date": time.strftime("%Y-%m-%d"),
        "too_large": len(models) - len(candidates),
        "shapes": _rows(ask, candidates, rates),
        "zaya1_base": _beside(ask, candidates, rates),
        "assumed": list(rates.rows()),
    }


def _gains(
    ask: Ask, candidates: list[Candidate], rates: Rates, batch: int, strained: bool = False
) -> dict[int, search.Gains]:
    """By number; of shapes that strain no rule alone, if `strained` does not say otherwise."""
    return {
        number: search.gains(ask, candidate.case, rates, batch)
        for number, candidate in enumerate(candidates, 1)
        if strained or not candidate.strains
    }


def _rows(ask: Ask, candidates: list[Candidate], rates: Rates) -> list[dict[str, Any]]:
    """Each shape's numbers; what depends on rates as [likely, fast, slow]."""
    best, rows = search.front(_gains(ask, candidates, rates, BATCHES[0])), []
    three = rates, rates.at_ends(0, rates.uncertain), rates.at_ends(1, rates.uncertain)
    for number, (case, settings, strains) in enumerate(candidates, 1):
        by_batch = {n: [search.gains(ask, case, r, n) for r in three] for n in BATCHES}
        rows.append(
            {
                "number": number,
                "zaya1_base": case.model == search.base_shape(ask),
                "front": number in best,
                "layers": case.model.num_hidden_layers,
                "width": case.model.hidden_size,
                "heads": [case.model.num_attention_heads, case.model.num_key_value_heads],
                "experts": case.model.num_experts,
                "expert_width": case.model.moe_intermediate_size,
                "name": f"{case.model.num_experts} x {case.model.moe_intermediate_size:,}",
                "tokens_per_second": [speed for _, speed, _ in by_batch[BATCHES[0]]],
                "token_ms": [[-1e3 * gain[2] for gain in by_batch[n]] for n in BATCHES],
                "prompt_ms": [
                    [1e3 * serving.seconds(case, r, 1, length) for r in three] for length in PROMPTS
                ],
                "memory": footprint.estimate(case).peak,
                "strains": strains,
                "settings": settings,
            }
        )
    return rows


def _beside(
    ask: Ask, candidates: list[Candidate], rates: Rates
) -> list[tuple[str, int, float, int, float]]:
    """By assumption: the shape that trains fastest and answers no later than ZAYA1-base, with its
    gain, and the one that answers first and trains no slower; nothing where ZAYA1-base is none."""
    models = [candidate.case.model for candidate in candidates]
    own = search.base_shape(ask)
    base = 1 + models.index(own) if own in models else None
    free = dataclasses.replace(rates, launch=Rate(0.0, "none"))
    assumptions = []
    for what, these, strained in (
        ("as planned", rates, False),
        ("rules may be strained", rates, True),
        ("and no launches", free, True),
    ):
        assumptions += [(f"{what}, batch {n}", these, n, strained, False) for n in BATCHES]
    assumptions += [
        ("fewer layers are as good", rates, BATCHES[0], False, True),
        ("and rules may be strained", rates, BATCHES[0], True, True),
    ]
    table: list[tuple[str, int, float, int, float]] = []
    for what, these, batch, strained, shallow in assumptions:
        every = _gains(ask, candidates, these, batch, strained)
        if base not in every:
            continue
        depth, speed, ahead = every[base]
        deep = {n: gain for n, gain in every.items() if shallow or gain[0] >= depth}
        trains = max((n for n in deep if deep[n][2] >= ahead), key=lambda n: deep[n][1])
        answers = max((n for n in deep if deep[n][1] >= speed), key=lambda n: deep[n][2])
        more, less = every[trains][1] / speed - 1, every[answers][2] / ahead - 1
        table.append((what, trains, more, answers, less))
    return table


def config_file(result: dict[str, Any], number: int, path: Path, cluster: str) -> str:
    """The config of a shape, as the text of a Python file."""
    row = result["shapes"][number - 1]
    return CONFIG.format(
        title=f"{row['layers']} layers of width {row['width']:,} with {row['name']} experts",
        file=path,
        cluster=cluster,
        devices=result["devices"],
        date=result["date"],
        speed=row["tokens_per_second"][0],
        ms=row["token_ms"][0][0],
        name=path.stem,
        settings="\n".join(f"    c.{key} = {value!r}" for key, value in row["settings"].items()),
    )


def _cells(row: dict[str, Any]) -> list[str]:
    speed, fast, slow = row["tokens_per_second"]
    return [
        f"{row['number']}" + (" ZAYA1-base" if row["zaya1_base"] else ""),
        row["name"],
        f"{row['layers']}",
        f"{row['width']:,}",
        "{} / {}".format(*row["heads"]),
        f"{speed:,.0f}",
        f"{slow:,.0f} to {fast:,.0f}",
        *(f"{likely:.2f}" for likely, *_ in row["token_ms"]),
        *(f"{likely:.0f}" for likely, *_ in row["prompt_ms"]),
        byte_size(row["memory"]),
        ", ".join(row["strains"]),
    ]


def document(result: dict[str, Any]) -> Page:
    """The front with the picture, ZAYA1-base beside it, all shapes, and what is assumed."""
    shapes = result["shapes"]
    front = sorted((row for row in shapes if row["front"]), key=lambda row: row["layers"])
    names = {
        row["number"]: f"{row['number']}: {row['name']}, {row['layers']} layers" for row in shapes
    }
    names |= {row["number"]: "ZAYA1-base" for row in shapes if row["zaya1_base"]}
    beside = Section(
        "ZAYA1-base is not near these budgets", notes=("It has 754M active and 8.3B weights.",)
    )
    if result["zaya1_base"]:
        compared = [
            [what, names[trains], f"{faster:+.1%}", names[answers], f"{sooner:+.1%}"]
            for what, trains, faster, answers, sooner in result["zaya1_base"]
        ]
        head = ("assumption", "trains fastest", "tokens/s", "answers first", "ms a token")
        beside = Section("ZAYA1-base beside it", BESIDE, [Table("By assumption", head, compared)])
    assumed = [[name, f"{value:.3g}", source] for name, value, source in result["assumed"]]
    return Page(
        f"Shapes for {result['devices']:,} {result['chip']}",
        about=(
            f"{result['date']}; near {result['active'] / 1e6:,.0f}M active and"
            f" {result['total'] / 1e9:,.2f}B weights without the embedding; vocabulary"
            f" {result['vocab']:,}, context {result['context']:,}. Answers are those of one device."
            f" {len(shapes)} shapes; {result['too_large']} more fit no device's memory."
        ),
        sections=[
            Section(
                "The front",
                OF_WHAT,
                [Table("From the shallowest on", HEAD, [_cells(row) for row in front])],
                below=picture.draw(result),
            ),
            beside,
            Section(
                "All shapes",
                tables=[Table("Fastest first", HEAD, [_cells(row) for row in shapes], folded=True)],
            ),
            Section("What this cannot see", notes=UNSEEN),
            Section(
                "Assumptions", tables=[Table("Rates", ("rate", "value", "source"), assumed, "code")]
            ),
        ],
        footer="Formulas, nothing was compiled or run; docs/design.md explains them.",
    )
