"""How good a model is: its loss on any text, and the tasks of lm-eval-harness.

    python -m experiments.evaluate --model=runs/tiny --out=DIR [--data=FILES_OR_PREPARED ...] [--tasks=NAME,NAME]

--model is a run's folder (FOLDER@STEP: of that step), or a directory of transformers. Without --data and --tasks it is
the run's own held-out text. --data are files, quoted globs and directories as prepare_data takes them, or what it has
prepared (its held-out part); several may be given, each is a row of the table. Written are evaluation.md,
evaluation.json and evaluation.html. docs/evaluation.md says what is counted.
"""

import json
import sys
import time
from typing import Any

import jax
from tqdm import tqdm

from zaya_jax import cli, library
from zaya_jax.config import UserError, shown
from zaya_jax.config.files import write
from zaya_jax.data import pipeline
from zaya_jax.evaluate import harness, scorer, texts
from zaya_jax.hardware import host
from zaya_jax.model import zaya
from zaya_jax.report import evaluation as page


def main() -> int:
    """Scores, then three files."""
    args = parser().parse_args()
    out = cli.out_folder(args.out, "the evaluation")
    tasks = [task for task in (args.tasks or "").split(",") if task]
    if tasks:
        harness.require()
    host.keep_compiled()
    began = time.perf_counter()
    model = library.load(args.model, mesh=_mesh(args.mesh))
    if model.tokenizer is None:
        raise UserError(
            f"--model={args.model} has no tokenizer; put one beside it, as prepare_data's --tokenizer takes it"
        )
    paths = args.data or ([] if tasks else [f"{path}" for path in pipeline.plan_sources(model.config)[0]])
    most = model.config.model.max_position_embeddings
    context = min(args.context or model.config.data.seq_len, most)
    notes, data = [], dict[str, Any]()
    if args.context and args.context > most:
        notes.append(f"--context={args.context} is above the model's {most} tokens: {most} are taken")
    skipped: list[str] = []
    for path in dict.fromkeys(paths):
        data[path] = loss_on(model, path, context, args, skipped)
    if len(data) > 1:
        data = {"all": texts.together(data.values()), **data}
    if skipped:
        few = "; ".join(skipped[:3]) + ("; ..." if len(skipped) > 3 else "")
        notes.append(f"{len(skipped):,} samples were left out: {few}")
    if data:
        notes.append(f"Loss in windows of {context:,} tokens; longer documents in steps of half of that.")
    found = {}
    if tasks:
        found = harness.run(
            model, tasks, include_path=args.include_path, limit=args.limit, num_fewshot=args.num_fewshot,
            add_bos_token=args.bos, tokens=args.tokens, seed=args.seed,
        )  # fmt: skip
    result = {
        "model": model.source, "parameters": zaya.param_counts(model.config.model),
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "seconds": time.perf_counter() - began,
        "context": context, "data": {name: loss.told() for name, loss in data.items()}, "tasks": harness.figures(found),
        "notes": notes,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write(out / "evaluation.json", (json.dumps(result, indent=1) + "\n").encode())
    write(out / "evaluation.md", page.text(result).encode())
    write(out / "evaluation.html", page.render(result).encode())
    names = "evaluation.md, evaluation.json, evaluation.html"
    if found:
        write(out / "samples.jsonl", harness.samples(found))
        names += ", samples.jsonl"
    print(page.text(result))
    print(f"written: {out}/{names}")
    return cli.DONE


def parser() -> cli.Parser:
    """The options."""
    found = cli.Parser(prog="python -m experiments.evaluate", description=__doc__)
    add = found.add_argument
    whole = cli.number(int, 1, 2**31 - 1)
    add(
        "--model",
        required=True,
        metavar="DIR",
        help="a run's folder, FOLDER@STEP, or transformers' directory",
    )
    add("--out", required=True, metavar="DIR", help="the folder for the results")
    add("--data", action="append", metavar="PATH", help="text to score; several times for several rows")
    add("--tasks", metavar="NAMES", help="tasks of lm-eval-harness, with commas")
    add("--include_path", metavar="DIR", help="a folder with tasks of your own")
    add("--limit", type=whole, metavar="N", help="at most so many documents of each --data and of each task")
    add(
        "--num_fewshot",
        type=cli.number(int, 0, 1000),
        metavar="N",
        help="examples before each question of a task",
    )
    add(
        "--context",
        type=whole,
        metavar="N",
        help="tokens of a window; by default the seq_len of the training",
    )
    add("--text_field", default="text", metavar="NAME", help="of JSONL and Parquet; text")
    add(
        "--bos",
        action="store_true",
        help="tasks' texts begin with the begin of document; lm-eval's hf has none",
    )
    add("--tokens", type=whole, default=scorer.TOKENS, metavar="N", help=f"of a batch; {scorer.TOKENS}")
    add("--mesh", metavar="AXIS=N,...", help="such as data=2,expert=4; by default one device")
    add("--seed", type=cli.number(int, 0, 2**31 - 1), default=0, metavar="N", help="of what tasks sample; 0")
    return found


def loss_on(
    model: library.LanguageModel, path: str, context: int, args: Any, skipped: list[str]
) -> texts.Loss:
    """The loss on one --data, with a line of progress where somebody looks on."""
    assert model.tokenizer is not None
    found = texts.documents(path, model.tokenizer, args.text_field, args.limit, skipped.append)
    with tqdm(
        desc=path, unit=" tokens", unit_scale=True, disable=not sys.stderr.isatty(), leave=False
    ) as bar:
        return texts.evaluate(scorer.Scorer(model, args.tokens), found, context, model.tokenizer, bar.update)


def _mesh(given: str | None) -> dict[str, Any] | None:
    """{axis: size} of data=2,expert=4."""
    if not given:
        return None
    sizes = {}
    for part in given.split(","):
        name, _, value = part.partition("=")
        if not value.isdecimal():
            raise UserError(f"--mesh={shown(given)}: {shown(part)} is no AXIS=N, such as data=2,expert=4")
        sizes[name] = int(value)
    return sizes


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
