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
    from zaya_jax.report.document import check_target, write_page  # 0.5 s that --help does not need

    runs: list[Path] = args.RUN
    check_runs(runs)
    usual = runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html")
    target = check_target(args.out, "--out") if args.out else usual
    print(f"Report: {write_page(target, lambda: drawn(runs))}")
    return cli.DONE


def drawn(paths: list[Path]) -> str:
    """The page of one run or of several."""
    from experiments.report.compare import comparison
    from zaya_jax.report.run_page import run_document

    runs = [with_metrics(path) for path in paths]
    return (run_document(runs[0]) if len(runs) == 1 else comparison(runs)).html()


def check_runs(runs: list[Path]) -> None:
    """UserError for a folder that is not a run's, for repeated runs and for too many."""
    from experiments.report.compare import MOST_RUNS

    seen: dict[Path, Path] = {}
    for run in runs:
        if not run.is_dir():
            raise UserError(
                f"RUN {str(run)!r} is not a folder; give a run's folder (its --workdir)"
            )
        if not any((run / name).is_file() for name in ("config.json", "metrics.jsonl")):
            raise UserError(
                f"RUN {str(run)!r} has neither config.json nor metrics.jsonl, so it is not a run's"
                " folder; give a run's --workdir"
            )
        same = seen.setdefault(run.resolve(), run)
        if same is not run:
            raise UserError(
                f"RUN {str(run)!r} is the same run as {str(same)!r}; give each run once"
            )
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs are too many for one page; give at most {MOST_RUNS}")


def with_metrics(path: Path) -> "Workdir":
    """Reads a run; UserError if no step is recorded yet."""
    from zaya_jax.report.read import read_workdir

    run = read_workdir(path)
    if not run.recorded.size:
        raise UserError(
            f"RUN {str(path)!r} has no metrics yet (no whole line in {path / 'metrics.jsonl'}); try"
            " again later"
        )
    return run


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
