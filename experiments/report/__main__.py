"""Draws a run's report anew, or compares several runs on one page.

    python -m experiments.report RUN [--out=FILE]          one run: its page, RUN/report.html
    python -m experiments.report RUN RUN ... [--out=FILE]  several in common pictures: comparison.html

A RUN is the folder of a run, which may still go on; TensorBoard follows it live (`tensorboard
--logdir=RUN`). Pages need only a browser. docs/report.md describes them.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zaya_jax import cli
from zaya_jax.config import UserError

if TYPE_CHECKING:
    from zaya_jax.report.read import Workdir


def main() -> int:
    """One page."""
    parser = cli.Parser(prog="python -m experiments.report", description=__doc__)
    parser.add_argument("RUN", nargs="+", type=cli.path, help="the folder of a run")
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="the page; by default RUN/report.html, or comparison.html for several runs",
    )
    args = parser.parse_args()
    from experiments.report.compare import MOST_RUNS  # 0.5 s that --help does not need
    from zaya_jax.report.document import write_page

    runs: list[Path] = args.RUN
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs are too many for one page; give at most {MOST_RUNS}")
    target = Path("comparison.html") if len(runs) > 1 else runs[0] / "report.html"
    if args.out:
        target = args.out
        if target.suffix.lower() not in (".html", ".htm"):
            raise UserError(
                f"--out={target} does not end in .html; the page is HTML, and other files must not"
                " be lost"
            )
    print(f"Report: {write_page(target, lambda: drawn(runs))}")
    return cli.DONE


def drawn(paths: list[Path]) -> str:
    """The page of one run or of several."""
    from experiments.report.compare import comparison
    from zaya_jax.report.run_page import run_document

    runs = [with_metrics(path) for path in paths]
    page = run_document(runs[0]) if len(runs) == 1 else comparison(runs)
    return page.html()


def with_metrics(path: Path) -> "Workdir":
    """Reads a run; UserError if no step is recorded yet."""
    from zaya_jax.report.read import read_workdir

    run = read_workdir(path)
    if not run.recorded.size:
        raise UserError(
            f"RUN {str(path)!r} has no metrics (no whole line in {path / 'metrics.jsonl'}); give"
            " the folder of a run, or try again later"
        )
    return run


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
