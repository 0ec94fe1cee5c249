"""What is watched, for a person: docs/watching.md.

    python -m tools.watching_page > docs/watching.md

A test holds that the page is what this makes.
"""

import sys
from collections.abc import Iterable, Sequence

from zaya_jax.aegis import accounts, preflight, rules
from zaya_jax.aegis.limits import LIMITS, Limit

HEAD = """\
<!-- Made by `python -m tools.watching_page > docs/watching.md`; edit zaya_jax/aegis or tools/watching_page.py. -->

# What is watched

The agent of a node (`python -m experiments.supervise`) reads the logs of its processes, the kernel's log and the
hardware. What it finds has a name, a class and an action. Classes: *critical* (of one node, which is judged),
*distributed* (several see it, and the first one counts), *storage*, *data*, *user*, *numbers*, *note*. Actions:
*note* (written down: it explains no end), *warn* (it may explain one), *restart*, *exclude* (restart without the node,
where a spare can take its place), *stop* (a person is wanted). Everything is an event in
`WORKDIR/aegis/events.jsonl`.

No GPU was at hand when this was made: rules are held by lines that public reports quote and by drivers' format
strings, watchers by recorded trees of sysfs and by a made-up NVML. The check before a start ran on CPU devices alone.

## Lines of logs

Rules are data: `zaya_jax/aegis/rules_process.toml` and `rules_kernel.toml`. The first rule that fits wins, in the
order below. A line is looked at up to {longest:,} characters, and need not be UTF-8. Lines that differ in numbers
alone are told at the 1st, 10th, 100th, ... of them, with their count. Of several processes the first cause is the
earliest finding that is neither a note nor a *consequence*: what a process says when another one is gone. That a
process has died is seen by its exit, and its lines explain it: only those of a device that must not be used again act
by themselves.

The kernel's log is {places}, the first that can be read, from the agent's start on. `/dev/kmsg` needs
`kernel.dmesg_restrict=0` or CAP_SYSLOG. Where none can be read, that is said once.
"""

HARDWARE = """\
## Hardware

Looked at every few seconds, below a root that tests replace. A counter is judged by how much it has grown within a
window: what it was before the run is no news. A level must hold for so many looks in a row, and is told again when it
is over. A counter that falls was reset or has wrapped: it begins anew, which is said. A file that gives no leave, or
no number, is said once. Every kind is read in a thread of its own, so that a driver which hangs is a finding and
holds up nobody.

AMD's GPUs are read from sysfs (`/sys/class/drm/card*/device`), NVIDIA's by NVML if `nvidia-ml-py` is installed; ports
from `/sys/class/infiniband`, interfaces from `/sys/class/net`, priority pauses from the driver's statistics as `ethtool
-S` shows them. `xgmi_error` is cleared by its readers: another monitor on the node may take an error away.

One look takes {milliseconds} ms of one CPU core (eight GPUs, five ports and three interfaces of a recorded tree, the
median of 100 looks on 23 November 2026); drivers add their own time.
"""

PREFLIGHT = """\
## The check before a start

`zaya_jax.aegis.preflight.check` runs in under {seconds:.0f} s, in processes of its own:

| what | how | finding |
|---|---|---|
| devices | as many as expected | gpu missing |
| idle | AMD: less than {idle:.0f} GiB of memory in use, at most {busy:.0f} % busy | gpu not idle |
| products | bfloat16, float32: whole numbers, whose sums are exact in any order; all compared | gpu computes wrongly |
| memory | a copy; below {slow:.0%} of the node's median (of three at least) | gpu memory slow |
| storage | 16 MiB written, made to last (fsync), read back, compared | storage wrong, check of storage failed |
| watchers | once, and ports slower than most of the node's | as above |
| any of it | no answer in time, or the process died | check of ... hangs, check of ... failed |

Links are tried in pairs along a ring, in two rounds of disjoint pairs (three for an odd number of nodes): two
processes exchange known numbers, check each, and measure. A node whose tries all fail is named; a pair that fails
while both do well with others is a bad link. Of two nodes alone it cannot be told which. Below {slow_link:.0%} of the
median link is slow.
"""

TIME = """\
## Where the time goes

The report (`report.html`, and `python -m experiments.supervise report --workdir=DIR`) gives every second from the
first start to the last event exactly one use; they sum to the whole, which a test holds for random histories.
**Goodput** is the time of steps whose updates are in the run now over the supervised time, which is all but *not
supervised*. Where a start said nothing of itself goodput is not known, and the page says so.

| use | meaning |
|---|---|
{uses}

*Found in* is from the fault until it was noticed, *recovered in* from the fault to the first new step; *time lost*
adds the steps that were done again.
"""

NOTIFY = """
## A command at each event

The leading agent runs `--command` at each event, with the event as JSON on its input and `ZAYA_EVENT` (kind),
`ZAYA_NODE`, `ZAYA_GROUP` and `ZAYA_TEXT` (one line) in its environment. Nothing waits for it; failures and dropped
events are counted. Findings that are notes are not told. A webhook is a command, too:

    --command="curl -sf -m 10 -H 'Content-Type: application/json' --data-binary @- https://HOST/HOOK"

and so is a script that drains the node of an `excluded` event, or that sends figures to the site's monitoring.
"""

MEANINGS = {
    "step": "steps whose updates are in the run now",
    "start": "before the first step of a start that follows no fault",
    "compile": "compiling, likewise",
    "evaluate": "evaluation",
    "save": "saving, as far as the training waits for it",
    "end": "the end: last save, sample, report",
    "redone": "steps that were computed again after going back, or whose batches were left out",
    "silent": "from a fault until it was noticed",
    "stopping": "from there until nothing ran, and the pause before the next start",
    "again": "from the next start to its first new step",
    "idle": "between an end and the next start",
    "untold": "a start that said nothing of itself",
}
MILLISECONDS = 9  # process time, of tests/aegis/watched.py's tree in memory


def page() -> str:
    """docs/watching.md."""
    parts = [HEAD.format(longest=rules.LONGEST, places=", ".join(f"`/{place}`" for place in rules.PLACES))]
    for kind, title in (("process", "Of processes"), ("kernel", "Of the kernel")):
        lines = (
            (r.name, r.group, r.action, "yes" if r.consequence else "", _code(r.example))
            for r in rules.load(kind)
        )
        parts.append(
            f"### {title}\n\n" + _table(("rule", "class", "action", "consequence", "for example"), lines)
        )
    parts.append(HARDWARE.format(milliseconds=MILLISECONDS))
    rows = ((x.name, _amount(x), x.group, x.action, x.what, x.why) for x in LIMITS)
    parts.append(_table(("finding", "from", "class", "action", "of", "why"), rows))
    parts.append(
        PREFLIGHT.format(
            seconds=preflight.SECONDS + 10, idle=preflight.IDLE_BYTES / 2**30, busy=preflight.IDLE_BUSY,
            slow=preflight.SLOW, slow_link=preflight.SLOW_LINK,
        )
    )  # fmt: skip
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
