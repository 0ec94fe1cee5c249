"""Scores a model's text and tasks, and writes the results, for `experiments.evaluate`."""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from zaya_jax import cli, library, schedule
from zaya_jax.checkpoint import source
from zaya_jax.cluster import multihost
from zaya_jax.config import UserError
from zaya_jax.config.files import write
from zaya_jax.data import mix, pipeline
from zaya_jax.evaluate import harness, scorer, texts
from zaya_jax.hardware import host
from zaya_jax.model import zaya
from zaya_jax.progress import Progress
from zaya_jax.pytorch import any_model
from zaya_jax.report.document import Page, Section, Table
from zaya_jax.report.svg import Chart, Curve
from zaya_jax.text.tokenizers import Tokenizer

# of lm-eval
CHAT_OPTIONS = ("apply_chat_template", "system_instruction", "fewshot_as_multiturn", "gen_kwargs")

COLORS = 6  # curves in a picture
LOSS_HEAD = (
    "data",
    "documents",
    "tokens",
    "loss",
    "perplexity",
    "bits per byte",
    "likeliest token is right",
)


def run(args: argparse.Namespace) -> int:
    """The program: several processes do the same, and share the scoring."""
    out = cli.out_folder(args.out, "the evaluation")
    tasks = [task.strip() for task in (args.tasks or "").split(",") if task.strip()]
    if args.tasks is not None and not tasks:
        raise UserError(f"--tasks={args.tasks} has no names; give task names separated by commas")
    if args.text_field is not None and not args.data:
        raise UserError("--text_field applies to files of --data; give these or omit it")
    if args.context and tasks and not args.data:
        raise UserError("--context applies to windows of --data; give that or omit it")
    if tasks:
        harness.require()
    for name in ("include_path", "num_fewshot", "bos", "seed", *CHAT_OPTIONS):
        if not tasks and getattr(args, name) is not None:
            raise UserError(f"--{name} applies to tasks; give --tasks or omit it")
    folder, _ = any_model.resolve(args.model)
    if not args.data and not tasks and not any_model.is_run(folder):
        raise UserError(
            f"--model={args.model} is not a run and has no held-out text; give --data or --tasks"
        )
    return multihost.run_distributed(lambda: evaluate(args, out, tasks))


def evaluate(args: argparse.Namespace, out: Path, tasks: list[str]) -> int:
    """Scores, then writes the files."""
    host.keep_compiled()
    began = time.perf_counter()
    model = library.load(args.model, mesh=args.mesh, dtype=args.dtype, **cli.own_parts(args))
    if model.tokenizer is None:
        raise UserError(f"--model={args.model} has no tokenizer; put its tokenizer.json there")
    tokenizer = model.tokenizer
    longest = model.config.model.max_position_embeddings
    # By default the longest windows of the run's own evaluations.
    phases = [segment.phase for segment in schedule.make_plan(model.config).segments]
    usual = max(phase.eval_seq_len for phase in phases)
    context = min(args.context or usual, longest)
    notes = option_notes(args, longest, tokenizer)
    skipped: list[str] = []
    data = {
        name: loss_on(model, name, documents, context, args.tokens)
        for name, documents in sources(model, tokenizer, args, skipped)
    }
    not_finite = [name for name, figures in data.items() if not math.isfinite(figures["loss"])]
    if not_finite:
        notes.append(f"No finite loss, null in evaluation.json: {', '.join(not_finite)}.")
    if skipped:
        examples = "; ".join(skipped[:3])
        if len(skipped) > 3:
            examples += "; ..."
        notes.append(f"{len(skipped):,} samples were left out: {examples}")
    if data:
        notes.append(
            f"Loss in windows of {context:,} tokens; longer documents in steps of half of that."
        )
    task_results = {}
    if tasks:
        chat_options = {name: getattr(args, name) for name in CHAT_OPTIONS}
        task_results = harness.run(
            model,
            tasks,
            include_path=args.include_path,
            limit=args.limit,
            num_fewshot=args.num_fewshot,
            add_bos_token=args.bos,
            tokens=args.tokens,
            seed=args.seed or 0,
            **{name: value for name, value in chat_options.items() if value is not None},
        )
    result = {
        "model": model.source,
        "parameters": zaya.param_counts(model.config.model),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "compute": model.config.precision.compute,
        "seconds": time.perf_counter() - began,
        "context": context,
        "data": data,
        "tasks": harness.figures(task_results),
        "notes": notes,
    }
    if multihost.is_writer():
        page = document(result)
        print(page.markdown())
        print(f"written: {save(out, page, result, task_results)}")
    return cli.DONE


def option_notes(args: argparse.Namespace, longest: int, tokenizer: Tokenizer) -> list[str]:
    """What the options have decided, for the report."""
    notes = [f"Options: {shlex.join(sys.argv[1:])}"]
    if args.context and args.context > longest:
        notes.append(
            f"--context={args.context} is above the model's {longest} tokens: {longest} are used."
        )
    begins_with_bos = tokenizer.adds_bos if args.bos is None else args.bos
    if args.tasks and begins_with_bos:
        notes.append("Tasks' texts begin with the begin of document.")
    return notes


def save(out: Path, page: Page, result: dict[str, Any], task_results: dict[str, Any]) -> str:
    """Writes the files, and says where they are."""
    figures = json.dumps(harness.without_nan(result), indent=1, allow_nan=False) + "\n"
    files = {
        "evaluation.md": page.markdown().encode(),
        "evaluation.json": figures.encode(),
        "evaluation.html": page.html().encode(),
    }
    if task_results:
        files["samples.jsonl"] = harness.sample_lines(task_results)
    out.mkdir(parents=True, exist_ok=True)
    if not task_results and (out / "evaluation.json").is_file():
        (out / "samples.jsonl").unlink(missing_ok=True)  # of the evaluation that is replaced
    for name, content in files.items():
        write(out / name, content)
    return f"{out}/{', '.join(files)}"


def sources(
    model: library.LanguageModel, tokenizer: Tokenizer, args: argparse.Namespace, skipped: list[str]
) -> Iterator[tuple[str, Iterator[texts.ScoredDocument]]]:
    """The rows of the table: each --data; without --data and tasks the held-out part of each source
    of the run."""
    for path in args.data or []:
        field = args.text_field or "text"
        yield path, texts.documents(path, tokenizer, field, args.limit, skipped.append)
    if not args.data and not args.tasks:
        _require_its_data(model, tokenizer)
        for path in mix.plan_sources(model.config)[0]:
            documents = texts.held_out(model.config, path, tokenizer, args.limit)
            yield f"{path}, held out", documents


def _require_its_data(model: library.LanguageModel, tokenizer: Tokenizer) -> None:
    """UserError if a run's sources differ from those its checkpoint was trained on: its held-out
    text is then unknown."""
    folder, step = any_model.resolve(model.source)
    meta = source.read_meta(folder, step or 0)
    try:
        if "data" in meta:  # else it came from elsewhere and was not trained here
            pipeline.train_stream(model.config, tokenizer).set_state(meta["data"])
    except UserError:
        raise UserError(
            f"--model={model.source} was trained on other data than its sources now have, so its"
            " held-out text is unknown; restore them, or give --data"
        ) from None


def loss_on(
    model: library.LanguageModel,
    name: str,
    documents: Iterator[texts.ScoredDocument],
    context: int,
    tokens: int,
) -> dict[str, Any]:
    """The figures of some documents; process 0 says how far it is."""
    with Progress(desc=name, unit=" tokens", leave=False, disable=not multihost.is_writer()) as bar:
        figures = texts.evaluate(scorer.Scorer(model, tokens), documents, context, bar.update)
    if not figures["tokens"]:
        raise UserError(f"{name} has no token to predict; give texts, or chats with an answer")
    return figures


def document(result: dict[str, Any]) -> Page:
    """Losses by data, figures by task, the loss by place in the document."""
    about = f"{result['date']}, {result['device']}, jax {result['jax']}, {result['seconds']:,.1f} s"
    tables = []
    losses = [_loss_row(name, figures) for name, figures in result["data"].items()]
    if losses:
        tables.append(Table("Loss on text", LOSS_HEAD, losses))
    tasks = []
    for task, figures in result["tasks"].items():
        for name, (value, error) in figures.items():
            tasks.append([task, name, f"{value:.4f}", "–" if error is None else f"{error:.4f}"])
    if tasks:
        tables.append(Table("Tasks", ("task", "metric", "value", "standard error"), tasks))
    return Page(
        f"Evaluation of {result['model']}",
        "",
        about,
        [Section("Figures", "", tables), _by_place(result["data"])],
        warnings=result["notes"],
        footer="docs/evaluation.md says which tokens count.",
    )


def _loss_row(name: str, figures: dict[str, Any]) -> list[str]:
    # None: the tokens stand for no byte, as of answers that are empty
    bits = figures["bits_per_byte"]
    return [
        name,
        f"{figures['documents']:,}",
        f"{figures['tokens']:,}",
        f"{figures['loss']:.4f}",
        f"{figures['perplexity']:,.3f}",
        "–" if bits is None else f"{bits:.4f}",
        f"{figures['accuracy']:.1%}",
    ]


def _by_place(data: dict[str, Any]) -> Section:
    """The loss by the number of tokens before, by source; each bucket stands where it begins."""
    lines = []
    for color, (name, figures) in enumerate(list(data.items())[:COLORS]):
        points = [
            (bucket["from"], bucket["loss"])
            for bucket in figures["by_position"]
            if math.isfinite(bucket["loss"])
        ]
        if len(points) > 1:
            label = f"{name}, mean {figures['loss']:.4g}, at the last place"
            lines.append(Curve(label, points, color))
    if not lines:
        return Section("By place")
    note = "Place 4 is of tokens with 4 to 7 before them, place 8 of those with 8 to 15, and so on."
    missing = len(data) - len(lines)
    if missing:
        note += (
            f" In the table alone: {missing} with one place, without a finite loss, or after the"
            f" first {COLORS}."
        )
    title = "Loss by place in the document, nats"
    picture = Chart(title, lines, log_x=True, over="place", note=note)
    return Section(
        "By place",
        "How much the model gains from the text before a token.",
        pictures=picture.draw(),
    )
