"""Evaluates a model: its loss on any text, and lm-eval-harness tasks.

    python -m experiments.evaluate --model=runs/tiny --out=DIR [--data=FILES_OR_PREPARED ...] [--tasks=NAME,NAME]

--model is a run's folder, FOLDER@STEP, a directory of transformers, or OWNER/NAME on the hub.
Without --data and --tasks the run's held-out text is scored. --data takes files, quoted globs and
directories as prepare_data does, or its output (then the held-out part is used), and may be
repeated: each is a row of the table. The program writes evaluation.md, evaluation.json,
evaluation.html and, with tasks, samples.jsonl. Several processes, started as for pretrain
(docs/clusters.md), share the work; each loads the whole model. docs/evaluation.md says which tokens
count.
"""

from zaya_jax import cli
from zaya_jax.config import fields


def parser() -> cli.Parser:
    """The options."""
    options = cli.Parser(prog="python -m experiments.evaluate", description=__doc__)
    add, whole = options.add_argument, cli.number(int, 1, 2**31 - 1)
    add("--model", required=True, metavar="MODEL", help=f"the model: {fields.MODEL_FORMS}")
    options.add_own_parts()
    add("--out", required=True, metavar="DIR", help="the folder for the results")
    add("--data", action="append", metavar="PATH", help="text to score; may be repeated")
    add("--tasks", metavar="NAMES", help="lm-eval-harness tasks, separated by commas")
    add("--include_path", metavar="DIR", help="a folder with tasks of your own")
    add("--limit", type=whole, metavar="N", help="maximum of documents of each --data and task")
    add(
        "--num_fewshot",
        type=cli.number(int, 0, 1000),
        metavar="N",
        help="examples before each question of a task",
    )
    add("--context", type=whole, metavar="N", help="tokens of a window; by default the run's own")
    add("--text_field", metavar="NAME", help="field with the text in JSONL and Parquet; text")
    add(
        "--bos",
        action="store_true",
        default=None,
        help="start tasks' texts with the begin of document",
    )
    add(
        "--no_bos",
        dest="bos",
        action="store_false",
        default=None,
        help="or without; by default as the tokenizer does",
    )
    add(
        "--apply_chat_template",
        action="store_true",
        default=None,
        help="ask tasks in the model's chat template",
    )
    add("--system_instruction", metavar="TEXT", help="tasks' system text")
    add(
        "--fewshot_as_multiturn",
        action="store_true",
        default=None,
        help="examples are turns of the chat",
    )
    add(
        "--gen_kwargs",
        metavar="K=V,...",
        help="generation options over the tasks' own, such as temperature=0.5",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of products; by default the run's, float32 if imported",
    )
    add("--tokens", type=whole, default=8192, metavar="N", help="tokens per batch; 8192")
    add(
        "--mesh",
        type=cli.mesh,
        metavar="AXIS=N,...",
        help="such as data=2,expert=4; by default one device",
    )
    add("--seed", type=cli.number(int, 0, 2**31 - 1), metavar="N", help="for tasks that sample; 0")
    return options


def main() -> int:
    """The program: several processes do the same, and share the scoring."""
    args = parser().parse_args()
    from experiments.evaluate import scoring  # imports JAX, 2 s that --help does not need

    return scoring.run(args)


if __name__ == "__main__":
    cli.leave(cli.exit_code(main))
