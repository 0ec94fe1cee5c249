"""The leader hears sound messages, and no odd one of an agent that it knows ends it. Events passed to a
command are never waited for, and failures counted."""

import dataclasses
import errno
import json
import math
import os
import sys
import threading
import time
from unittest import mock

import pytest
from waiting import until

from zaya_jax.aegis import facts, keeping
from zaya_jax.aegis import leader as leader_module
from zaya_jax.aegis.decide import Rules
from zaya_jax.aegis.keeping import Hook, Keeper, Terminal
from zaya_jax.aegis.leader import FIELDS, Leader
from zaya_jax.aegis.node import SupervisorOptions
from zaya_jax.cluster import events
from zaya_jax.cluster.connections import OddMessage
from zaya_jax.cluster.events import Finding, RunEvent

VIEW = [1, "step", 4, "wait", 0.1, 0.2, "S", [[4, 1.0, 0.5, 0.0]]]
FINDING = {
    "name": "nic down",
    "group": "distributed",
    "action": "warn",
    "seen": "x",
    "process": -1,
    "device": "mlx5_0",
}
SOUND = {
    "ready": [4000],
    "views": [1, [VIEW]],
    "exited": [1, 1, -9],
    "finding": [FINDING],
    "checked": [1, [FINDING], 4000],
    "linked": [1, ""],
    "stacks": [1, [[1, "faulthandler", "x.py:1"]]],
    "asked": ["SIGTERM"],
    "slept": [4.0],
}
ODD = [None, True, -5, 10**400, math.nan, math.inf, 1.5, "x", [], [[]], {}, {"x": 1}, ["x"], [1, 2]]


@pytest.fixture
def leader(tmp_path):
    """That of a run of two nodes, which has begun."""
    started = Leader(
        SupervisorOptions(Rules(2, 2, 2), tmp_path), Keeper(tmp_path), print, lambda *_: None, 0.0
    )
    for node in (0, 1):
        started.agent_connected(node, f"host{node}", "localhost", 0.0)
        started.receive(node, ["ready", 4000 + node], 0.0)
    assert started.decider.state == "running"
    return started


def mutants(value):
    """A message with one part in it exchanged by an odd one, left out, or added."""
    yield from (odd for odd in ODD if type(odd) is not type(value) or odd in (10**400, [], {}))
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    for name, part in parts.items() if isinstance(parts, dict) else ():
        for odd in mutants(part):
            new = value.copy()
            new[name] = odd
            yield new
    if isinstance(value, list):
        yield from (value[:-1], [*value, 0])


def test_each_message_is_heard(leader):
    assert SOUND.keys() == FIELDS.keys()
    leader._check = mock.Mock()
    for kind, fields in SOUND.items():
        if kind != "asked":
            leader.receive(1, json.loads(json.dumps([kind, *fields])), 1.0)
    assert leader.decider.state == "ending"  # for what has exited
    leader.receive(0, ["asked", "SIGTERM"], 1.0)
    assert [call[0] for call in leader._check.method_calls] == [
        "node_answered",
        "link_answered",
        "woke",
    ]


@pytest.mark.parametrize("kind", SOUND)
def test_odd_ones_are_heard_or_refused(leader, kind):
    """Their sender is dropped (`connections.Hub`)."""
    refused = 0
    for number, fields in enumerate(mutants(SOUND[kind])):
        try:
            leader.receive(1, [kind, *fields] if isinstance(fields, list) else [kind, fields], 1.0)
        except OddMessage:
            refused += 1
        leader.poll(1.0 + number / 100)
        leader.take(facts.Tick(), 1.0 + number / 100)
    assert refused > 10 and leader.outcome is None
    with pytest.raises(OddMessage):
        leader.receive(1, ["an unknown one"], 2.0)


def test_a_node_speaks_for_its_own_processes_alone(leader):
    leader.receive(1, ["exited", 1, 0, -9], 1.0)
    leader.receive(1, ["views", 1, [[0, *VIEW[1:]], [99, *VIEW[1:]]]], 1.0)
    leader.poll(1.0)
    assert leader.decider.state == "running"


@pytest.mark.parametrize("end", ["exit", "loss", "hang", "finding"])
def test_the_last_save_of_a_start_counts(leader, tmp_path, end):
    """It may be complete after the first process has ended, but before the last."""
    leader.decider._failures = 3
    broken = Finding(**(FINDING | {"action": "restart"}))
    leader.take(
        {
            "exit": facts.Exited(1, 1, 75),
            "loss": facts.AgentLost(1, "gone"),
            "hang": facts.Hung(1, "seen", "first", 5.0),
            "finding": facts.Observed(1, broken),
        }[end],
        1.0,
    )
    assert leader.decider.state != "running"
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    (tmp_path / "checkpoints" / "10" / "checksums.json").touch()
    for node in (1, 0):
        leader.receive(node, ["ready", 4000 + node], 3.0)
    assert leader.decider.newest_checkpoint == 10
    assert leader.decider._failures == (end != "exit")  # since it; asked for is no failure


def test_progress_is_looked_for_now_and_then_and_a_slow_disk_is_asked_once_at_a_time(
    leader, monkeypatch
):
    listed = mock.Mock(side_effect=[[10], OSError, [20]])
    monkeypatch.setattr(leader_module.folders, "steps_in", listed)
    for now, newest in ((1.0, -1), (11.0, 10), (22.0, 10), (33.0, 20)):
        leader.poll(now)
        assert leader.decider.newest_checkpoint == newest
    slow = mock.Mock(side_effect=lambda folder: time.sleep(1.5) or [30])
    monkeypatch.setattr(leader_module.folders, "steps_in", slow)
    for now in (44.0, 55.0):
        leader.poll(now)
    assert leader.decider.newest_checkpoint == 20 and slow.call_count == 1
    time.sleep(1)
    leader.poll(66.0)  # what came late counts
    assert leader.decider.newest_checkpoint == 30


@pytest.mark.parametrize(("patience", "state"), [(30.0, "running"), (6.0, "dumping")])
def test_all_who_wait_alike_have_the_time_of_a_link_that_comes_back(
    leader, monkeypatch, patience, state
):
    said, options = [], dataclasses.replace(leader._options, patience=patience)
    monkeypatch.setattr(leader, "_options", options)
    monkeypatch.setattr(leader, "_log", lambda kind, fields: said.append(kind))
    for now in (5.0, 5.5, 6.5):
        hung = facts.Hung(1, "seen", "stuck at the same point", now, all_wait=True)
        monkeypatch.setattr(leader._hangs, "find", lambda _, hung=hung: hung)
        leader.poll(now)
    assert leader.decider.state == state and said.count("waits") == 1


def test_training_that_goes_back_is_heard_of_again(leader):
    for node, process in ((0, 0), (1, 1)):
        for step in (1000, 901):
            view = [process, *VIEW[1:-1], [[step, 1.0, 0.5, 0.0]]]
            leader.receive(node, ["views", 1, [view]], 1.0)
    assert leader.decider._last_step == 901


DIED = RunEvent(
    "died", 10.0, "distributed", "node3", 7, 1200, "SIGKILL", "disk full", "restart at once", 0.25
)


def test_a_command_gets_the_event(tmp_path):
    out = tmp_path / "out"
    text = (
        f"import os, sys\nopen({str(out)!r}, 'a').write(os.environ['ZAYA_TEXT'] + sys.stdin.read())"
    )
    said = []
    hook = Hook([sys.executable, "-c", text], said.append)
    # A zero byte, which no variable can hold, ended the thread, and no later event was passed on.
    hook.tell(dataclasses.replace(DIED, seen="SIG\0KILL\x1b[2J"))
    hook.close()
    words, _, body = out.read_text().partition("{")
    assert words == (
        "died process 7 on node3 at step 1200: SIG\ufffdKILL\ufffd[2J; disk full; restart at once"
    )
    assert json.loads("{" + body)["seen"] == "SIG\0KILL\x1b[2J" and not hook.failed and not said


def test_what_waits_for_a_disk_or_terminal_at_the_end_is_counted(monkeypatch):
    """It was lost without a word."""
    gate = threading.Event()
    monkeypatch.setattr(Terminal, "_do", lambda self, item: gate.wait(20))
    terminal = Terminal()
    for data in (b"abc", b"defg"):
        terminal.show(1, data)
    terminal.close(0.1)
    gate.set()
    assert terminal.lost == 7


def test_a_disk_that_fails_for_a_moment_costs_no_event(tmp_path, monkeypatch):
    """The thread that writes them ended by it, unheard."""
    failures, stat = [1] * 3, os.stat

    def fails(path, *args, **options):
        if str(path).endswith(("config.json", "metrics.jsonl")) and failures:
            failures.pop()
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", fails)
    keeper = Keeper(tmp_path)
    keeper.add(DIED)
    (tmp_path / "metrics.jsonl").touch()
    until(lambda: events.read(tmp_path))
    keeper.close()


def test_a_command_that_hangs_is_not_waited_for_and_one_that_fails_is_counted(monkeypatch):
    monkeypatch.setattr(keeping, "SECONDS", 0.5)
    hook = Hook(["sleep", "60"], print)
    begin = time.monotonic()
    for _ in range(300):
        hook.tell(DIED)
    assert time.monotonic() - begin < 5
    assert hook.lost >= 199  # a hundred wait, one or so is being sent
    time.sleep(1.2)
    assert hook.failed >= 1
    said = []
    failing = Hook(["/nowhere/at/all"], said.append)
    failing.tell(DIED)
    failing.tell(DIED)
    failing.close()
    assert failing.failed == 2
    first, last = said  # the agent has no other place for it: its logger has no handler
    assert "--command failed: FileNotFoundError" in first and "failed at 2 events" in last
