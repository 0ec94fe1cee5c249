"""Draws a run's report anew, compares several runs on one page, or serves the page while a run goes on.

    python -m experiments.report RUN [--out=FILE]              one run: its page, RUN/report.html
    python -m experiments.report RUN RUN ... [--out=FILE]      several in common pictures: comparison.html
    python -m experiments.report RUN [RUN ...] --serve[=PORT]  the same at http://127.0.0.1:PORT/, following the runs

A RUN is the folder of a run. Pages need no network and no program but a browser. docs/report.md says what is on them.
"""

import argparse
import functools
import sys
from pathlib import Path

from zaya_jax import cli
from zaya_jax.config import UserError
from zaya_jax.report import compare, page, write_report
from zaya_jax.report.follow import Followed
from zaya_jax.report.read import Workdir
from zaya_jax.report.serve import serve


def main() -> int:
    """One page, or one that is served."""
    parser = cli.Parser(prog="python -m experiments.report", description=__doc__)
    parser.add_argument("RUN", nargs="+", type=cli.path, help="the folder of a run")
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="the page; by default RUN/report.html, of several comparison.html",
    )
    parser.add_argument(
        "--serve", nargs="?", type=port, const=0, metavar="PORT",
        help="serve the page on this machine alone and follow the runs; without PORT at any that is free",
    )  # fmt: skip
    args = parser.parse_args()
    runs: list[Path] = args.RUN
    check_runs(runs)
    if args.serve is not None:
        if args.out:
            raise UserError(f"--out={args.out} and --serve exclude each other; give one of them")
        say = functools.partial(print, flush=True)
        serve(Watched(runs), args.serve, say)
        return cli.DONE
    for run in runs:
        check_metrics(run)
    target = page.check_target(args.out, "--out") if args.out else Path("comparison.html")
    if len(runs) == 1 and not args.out:
        target = write_report(runs[0])
    else:
        page.write_page(target, lambda: drawn([Followed(run).read()[0] for run in runs]))
    print(f"Report: {target}")
    return cli.DONE


def port(text: str) -> int:
    """--serve takes the next word for its port, also where that is a run."""
    if text.isascii() and text.isdigit() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{text[:100]!r} is no port from 0 to 65535; name the runs before --serve"
    )


def check_runs(runs: list[Path]) -> None:
    """UserError for what is no run's folder, the same run twice, too many."""
    seen: dict[Path, Path] = {}
    for run in runs:
        if not run.is_dir():
            raise UserError(f"RUN {str(run)!r} is no folder; give the folder of a run (its --workdir)")
        if not any((run / name).is_file() for name in ("config.json", "metrics.jsonl")):
            raise UserError(
                f"RUN {str(run)!r} has neither config.json nor metrics.jsonl, so it is no run's folder; "
                "give a run's --workdir"
            )
        same = seen.setdefault(run.resolve(), run)
        if same is not run:
            raise UserError(f"RUN {str(run)!r} is the same run as {str(same)!r}; give each run once")
    if len(runs) > compare.MOST_RUNS:
        raise UserError(f"{len(runs)} runs are more than one page shows; give at most {compare.MOST_RUNS}")


def check_metrics(run: Path) -> None:
    """UserError where no step is recorded yet."""
    path = run / "metrics.jsonl"
    if not path.is_file() or not Followed(run).begun():
        raise UserError(
            f"RUN {str(run)!r} has no metrics yet (no whole line in {path}); "
            "come again after its first steps, or watch it with --serve"
        )


def drawn(runs: list[Workdir]) -> str:
    """The page of one run or of several."""
    return page.shell(*titled(runs))


def titled(runs: list[Workdir]) -> tuple[str, dict[str, str]]:
    """Its title and its parts."""
    if len(runs) == 1:
        return page.title(runs[0]), page.parts(runs[0])
    return compare.title(runs), compare.parts(runs)


class Watched:
    """Runs that go on; a call gives the page's title and parts, None where nothing is new."""

    def __init__(self, paths: list[Path]):
        self._runs = [Followed(path) for path in paths]

    def __call__(self) -> tuple[str, dict[str, str]] | None:
        found = [run.read() for run in self._runs]
        return titled([run for run, _ in found]) if any(new for _, new in found) else None


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
