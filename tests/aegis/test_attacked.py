"""What broke the agent when somebody tried to break it."""

import json
import os
import re
import signal
import subprocess
import sys

import agents
import multiprocess_runs
import pytest

from experiments import supervise
from zaya_jax.aegis import decide, events, facts, rules
from zaya_jax.aegis.decide import Decider, Rules
from zaya_jax.checkpoint import claims

SLOW = ("('gloo/' * 900)", "('error: p' * 600)", "('amdgpu 0000:c1:00.0: XGMI PCS Da' * 200)")


@pytest.mark.parametrize("line", SLOW)
def test_no_line_holds_up_the_agent(line):
    """A line took 10 s, then 0.3 s: a read of such lines 4 s, in which nothing else is watched. 200 lines here."""
    asked = (
        f"from zaya_jax.aegis import rules; m = rules.Matcher(); k = rules.Matcher('kernel'); line = {line}\n"
    )
    asked += "for i in range(200): m.feed(0, line), k.feed(0, line)"
    environ = os.environ | {"PYTHONPATH": str(multiprocess_runs.ROOT)}
    subprocess.run([sys.executable, "-c", asked], timeout=20, check=True, env=environ)


def test_what_a_dead_process_left_behind_does_not_hold_the_agent(tmp_path):
    """Its child printed on, and for as long as it did nothing was watched: no restart for 25 s."""
    with agents.start(tmp_path, befalls={0: "7 orphan"}) as run:
        assert run.wait() == [0]
    (restarted,) = run.events("restarted")
    assert restarted.facts["stop"] < 5 and run.steps()[-1] == agents.STEPS


ODD = (
    {"time": "x"}, {"time": None}, {"time": float("nan")}, {"time": 1e300}, {"kind": 5}, {"seen": []},
    {"process": "x"}, {"step": None}, {"facts": 5}, {"seconds": float("inf")}, {"group": {}},
)  # fmt: skip


def test_odd_lines_are_passed_over_by_the_report(tmp_path, capsys):
    folder = tmp_path / events.FOLDER
    folder.mkdir()
    whole = {"kind": "died", "time": 1e9, "seen": "\x1b[2J\u202eup"}
    given = [json.dumps(whole | odd) for odd in ODD] + [
        "[" * 100_000,
        "5",
        '{"kind": "died"}',
        json.dumps(whole),
    ]
    (folder / "events.jsonl").write_text("\n".join(given))
    (event,) = events.read(tmp_path)
    assert event.seen == "�[2J�up"
    assert supervise.report(tmp_path) == 0 and "died" in capsys.readouterr().out


def test_what_ends_with_75_again_and_again_without_a_newer_checkpoint_comes_to_an_end():
    decider, now = Decider(Rules(nodes=1, restarts=5), 0.0), 0.0
    decider.take(facts.Came(0, "host"), now)
    decider.take(facts.Ready(0), now)
    for _ in range(200):
        for fact in (facts.Stepped(11), facts.Exited(0, 0, decide.PREEMPTED), facts.Ready(0), facts.Tick()):
            now += 301.0 if isinstance(fact, facts.Tick) else 1.0
            decider.take(fact, now)
    assert decider.state == "ended"


def test_the_last_of_two_workdirs_is_the_run_s():
    assert (
        str(supervise.workdir_of(["--workdir=/a", "--workdir=/b"])) == "/b"
    )  # as the training's own options take it


def test_what_aegis_could_not_write_is_said(tmp_path):
    with agents.start(tmp_path, steps=5) as run:
        (run.workdir / "aegis").write_text("a file in the folder's place: nothing can be written below it")
        assert run.wait() == [0]
        assert "not written" in run.err()


def test_a_signal_before_the_training_heeds_it_is_an_end_as_asked(tmp_path):
    with agents.start(tmp_path, steps=100) as run:
        run.until("aegis: started")
        run.agents[0].send_signal(signal.SIGTERM)
        assert run.wait() == [75]


def test_each_start_has_a_log_of_its_own(tmp_path):
    with agents.start(tmp_path, steps=10) as run:
        assert run.wait() == [0]
        again = [sys.executable, agents.STAND_IN, "agent", "--", f"--workdir={run.workdir}", "20", "0.05"]
        variables = {"PYTHONPATH": str(multiprocess_runs.ROOT), "PCI_DEVICES": "none"}
        subprocess.run(again, env=os.environ | variables, timeout=60, check=True, capture_output=True)
        logs = (run.workdir / "aegis" / "logs").rglob("process-00000.log")
        assert [len(re.findall("begins after", log.read_text())) for log in logs] == [1, 1]


def test_copies_that_are_put_off_explain_no_end():
    """While a durable place was slow, a cut connection, and whatever else, was called "copy failed"."""
    decider = Decider(Rules(nodes=1, processes=2), 0.0)
    said = (
        "warning: step 200 is saved, but its copy is NOT: the one before is still on its way; it follows",
        "warning: cannot write s3://runs/a/200/meta.json yet: Could not connect to the endpoint URL; trying again",
    )
    found = [facts.Found(0, one) for line in said for one in rules.Matcher().feed(0, line)]
    assert len(found) == 2
    heard = [
        facts.Came(0, "host"),
        facts.Ready(0),
        facts.Stepped(1),
        *found,
        facts.Exited(0, 1, 1),
        facts.Ready(0),
    ]
    did = [action for i, fact in enumerate(heard) for action in decider.take(fact, float(i))]
    (died,) = [action.given for action in did if isinstance(action, facts.Say) and action.kind == "died"]
    assert (died["process"], died["concluded"], died["group"]) == (1, "", "distributed")


def test_what_an_event_has_seen_does_nothing_to_a_terminal():
    line = b"\x1b]0;title\x07\x1b[2J\0error: process 3 on node17 is gone: killed, or crashed\x9b1m"
    (found,) = rules.Matcher().feed(0, line)
    assert "process 3 on node17" in found.seen and found.seen.isprintable()


def test_a_second_agent_leaves_a_run_s_events_alone(tmp_path):
    """Its training was refused, but "ended: exit code 2" stood in the midst of the events of a run that went on."""
    claims.take(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    asked = [sys.executable, agents.STAND_IN, "agent", "--", f"--workdir={tmp_path}", "5", "0.01"]
    variables = {"PYTHONPATH": str(multiprocess_runs.ROOT), "PCI_DEVICES": "none"}
    try:
        second = subprocess.run(
            asked, env=os.environ | variables, timeout=60, check=False, capture_output=True, text=True
        )
    finally:
        claims.release(tmp_path)
    assert second.returncode == 2 and f"in use by process {os.getpid()} on" in second.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.json"]
    again = subprocess.run(asked, env=os.environ | variables, timeout=60, check=False)
    assert again.returncode == 0
