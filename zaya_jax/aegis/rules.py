"""Finds the meaning of log lines by rules, which are data (rules_process.toml, rules_kernel.toml).

    matcher = Matcher()                     of processes; Matcher("kernel") of the kernel's log
    matcher.feed(process, line)             [] or [Finding]
    Kernel(root).look()                     findings in the kernel's lines since the last look
    first(seen)                             of (time, finding) of several processes, the one that began it

The first rule that fits wins, in the order of the file. A flood is counted: lines that differ in numbers alone
are found at the 1st, the 10th, the 100th, ... of them, with the count.
"""

import contextlib
import dataclasses
import errno
import functools
import os
import re
import stat
import tomllib
from collections.abc import Iterable
from pathlib import Path

from zaya_jax.aegis import events
from zaya_jax.aegis.events import Finding

KINDS = ("process", "kernel")
LONGEST = 1024  # characters of a line that are looked at: the time for some patterns grows with their square
SHOWN = 400  # and that a finding keeps
MOST_KINDS = 1000  # of lines that are counted apart; later ones are counted by their rule alone
READ = 1 << 20  # bytes of the kernel's log at one look
PLACES = ("dev/kmsg", "var/log/kern.log", "var/log/messages", "var/log/dmesg")
_PCI = r"(?P<device>[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_RECORD = re.compile(rb"^\d+,\d+,\d+,[^;\n]{0,80};")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of line, whose pattern may name a `device` and a `process`.

    `consequence`: it follows from something elsewhere, and is never the first cause.
    """

    name: str
    pattern: str
    group: str
    action: str
    example: str
    consequence: bool = False

    @functools.cached_property
    def regex(self) -> re.Pattern:
        """The pattern, with its placeholder filled in."""
        return re.compile(self.pattern.replace("<pci>", _PCI))


@functools.cache
def load(kind: str) -> tuple[Rule, ...]:
    """The rules for lines of a process or of the kernel, in their order."""
    text = Path(__file__).with_name(f"rules_{kind}.toml").read_text(encoding="utf-8")
    return tuple(Rule(**given) for given in tomllib.loads(text)["rule"])


@functools.cache
def consequences() -> frozenset[str]:
    """Names of the rules that are consequences."""
    return frozenset(rule.name for kind in KINDS for rule in load(kind) if rule.consequence)


class Matcher:
    """Finds rules in lines, and counts."""

    def __init__(self, kind: str = "process"):
        self._rules = load(kind)
        self._counts: dict[tuple[int, str, str], int] = {}

    def feed(self, process: int, line: str | bytes) -> list[Finding]:
        """The findings of a process's line; bytes need not be UTF-8."""
        if isinstance(line, bytes):
            line = line[: 4 * LONGEST].decode("utf-8", errors="replace")
        line = line[:LONGEST].strip()
        for rule in self._rules:
            found = rule.regex.search(line)
            if found:
                named = found.groupdict()
                whose = int(
                    named.get("process") or process
                )  # a line may be of another process than prints it
                return self._count(rule, whose, line, named.get("device") or "")
        return []

    def _count(self, rule: Rule, process: int, line: str, device: str) -> list[Finding]:
        key = process, rule.name, _NUMBERS.sub("#", line)[:SHOWN] + device
        if key not in self._counts and len(self._counts) >= MOST_KINDS:
            key = process, rule.name, ""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if str(count).strip("0") != "1":  # neither 1 nor 10 nor 100 ...
            return []
        line = events.printable(line)
        seen = line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
        if count > 1:
            seen += f" ({count:,} such lines)"
        return [Finding(rule.name, rule.group, rule.action, seen, process, device)]


def first(seen: Iterable[tuple[float, Finding]]) -> tuple[float, Finding] | None:
    """Of several processes' findings, with their times, the one that began it.

    That is the earliest which is no consequence, and more than a note; otherwise the first consequence, or note.
    """
    found = sorted(seen, key=lambda item: item[0])
    after = consequences()
    causes = [item for item in found if item[1].name not in after and item[1].action != "note"]
    return next(iter([*causes, *(item for item in found if item[1].name in after), *found]), None)


class Kernel:
    """The kernel's log from now on, of whichever of PLACES can be read; the first look only finds its end."""

    def __init__(self, root: str | Path = "/"):
        self._root, self._matcher = Path(root), Matcher("kernel")
        self._file: int | None = None
        self._path: Path | None = None
        self._rest, self._said = b"", False
        self.lost = 0  # times that the kernel overwrote lines before they were read

    def look(self) -> list[Finding]:
        """Findings since the last look; once, that nothing can be read."""
        if self._file is None:
            return self._open()
        return [found for line in self._lines() for found in self._matcher.feed(-1, _text(line))]

    def close(self) -> None:
        """Gives the file back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> list[Finding]:
        why = []
        for place in PLACES:
            path = self._root / place
            try:
                self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._file, 0, os.SEEK_END)
                if stat.S_ISCHR(os.fstat(self._file).st_mode):
                    # One read tells whether there is leave: the device opens for everybody on some systems.
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._file, 8192)
            except OSError as error:
                self.close()
                why.append(f"{path}: {error.strerror}")
                continue
            self._path = path
            return []
        if self._said:
            return []
        self._said = True
        return [Finding("kernel log unreadable", "note", "note", "; ".join(why))]

    def _lines(self) -> list[bytes]:
        assert self._file is not None and self._path is not None
        data = b""
        if not stat.S_ISCHR(os.fstat(self._file).st_mode):
            self._follow()
        while len(data) < READ:
            try:
                part = os.read(self._file, 8192)  # of /dev/kmsg: one record
            except BlockingIOError:
                break
            except OSError as error:
                if (
                    error.errno == errno.EPIPE
                ):  # overwritten before it was read; the next read goes on after it
                    self.lost += 1
                    continue
                self.close()  # gone: the next look opens whatever can be read then
                break
            if not part:
                break
            data += part
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-READ:]
        return lines

    def _follow(self) -> None:
        """After a log that was rotated, or cut."""
        assert self._file is not None and self._path is not None
        with contextlib.suppress(OSError):
            here, there = os.fstat(self._file), os.stat(self._path)
            if here.st_ino != there.st_ino:
                # What was written to the old one after the last look is read at the next: it is joined, not lost.
                old = os.read(self._file, READ)
                os.close(self._file)
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._rest += old
            elif os.lseek(self._file, 0, os.SEEK_CUR) > here.st_size:
                os.lseek(self._file, 0, os.SEEK_SET)


def _text(line: bytes) -> bytes:
    """A record's words: without the numbers of /dev/kmsg; its further lines (` KEY=value`) say nothing more."""
    return b"" if line.startswith(b" ") else _RECORD.sub(b"", line)
