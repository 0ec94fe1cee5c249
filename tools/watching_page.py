"""Writes docs/watching.md, the page of rules and limits.

    python -m tools.watching_page > docs/watching.md

A test compares the page with this program's output.
"""

import sys
from collections.abc import Iterable, Sequence

from zaya_jax.aegis import accounts, log_rules, preflight
from zaya_jax.aegis.limits import LIMITS, Limit

HEAD = """\
<!-- Made by `python -m tools.watching_page > docs/watching.md`; edit zaya_jax/aegis or tools/watching_page.py. -->

# Watching

The agent of a node (`python -m experiments.supervise`) reads its processes' logs, the kernel's log and the hardware.
Each finding has a name, a class and an action. Classes: *critical* (a fault of one node), *distributed* (several
nodes see it, and the first one counts), *storage*, *data*, *user*, *numbers*, *note*. Actions: *note* (record it),
*warn* (it may explain a failure), *restart*, *exclude* (restart without the node if there is a spare), *stop* (a
person must act). All findings are events in `WORKDIR/aegis/events.jsonl`.

No GPU was available: rules are tested with lines from public reports and drivers' format strings, watchers with
recorded trees of sysfs and a simulated NVML. The check before a start ran only on CPU devices.

## Lines of logs

Rules are data: `zaya_jax/aegis/rules_process.toml` and `rules_kernel.toml`. The first matching rule wins, in the
order below. Words of a kernel's message that take it back ("corrected", "recovered", "deferred", "non-fatal", "ignored"
and the like) lower its action to a warning, a note or nothing. A Python exception counts as the end of a traceback
only, a library's message in a library's form only. A line is read up to {longest:,} characters.
Lines that differ only in numbers are reported at the 1st, 10th, 100th, ... of them, with their count. With several
processes, the first cause is the earliest finding that is neither a note nor a *consequence*, a line that a process
prints when another one is gone. A process's exit shows that
it died, and its lines explain why; by themselves they act only if a device must not be used again.

The kernel's log is `/dev/kmsg`, from the agent's start on. It needs `kernel.dmesg_restrict=0` or CAP_SYSLOG. If it is
not readable, the agent says so once.
"""

HARDWARE = """\
## Hardware

The agent reads the hardware every few seconds. A counter is judged by its growth within a window, never by its value
before the run. A level must hold for several readings in a row, and is reported once. A counter that falls
starts again. A file without permission or without a number is reported once. Each kind of hardware has its own
thread, so a driver that hangs is a finding and delays nothing else.

AMD's GPUs are read from sysfs (`/sys/class/drm/card*/device`), NVIDIA's by NVML if `nvidia-ml-py` is installed, ports
of InfiniBand and RoCE from `/sys/class/infiniband`.
"""

PREFLIGHT = """\
## The check before a start

`zaya_jax.aegis.preflight.check` runs in under {seconds:.0f} s, in separate processes:

| test | how | finding |
|---|---|---|
| devices | as many as expected | gpu missing |
| products | bfloat16 and float32 products of whole numbers, whose sums are exact in any order | gpu computes wrongly |
| watchers | one reading | as above |
| any test | no answer in time, or the process died | check of ... hangs, check of ... failed |

Links are tested in pairs along a ring, in two rounds of disjoint pairs (three for an odd number of nodes): two
processes exchange known numbers, check them, and measure. A node whose tests all fail is named; a pair that fails
although both succeed with others is a bad link. With only two nodes the culprit cannot be determined. A link below
{slow_link:.0%} of the median is slow.
"""

TIME = """\
## Where the time goes

The report (`report.html`, and `python -m experiments.supervise report --workdir=DIR`) assigns every second from the
first start to the last event to exactly one use; a test checks the sum for random histories. **Goodput** is the time
of steps whose updates are still in the run, divided by the supervised time. It is unknown if a start recorded
nothing, and the page says so.

| use | meaning |
|---|---|
{uses}

*Found in* counts from the fault until it was noticed, *recovered in* from the fault to the first new step; *time lost*
adds the repeated steps.
"""

NOTIFY = """
## A command at each event

The leading agent runs `--command` at each event, with the event as JSON on its standard input and `ZAYA_EVENT` (kind),
`ZAYA_NODE`, `ZAYA_GROUP` and `ZAYA_TEXT` (one line) in its environment. Nothing waits for it; failures and dropped
events are counted. Notes, and lines of class *user* that explain no end, are not passed on. A webhook is such a
command:

    --command="curl -sf -m 10 -H 'Content-Type: application/json' --data-binary @- https://HOST/HOOK"

So is a script that drains the node of an `excluded` event or sends figures to the site's monitoring.
"""

MEANINGS = {
    "step": "steps whose updates are still in the run",
    "start": "before the first step of a start that did not follow a fault",
    "compile": "compiling, before the first step of such a start",
    "evaluate": "evaluation",
    "save": "waiting for saves",
    "end": "the end: last save, sample, report",
    "redone": "steps that were repeated after going back, or whose batches were left out",
    "silent": "from a fault until it was noticed",
    "stopping": "from then until all processes had ended, and the pause before the next start",
    "again": "from the next start to its first new step",
    "idle": "between an end and the next start",
    "untold": "starts that recorded nothing",
}


def page() -> str:
    """docs/watching.md."""
    parts = [HEAD.format(longest=log_rules.LONGEST)]
    for kind, title in (("process", "Of processes"), ("kernel", "Of the kernel")):
        lines = (
            (r.name, r.group, r.action, "yes" if r.consequence else "", _code(r.example))
            for r in log_rules.load(kind)
        )
        parts.append(
            f"### {title}\n\n"
            + _table(("rule", "class", "action", "consequence", "for example"), lines)
        )
    parts.append(HARDWARE)
    rows = ((x.name, _amount(x), x.group, x.action, x.what, x.why) for x in LIMITS)
    parts.append(_table(("finding", "from", "class", "action", "of", "why"), rows))
    parts.append(PREFLIGHT.format(seconds=preflight.SECONDS + 10, slow_link=preflight.SLOW_LINK))
    uses = "\n".join(f"| {accounts.LABELS[use]} | {MEANINGS[use]} |" for use in accounts.USES)
    parts.append(TIME.format(uses=uses))
    return "\n".join(part.rstrip("\n") + "\n" for part in [*parts, NOTIFY.lstrip("\n")])


def _amount(limit: Limit) -> str:
    """The limit in words: so much in a window, or at a level for so many looks."""
    if limit.within < 60:
        looks = f", {limit.within:g} looks" if limit.within > 1 else ""
        return f"{limit.at:g}{looks}"
    hours = limit.within / 3600
    return f"{limit.at:,g} in {f'{hours:g} h' if hours >= 1 else f'{limit.within / 60:g} min'}"


def _code(line: str) -> str:
    """An example that a table can hold."""
    cut = line if len(line) <= 110 else line[:109] + "…"
    return "`" + cut.replace("`", "'").replace("|", "¦") + "`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(page())
