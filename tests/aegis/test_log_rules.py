"""Rules of logs: each finds its own lines and no harmless one, floods are counted, the first cause
is found."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import multiprocess_runs
import pytest

from zaya_jax.aegis import log_rules

LOGS = Path(__file__).parent / "logs"
ALL = [(kind, rule) for kind in log_rules.KINDS for rule in log_rules.load(kind)]


def lines(name):
    """The pairs of a file of lines."""
    for line in (LOGS / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            left, _, right = line.partition(" | ")
            yield left, right


TRACEBACK = ("Traceback (most recent call last):", '  File "a.py", line 7, in main', "    main()")


def matcher(kind="process", before=()):
    found = log_rules.Matcher(kind)
    assert not [one for line in before for one in found.feed(0, line)]
    return found


def names(kind, line, before=()):
    return [found.name for found in matcher(kind, before).feed(0, line)]


@pytest.mark.parametrize(("kind", "rule"), ALL, ids=lambda v: getattr(v, "name", v))
def test_each_rule_finds_its_example_before_any_other_does(kind, rule):
    (found,) = matcher(kind, TRACEBACK).feed(0, rule.example)
    named = rule.regex.search(rule.example).groupdict().get("process")
    expected = rule.name, rule.group, rule.action, int(named or 0)
    assert (found.name, found.group, found.action, found.process) == expected
    assert found.seen.startswith(rule.example[:300])


@pytest.mark.parametrize("rule", log_rules.load("kernel"), ids=lambda rule: rule.name)
def test_no_rule_of_the_kernel_takes_the_line_that_only_looks_like_its_own(rule):
    found = matcher("kernel").feed(0, rule.unlike)
    assert rule.unlike and (rule.name, rule.action) not in [(f.name, f.action) for f in found]


def test_a_kernels_message_does_what_all_of_it_says():
    """Healthy nodes were left out for the head of a message whose tail takes it back."""
    judged = list(lines("judged"))
    assert len(judged) > 40
    assert not [
        (wanted, found, line)
        for wanted, line in judged
        if (found := [f.action for f in matcher("kernel").feed(-1, line)] or ["nothing"])
        != [wanted]
    ]


TAILS = {
    "ignored": "",
    "corrected": "note",
    "correctable": "note",
    "recovered": "warn",
    "recoverable": "warn",
    "deferred": "warn",
    "nonfatal": "warn",
    "Non-Fatal": "warn",
    "not corrected": "exclude",
    "could not be recovered": "exclude",
    "unrecoverable": "exclude",
    "uncorrected": "exclude",
}
EXCLUDES = [r for r in log_rules.load("kernel") if r.action == "exclude"]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("rule", EXCLUDES, ids=lambda rule: rule.name)
def test_a_tail_takes_any_message_back(rule, tail):
    found = matcher("kernel").feed(-1, f"{rule.example} ({tail})")
    assert [f.action for f in found] == ([TAILS[tail]] if TAILS[tail] else [])


@pytest.mark.parametrize("kind", log_rules.KINDS)
def test_lines_of_trouble_are_named(kind):
    wrong = [
        (wanted, names(kind, line, TRACEBACK), line)
        for wanted, line in lines(kind)
        if names(kind, line, TRACEBACK) != [wanted]
    ]
    assert not wrong


# The words of this project's messages on which its own rules depend, {} for a value.
OUR_WORDS = {
    "process gone": ["gone: killed, or crashed"],
    "process silent": [
        "silent for {}",
        "did not reach {}",
        "did not come within",
        "gave no answer",
        "{} 0 does not answer at {}",
    ],
    "process stood still": ["this process stood still for"],
    "device computes wrongly": ["computes wrongly"],
    "error of another process": ["error: process {} on {}: {}"],
    "loss not finite": ["skipped, not finite", "the loss of the last step is not finite"],
    "checkpoint damaged": ["is damaged"],
    "save failed": [
        "saves failed in a row",
        "step {} is NOT saved",
        "mend the storage",
        "{} cannot be written (",
    ],
    "copy failed": ["but its copy is NOT", "has no complete copy of step"],
    "data damaged": ["tokens become padding", "restore the shard"],
    "data read again": ["reading %s failed (%s); trying again in"],
    "interrupted": ["interrupted by {}"],
}


def our_messages():
    """All texts of the package, with {} for the values in them."""
    for path in (multiprocess_runs.ROOT / "zaya_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "{}") for part in node.values]
                yield "".join(part if isinstance(part, str) else "{}" for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_rules_of_our_own_messages_have_their_words():
    """Messages were put better, and their rules found them no more."""
    messages = "\n".join(our_messages())
    rules = {rule.name: rule for rule in log_rules.load("process")}
    found = list(lines("process"))
    for name, all_words in OUR_WORDS.items():
        examples = [line for wanted, line in found if wanted == name] + [rules[name].example]
        for words in all_words:
            assert words in messages, f"{name}: no message says {words!r} any more"
            said = re.escape(words).replace(r"\{\}", ".*").replace("%s", ".*")
            assert any(re.search(said, line) for line in examples), f"{name}: no line has {words!r}"


def test_harmless_lines_are_passed_over():
    assert not [(line, names(kind, line)) for kind, line in lines("harmless") if names(kind, line)]


ERROR = "ValueError: shapes (3, 4) and (5,) are not the same"
TOLD = [(0, 2, line, []) for line in TRACEBACK]
# What processes print in turn: the process, its stream, the line, and the rules that it fits. An
# exception counts as the end of a traceback alone.
TURNS = {
    "a line by itself": [(0, 2, ERROR, [])],
    "after other text": [
        (0, 2, "a text of two lines", []),
        (0, 2, "  with a margin", []),
        (0, 2, ERROR, []),
    ],
    "the end of a traceback": [*TOLD, (0, 2, ERROR, ["program error"]), (0, 2, ERROR, [])],
    "one that was caught": [
        *TOLD,
        (0, 2, "it was caught, and the program went on", []),
        (0, 2, ERROR, []),
    ],
    "another process's": [*TOLD, (1, 2, ERROR, []), (0, 2, ERROR, ["program error"])],
    "lines of stdout between": [
        *(row for told in TOLD for row in (told, (0, 1, "step 4", []))),
        (0, 2, "ModuleNotFoundError: No module named 'x'", ["software missing"]),
    ],
}


@pytest.mark.parametrize("name", TURNS)
def test_an_exception_counts_as_the_end_of_a_traceback_alone(name):
    matcher = log_rules.Matcher()
    for process, stream, line, rules in TURNS[name]:
        assert [found.name for found in matcher.feed(process, line, stream)] == rules


def test_a_whole_healthy_run_gives_nothing():
    matcher, text = log_rules.Matcher(), (LOGS / "healthy.log").read_text().splitlines()
    assert sum("loss" in line for line in text) > 5  # it is one
    assert [found for line in text for found in matcher.feed(0, line)] == []


def test_a_rule_of_one_name_means_one_thing():
    for name in {rule.name for _, rule in ALL}:
        same = {(rule.group, rule.consequence) for _, rule in ALL if rule.name == name}
        assert len(same) == 1, name


def test_no_line_of_a_process_ends_a_run_but_of_a_broken_device():
    for rule in log_rules.load("process"):
        assert (
            rule.action == "note"
            if rule.consequence
            else rule.action in ("note", "warn", "exclude")
        ), rule.name
        assert rule.action != "exclude" or rule.name in (
            "gpu uncorrectable memory error",
            "nvlink error",
        )


@pytest.mark.parametrize(
    ("line", "name", "process"),
    [
        (
            "error: cpu:3 of process 3 on n1 computes wrongly: other bits",
            "device computes wrongly",
            3,
        ),
        # No process: the leader refuses such a finding, and its own agent ended by that.
        (
            f"error: cpu:3 of process {10**20} on n1 computes wrongly: other bits",
            "device computes wrongly",
            7,
        ),
        (
            "error: 3 saves failed in a row, the last with: No space (process 2); E",
            "save failed",
            2,
        ),
        ("error: 3 saves failed in a row, the last with: No space. The newest", "save failed", 7),
    ],
)
def test_a_line_may_be_of_another_process_than_prints_it(line, name, process):
    (found,) = log_rules.Matcher().feed(7, line)
    assert (found.name, found.process) == (name, process)


def test_a_flood_is_counted():
    matcher = log_rules.Matcher()
    seen = [
        f
        for i in range(1000)
        for f in matcher.feed(2, f"OSError: [Errno 28] No space left on device: 'a{i}'")
    ]
    assert [f.seen.partition(" (")[2] for f in seen] == [
        "",
        "10 such lines)",
        "100 such lines)",
        "1,000 such lines)",
    ]
    # another process is another flood
    assert matcher.feed(3, "OSError: [Errno 28] No space left on device: 'a0'")


SLOW = ("gloo/" * 900, "error: p" * 600, "amdgpu 0000:c1:00.0: XGMI PCS Da" * 200)


@pytest.mark.parametrize("line", SLOW, ids=lambda line: line[:6])
def test_no_line_holds_up_the_agent(line):
    """A line took 10 s, then 0.3 s: a read of such lines 4 s, in which nothing else is watched. 200
    lines here."""
    code = (
        "from zaya_jax.aegis.log_rules import Matcher; m = Matcher(); k = Matcher('kernel'); line"
        f" = {line!r}\n"
    )
    code += "for i in range(200): m.feed(0, line), k.feed(0, line)"
    environ = os.environ | {"PYTHONPATH": str(multiprocess_runs.ROOT)}
    subprocess.run([sys.executable, "-c", code], timeout=20, check=True, env=environ)


def test_what_an_event_has_seen_does_nothing_to_a_terminal():
    line = "\x1b]0;title\x07\x1b[2J\0error: process 3 on node17 is gone: killed, or crashed\x9b1m"
    (found,) = log_rules.Matcher().feed(0, line)
    assert "process 3 on node17" in found.seen and found.seen.isprintable()


def test_long_lines_and_odd_ones():
    matcher = log_rules.Matcher()
    (found,) = matcher.feed(0, "MemoryError: \ufffd\x80" + "x" * 10**7)
    assert found.name == "out of memory" and len(found.seen) <= log_rules.SHOWN
    for odd in (
        "",
        "\x00",
        "\x00" * 5000,
        "error" * 3000,
        "a " * 4000,
        "process 1 on a, " * 400,
        "\ud800 x",
    ):
        assert matcher.feed(0, odd) == []


def test_the_kernel_log_is_read_from_now_on(tmp_path):
    kernel, path = log_rules.Kernel(tmp_path), tmp_path / log_rules.KMSG
    (found,) = kernel.poll()
    assert found.name == "kernel log unreadable" and "dev/kmsg" in found.seen
    assert kernel.poll() == []  # that is said once
    path.parent.mkdir()
    path.write_text("amdgpu 0000:01:00.0: amdgpu: device lost from bus!\n")  # long ago
    assert kernel.poll() == [] and kernel.poll() == []
    with path.open("a") as file:
        file.write(
            "6,339,5140900,-;amdgpu 0000:02:00.0: amdgpu: device lost from bus!\n SUBSYSTEM=pci\n"
        )
    assert [f.device for f in kernel.poll()] == ["0000:02:00.0"]


def test_a_disk_is_told_apart_from_the_next():
    told = log_rules.Matcher("kernel")
    for disk in ("nvme1", "nvme2"):
        (found,) = told.feed(-1, f"nvme {disk}: controller is down; will reset: CSTS=0xffffffff")
        assert (found.name, found.device) == ("disk error", disk)
