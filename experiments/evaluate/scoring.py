"""Scores a model's text and tasks, and words the results, for `experiments.evaluate`."""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from zaya_jax import cli, library, schedule
from zaya_jax.checkpoint import source
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError
from zaya_jax.config.files import write
from zaya_jax.data import mix, pipeline
from zaya_jax.evaluate import harness, scorer, texts
from zaya_jax.hardware import host
from zaya_jax.model import zaya
from zaya_jax.progress import Progress
from zaya_jax.pytorch import any_model
from zaya_jax.report.document import Page, Section, Table
from zaya_jax.report.svg import Chart, Curve
from zaya_jax.text import sources as file_sources

ALL = "all"  # the row of all --data

# of lm-eval
CHAT_OPTIONS = ("apply_chat_template", "system_instruction", "fewshot_as_multiturn", "gen_kwargs")

COLORS = 6  # curves in a picture


def run(args: argparse.Namespace) -> int:
    """The program: several processes do the same, and share the scoring."""
    out = cli.out_folder(args.out, "the evaluation")
    tasks = [task.strip() for task in (args.tasks or "").split(",") if task.strip()]
    if args.tasks is not None and not tasks:
        raise UserError(f"--tasks={args.tasks} has no names; give task names separated by commas")
    if args.include_path and not Path(args.include_path).is_dir():
        raise UserError(f"--include_path={args.include_path} is not a folder")
    if tasks:
        harness.require()
    for name in ("include_path", "num_fewshot", "bos", *CHAT_OPTIONS):
        if not tasks and getattr(args, name) is not None:
            raise UserError(f"--{name} applies to tasks; give --tasks or omit it")
    check_names(args.data or [])
    folder, _ = any_model.place_of(args.model)
    if not args.data and not tasks and not any_model.is_run(folder):
        raise UserError(
            f"--model={args.model} is not a run and has no held-out text; give --data or --tasks"
        )
    return multihost.run_distributed(lambda: evaluate(args, out, tasks))


def evaluate(args: argparse.Namespace, out: Path, tasks: list[str]) -> int:
    """Scores, then the files."""
    host.keep_compiled()
    began = time.perf_counter()
    both = shared_file(args.data or [])
    model = library.load(args.model, mesh=args.mesh, dtype=args.dtype)
    if model.tokenizer is None:
        raise UserError(f"--model={args.model} has no tokenizer; put its tokenizer.json there")
    most = model.config.model.max_position_embeddings
    context = min(args.context or usual_context(model.config), most)
    notes = [f"Tasks: {', '.join(tasks)}."] if tasks else []
    if args.context and args.context > most:
        notes.append(
            f"--context={args.context} is above the model's {most} tokens: {most} are used."
        )
    if args.limit:
        notes.append(f"--limit={args.limit}: only this many documents of each are scored.")
    if args.num_fewshot is not None:
        notes.append(f"--num_fewshot={args.num_fewshot}")
    if tasks and (model.tokenizer.adds_bos if args.bos is None else args.bos):
        notes.append("Tasks' texts begin with the begin of document.")
    chat_options = {
        name: value for name in CHAT_OPTIONS if (value := getattr(args, name)) is not None
    }
    notes += [f"--{name}={value}" for name, value in chat_options.items()]
    skipped: list[str] = []
    data = {
        name: loss_on(model, name, found, context, args.tokens)
        for name, found in sources(model, args, tasks, skipped)
    }
    if both:
        notes.append(f"No row of all: {both}.")
    elif len(data) > 1:
        data = {ALL: texts.together(data.values()), **data}
    odd = [name for name, loss in data.items() if not math.isfinite(loss.loss)]
    if odd:
        notes.append(f"No finite loss, null in evaluation.json: {', '.join(odd)}.")
    if skipped:
        few = "; ".join(skipped[:3]) + ("; ..." if len(skipped) > 3 else "")
        notes.append(f"{len(skipped):,} samples were left out: {few}")
    if data:
        notes.append(
            f"Loss in windows of {context:,} tokens; longer documents in steps of half of that."
        )
    found = {}
    if tasks:
        found = harness.run(
            model,
            tasks,
            include_path=args.include_path,
            limit=args.limit,
            num_fewshot=args.num_fewshot,
            add_bos_token=args.bos,
            tokens=args.tokens,
            seed=args.seed,
            **chat_options,
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
        "data": {name: loss.figures() for name, loss in data.items()},
        "tasks": harness.figures(found),
        "notes": notes,
    }
    if multihost.is_writer():
        print(document(result).markdown())
        print(f"written: {save(out, result, found)}")
    return cli.DONE


def save(out: Path, result: dict[str, Any], found: dict[str, Any]) -> str:
    """Writes the files, and says where they are."""
    files = {
        "evaluation.md": document(result).markdown().encode(),
        "evaluation.json": (
            (json.dumps(harness.without_nan(result), indent=1, allow_nan=False) + "\n").encode()
        ),
        "evaluation.html": document(result).html().encode(),
        **({"samples.jsonl": harness.samples(found)} if found else {}),
    }
    out.mkdir(parents=True, exist_ok=True)
    if not found and (out / "evaluation.json").is_file():
        (out / "samples.jsonl").unlink(missing_ok=True)  # of the evaluation that is replaced
    for name, content in files.items():
        write(out / name, content)
    return f"{out}/{', '.join(files)}"


def check_names(paths: list[str]) -> None:
    """UserError if a --data is given twice, or has the name of the common row."""
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path) if os.path.exists(path) else path
        if real in seen:
            raise UserError(f"--data={path} is the same as --data={seen[real]}; name it once")
        seen[real] = path
    if ALL in paths and len(paths) > 1:
        raise UserError(f"--data={ALL} has the name of the common row; write --data=./{ALL}")


def shared_file(paths: list[str]) -> str:
    """Names a file that is in two --data, which the common row would count twice; otherwise ""."""
    seen: dict[object, str] = {}
    for path in paths:
        for file in texts.files_of(path):
            before = seen.setdefault(file_sources.identity(file), path)
            if before != path:
                return f"{file} is in {before} and in {path}"
    return ""


def sources(
    model: library.LanguageModel, args: argparse.Namespace, tasks: list[str], skipped: list[str]
) -> Iterator[tuple[str, Iterator[texts.Document]]]:
    """The rows of the table: each --data; without --data and tasks the held-out part of each source
    of the run."""
    assert model.tokenizer is not None
    for path in args.data or []:
        yield (
            path,
            texts.documents(path, model.tokenizer, args.text_field, args.limit, skipped.append),
        )
    if not args.data and not tasks:
        _require_its_data(model)
        for path in mix.plan_sources(model.config)[0]:
            yield (
                f"{path}, held out",
                texts.held_out(model.config, path, model.tokenizer, args.limit),
            )


def _require_its_data(model: library.LanguageModel) -> None:
    """UserError if a run's sources differ from those its checkpoint was trained on: its held-out
    text is then unknown."""
    assert model.tokenizer is not None
    folder, step = any_model.place_of(model.source)
    meta = source.read_meta(folder, step or 0)
    try:
        if "data" in meta:  # else it came from elsewhere and was not trained here
            pipeline.train_stream(model.config, model.tokenizer).set_state(meta["data"])
    except UserError:
        raise UserError(
            f"--model={model.source} was trained on other data than its sources now have, so its"
            " held-out text is unknown; restore them, or give --data"
        ) from None


def loss_on(
    model: library.LanguageModel,
    name: str,
    found: Iterator[texts.Document],
    context: int,
    tokens: int,
) -> texts.Loss:
    """The loss on some documents; process 0 says how far it is."""
    with Progress(desc=name, unit=" tokens", leave=False, disable=not multihost.is_writer()) as bar:
        loss = texts.evaluate(scorer.Scorer(model, tokens), found, context, bar.update)
    if not loss.tokens:
        raise UserError(f"{name} has no token to predict; give texts, or chats with an answer")
    return loss


def usual_context(config: Config) -> int:
    """The longest windows of the run's own evaluations."""
    return max(segment.phase.eval_seq_len for segment in schedule.make_plan(config).segments)


def document(result: dict[str, Any]) -> Page:
    """Losses by data, figures by task, the loss by place in the document."""
    about = f"{result['date']}, {result['device']}, jax {result['jax']}, {result['seconds']:,.1f} s"
    tasks = [
        [task, name, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "–"]
        for task, figures in result["tasks"].items()
        for name, (value, error) in figures.items()
    ]
    losses = [_loss(name, found) for name, found in result["data"].items()]
    head = (
        "data",
        "documents",
        "tokens",
        "loss",
        "perplexity",
        "bits per byte",
        "likeliest token is right",
    )
    tables = [Table("Loss on text", head, losses)] if losses else []
    tables += (
        [Table("Tasks", ("task", "metric", "value", "standard error"), tasks)] if tasks else []
    )
    sections = [Section("Figures", "", tables), _by_place(result["data"])]
    footer = "docs/evaluation.md says which tokens count."
    return Page(
        f"Evaluation of {result['model']}",
        "",
        about,
        sections,
        warnings=result["notes"],
        footer=footer,
    )


def _loss(name: str, found: dict[str, Any]) -> list[str]:
    # None: the tokens stand for no byte, as of answers that are empty
    bits = found["bits_per_byte"]
    return [
        name,
        f"{found['documents']:,}",
        f"{found['tokens']:,}",
        f"{found['loss']:.4f}",
        f"{found['perplexity']:,.3f}",
        "–" if bits is None else f"{bits:.4f}",
        f"{found['accuracy']:.1%}",
    ]


def _by_place(data: dict[str, Any]) -> Section:
    """The loss by the number of tokens before, by source; each bucket stands where it begins."""
    points = {
        name: [
            (one["from"], one["loss"]) for one in found["by_position"] if math.isfinite(one["loss"])
        ]
        for name, found in list(data.items())[:COLORS]
    }
    lines = [
        Curve(f"{name}, mean {data[name]['loss']:.4g}, at the last place", own, i)
        for i, (name, own) in enumerate(points.items())
        if len(own) > 1
    ]
    if not lines:
        return Section("By place")
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    room = 0.06 * (max(ys) - min(ys))
    note = "Place 4 is of tokens with 4 to 7 before them, place 8 of those with 8 to 15, and so on."
    if left_out := len(data) - len(lines):
        note += (
            f" In the table alone: {left_out} with one place, without a finite loss, or after the"
            f" first {COLORS}."
        )
    picture = Chart(
        "Loss by place in the document, nats",
        lines,
        (min(xs), max(xs)),
        (min(ys) - room, max(ys) + room),
        log_x=True,
        over="place",
        note=note,
    )
    return Section(
        "By place",
        "How much the model gains from the text before a token.",
        pictures=picture.draw(),
    )
