"""Matches log lines with rules, which are data (rules_process.toml, rules_kernel.toml).

    matcher = Matcher()                     of processes; Matcher("kernel") of the kernel's log
    matcher.feed(process, line)             [] or [Finding]
    Kernel(root).poll()                     findings in the kernel's lines since the last look

The first rule that fits wins, in the order of the file. A flood is counted: lines that differ in
numbers alone are reported at the 1st, the 10th, the 100th, ... with their count.
"""

import dataclasses
import functools
import os
import re
import tomllib
from pathlib import Path

from zaya_jax.cluster import events
from zaya_jax.cluster.events import Finding

KINDS = ("process", "kernel")
# characters of a line that are looked at: the time for some patterns grows with their square
LONGEST = 1024
SHOWN = 800  # and that a finding keeps
MOST_KINDS = 1000  # of lines that are counted apart; later ones are counted by their rule alone
READ = 1 << 20  # bytes of the kernel's log at one look
KMSG = "dev/kmsg"
_PCI = r"(?P<device>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_XID = rf"NVRM: Xid \((?:PCI:)?{_PCI}[^)]*\): "
# How libraries begin the message of an error, as a text that speaks of one does not.
_FAULT = (
    r"^(?=(?:\d{4}-\d\d-\d\d \S+ [EFW] \S+ )?(?:(?:[EFW]\d{4} .*?|\d{4}-\d\d-\d\d \S+ [EFW] \S+)\] "
    r"|error: |warning: |[\w.]*(?:Error|Exception)(?: \(.*?\))?: |[A-Z_]{5,}: |:\d+:\S+\.cpp |what\(\): "
    r"|\S+ \[\d+\] .*NCCL WARN |failed call to |slurmstepd: |srun: ))"
)
# Words that take a kernel's message back wherever they stand in it, and the strongest action that
# its rule may then call for; "" is none. ("page: Ignored" is a memory failure that could not be handled.)
_BUT = r"(?<!not )(?<!not be )\b"
TAKEN_BACK = (
    (re.compile(rf"(?i)(?<!page: ){_BUT}ignored\b"), ""),
    (re.compile(rf"(?i){_BUT}correct(?:ed|able)\b"), "note"),
    (
        re.compile(
            rf"(?i){_BUT}(?:recovered|recoverable|deferred|non-?fatal|contained|resolved|cleared"
            r"|restored|succeeded|successful(?:ly)?)\b"
        ),
        "warn",
    ),
)
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_RECORD = re.compile(r"^\d+,\d+,\d+,[^;\n]{0,80};")


@dataclasses.dataclass(frozen=True)
class LogRule:
    """One kind of line, whose pattern may name a `device` and a `process`.

    `unlike`: a line like `example` that is none. `consequence`: it follows from something
    elsewhere, and is never the first cause. `raised`: only as the end of a traceback.
    """

    name: str
    pattern: str
    group: str
    action: str
    example: str
    unlike: str = ""
    consequence: bool = False
    raised: bool = False

    @functools.cached_property
    def regex(self) -> re.Pattern:
        """The pattern, with its placeholders filled in."""
        pattern = self.pattern.replace("<xid>", _XID).replace("<fault>", _FAULT)
        return re.compile(pattern.replace("<pci>", _PCI))


@functools.cache
def load(kind: str) -> tuple[LogRule, ...]:
    """The rules for lines of a process or of the kernel, in their order."""
    text = Path(__file__).with_name(f"rules_{kind}.toml").read_text(encoding="utf-8")
    return tuple(LogRule(**fields) for fields in tomllib.loads(text)["rule"])


class Matcher:
    """Finds rules in lines, and counts."""

    def __init__(self, kind: str = "process"):
        self._rules, self._of_kernel = load(kind), kind == "kernel"
        self._in_traceback: dict[tuple[int, int], bool] = {}  # of a process's stream
        self._counts: dict[tuple[int, str, str], int] = {}

    def feed(self, process: int, line: str, stream: int = 2) -> list[Finding]:
        """The findings of a process's line."""
        raised = self._in_traceback.get((process, stream), False)
        begins = line.startswith(("Traceback (most recent call last)", '  File "'))
        self._in_traceback[process, stream] = begins or (raised and line[:1].isspace())
        line = line[:LONGEST].strip()
        for rule in self._rules:
            found = rule.regex.search(line)
            if found and (raised or not rule.raised):
                named = found.groupdict()
                # a line may name another process than its own
                whose = int(named.get("process") or process)
                return self._count(rule, whose, line, named.get("device") or "")
        return []

    def _count(self, rule: LogRule, process: int, line: str, device: str) -> list[Finding]:
        key = process, rule.name, _NUMBERS.sub("#", line)[:SHOWN] + device
        if key not in self._counts and len(self._counts) >= MOST_KINDS:
            key = process, rule.name, ""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        taken = [most for words, most in TAKEN_BACK if self._of_kernel and words.search(line)]
        action = min([rule.action, *taken], key=("", *events.ACTIONS).index)
        if not action or str(count).rstrip("0") != "1":  # no power of ten
            return []
        line = events.printable(line)
        seen = line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
        if count > 1:
            seen += f" ({count:,} such lines)"
        return [Finding(rule.name, rule.group, action, seen, process, device)]


class Kernel:
    """The kernel's log from now on; the first look only finds its end."""

    def __init__(self, root: str | Path = "/"):
        self._path, self._matcher = Path(root) / KMSG, Matcher("kernel")
        self._file: int | None = None
        self._said = False

    def poll(self) -> list[Finding]:
        """Findings since the last look; once, that the log cannot be read."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._file, 0, os.SEEK_END)
            return [
                found for line in self._lines(self._file) for found in self._matcher.feed(-1, line)
            ]
        except OSError as error:  # on some systems everybody may open it, and few may read it
            said, self._said = self._said, True
            seen = f"{self._path}: {error.strerror}"
            return [] if said else [Finding("kernel log unreadable", "note", "note", seen)]

    def _lines(self, file: int) -> list[str]:
        """The new records without their numbers; a record's further lines (` KEY=value`) say
        nothing more."""
        data = b""
        while len(data) < READ:
            try:
                part = os.read(file, 8192)
            except BlockingIOError:
                break
            # overwritten before it was read; the next read goes on after it
            except BrokenPipeError:
                continue
            if not part:
                break
            data += part
        lines = data.decode(errors="replace").split("\n")
        return [_RECORD.sub("", line) for line in lines if not line.startswith(" ")]
