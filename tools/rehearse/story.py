"""A story of programs: each is run as a user would, promises are noted as kept or broken, a page
tells it all."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from zaya_jax.report.document import Page, Section, Table, write_page


class Failed(Exception):
    """A program ended otherwise than it must."""


def figures(workdir: Path, key: str) -> list[tuple[float, float]]:
    """A figure by step; a repeated step counts as it was the last time."""
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return sorted({row["step"]: row[key] for row in rows if key in row}.items())


def arrow(points: list[tuple[float, float]]) -> str:
    """The first value and the last."""
    return f"{points[0][1]:.4g} → {points[-1][1]:.4g}"


class Story:
    """The folder with the programs' output, and the story so far."""

    def __init__(self, out: Path):
        self.out, self.failed = out, ""
        self._sections: list[Section] = []
        # the promise, whether it was kept, the figures
        self._promises: list[tuple[str, str, str]] = []
        self._spent: list[tuple[str, str]] = []
        (out / "log").mkdir(parents=True)

    def start(self, name: str, *options: object, devices: int = 1, **more: Any) -> subprocess.Popen:
        """Starts `python -m NAME OPTIONS`, or `-c` with a text, with its output in the log."""
        self._log = self.out / "log" / f"{len(list(self.out.glob('log/*'))):02d}.txt"
        command = [sys.executable, *([] if name == "-c" else ["-m"]), name, *map(str, options)]
        variables = {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
        }
        with self._log.open("w") as log:
            print("$", shlex.join(command), file=log, flush=True)
            pipes: dict[str, Any] = {"stdout": log, "stderr": log, "text": True} | more
            return subprocess.Popen(command, env=os.environ | variables, **pipes)

    def program(
        self,
        name: str,
        *options: object,
        ok: Sequence[int] = (0,),
        given: str = "",
        devices: int = 1,
    ) -> str:
        """Runs a program, started as `start` does, to its end; returns what it printed."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        running = self.start(name, *options, devices=devices, **pipes)
        output = running.communicate(given)[0]
        with self._log.open("a") as log:
            log.write(output)
        if running.returncode not in ok:
            raise Failed(f"exit code {running.returncode}, see {self._log}")
        return output

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"  {text}", flush=True)

    def tell(self, title: str, text: str, **parts: Any) -> None:
        """Adds a section."""
        self._sections.append(Section(title, text, **parts))

    def promise(self, what: str, kept: bool, figures: str) -> None:
        """Notes whether a promise was kept."""
        verdict = "kept" if kept else "BROKEN"
        self._promises.append((what, verdict, figures))
        self.say(f"{verdict}: {what} ({figures})")

    def visit(self, stations: Sequence[Callable[[Self], None]]) -> None:
        """Visits one station after the other, until one fails."""
        for station in stations:
            name = station.__name__.replace("_", " ")
            print(f"{name}: {(station.__doc__ or '').strip()}", flush=True)
            began = time.monotonic()
            try:
                station(self)
            except Failed as error:
                self.failed = f"{name}: {error}"
                self.say(f"FAILED: {error}")
            self._spent.append((name, f"{time.monotonic() - began:,.0f} s"))
            if self.failed:
                break

    def written(self, title: str, about: str) -> bool:
        """Writes the page, and returns whether all promises were kept."""
        rows = self._promises
        broken = [what for what, verdict, _ in rows if verdict == "BROKEN"]
        promises = Section(
            "Promises", tables=[Table("Each promise", ("promise", "", "figures"), rows, "code")]
        )
        times = Section("Time", tables=[Table("Stations", ("station", "time"), self._spent)])
        warnings = [f"broken: {what}" for what in broken]
        if self.failed:
            warnings.insert(0, self.failed)
        footer = "The commands and their output are in log/."
        page = Page(
            title, "", about, [promises, *self._sections, times], warnings=warnings, footer=footer
        )
        (self.out / "rehearsal.md").write_text(page.markdown(), encoding="utf-8")
        place = write_page(self.out / "rehearsal.html", page.html)
        print(f"{len(rows) - len(broken)} of {len(rows)} promises kept. Page: {place}")
        return not warnings
