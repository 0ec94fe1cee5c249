"""Draws a run's report anew, or compares several runs on one page.

    python -m experiments.report RUN [--out=FILE]          one run: its page, RUN/report.html
    python -m experiments.report RUN RUN ... [--out=FILE]  several in common pictures: comparison.html

A RUN is the folder of a run, which may still go on; TensorBoard follows it live (`tensorboard
--logdir=RUN`). Pages need only a browser. docs/report.md describes them.
"""

import sys
from pathlib import Path

from zaya_jax import cli
from zaya_jax.config import UserError


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
    from experiments.report.compare import MOST_RUNS, drawn  # 0.5 s that --help does not need
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


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
