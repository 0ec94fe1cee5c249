"""Agents with real processes: a process that dies, hangs or is lost is named, and the run goes on
or ends as it should.

The program is a stand-in that counts; the last test does the same with training itself.
"""

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time

import multiprocess_runs
import pytest
from agents import STEPS, command, start
from waiting import until

from experiments import supervise
from tools import chaos
from zaya_jax import cli
from zaya_jax.aegis import accounts, machine, node, stacks
from zaya_jax.aegis.decide import Rules
from zaya_jax.aegis.keeping import Keeper
from zaya_jax.aegis.node import SupervisorOptions
from zaya_jax.checkpoint.run import claims
from zaya_jax.cluster import events

ALONE = os.environ | {"PYTHONPATH": str(multiprocess_runs.ROOT), machine.ROOT: "/nowhere"}


def test_a_killed_process_is_named_and_the_run_goes_on(tmp_path):
    """Also past a child of a dead process, which prints on and once held up all watching for 25
    s."""
    with start(tmp_path, "--processes=2", befalls={1: "12 kill", 0: "17 orphan"}) as run:
        assert run.codes() == [0]
        again = subprocess.run(
            command(run.workdir, STEPS + 2, 0.01), env=ALONE, timeout=60, capture_output=True
        )
    assert again.returncode == 0
    (died, later), restarted = run.events("died"), run.events("restarted")
    assert (died.process, died.seen, died.node) == (1, "SIGKILL", socket.gethostname())
    assert died.done == "restart at once" and (later.process, later.seen) == (0, "exit code 9")
    # from checkpoint 10
    assert run.steps()[:13] == [*range(1, 13), 11] and run.steps()[-1] == STEPS + 2
    assert restarted[0].step >= 11 and 0 < restarted[0].seconds < 30 and later.facts["stop"] < 5
    assert [(event.facts["start"], event.step) for event in run.events("started")] == [
        (1, -1),
        (2, 10),
        (3, 15),
        (4, 25),
    ]
    logs = sorted(run.workdir.glob("aegis/logs/start-*/process-00000.log"))  # one of each start
    begun = [re.findall(r"begins after (\d+)", log.read_text()) for log in logs]
    assert begun == [["0"], ["10"], ["15"], ["25"]]
    assert "process 1 of 2 begins after 10" in run.out() and "aegis: died process 1" in run.err()
    totals = accounts.account_of(events.read(run.workdir)).totals
    assert totals["step"] > 0.3 and totals["recovering"] > 0


@pytest.mark.parametrize(
    ("what", "line", "how"),
    [
        ("stop", "(state T|do_signal_stop|stand_in.py)", "stopped (state T)"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    "spin",
                    r"stand_in.py:\d+ in stand_still_here \(faulthandler\)",
                    "at step 12 (dispatch) for",
                ),
                ("lock", r"stand_in.py:\d+ in befall \(faulthandler\)", "without a sign of life"),
            )
        ),
    ],
)
def test_a_process_that_stands_still_is_named_with_its_line_and_all_start_again(
    tmp_path, what, line, how
):
    with start(tmp_path, "--processes=3", befalls={2: f"12 {what}"}) as run:
        assert run.codes() == [0]
        run.until_gone()
    (hangs,) = run.events("hangs")
    assert hangs.process == 2 and "process 2 stopped first; 2 wait for it" in hangs.concluded
    assert how in hangs.seen
    assert re.search(f"process 2 at .*{line}", hangs.seen), hangs.seen
    assert "in train" in hangs.seen  # where the others wait
    stacks = run.workdir / "aegis" / "stacks" / "start-001"
    assert len(list(stacks.glob("process-*.txt"))) == 3
    assert "stand_in.py" in (stacks / "process-00000.txt").read_text()
    assert run.steps()[-1] == STEPS


def test_a_run_that_wants_a_person_ends_with_its_code_and_what_was_not_written_is_said(tmp_path):
    with start(tmp_path, befalls={0: f"7 exit {cli.UNHEALTHY}"}) as run:
        (run.workdir / "aegis").write_text(
            "a file in the folder's place: nothing can be written below it"
        )
        assert run.codes() == [cli.UNHEALTHY]
        assert "aegis: died process 0" in run.err() and "exit code 3" in run.err()
        assert "not written" in run.err()


def test_asked_once_it_saves_and_asked_twice_it_ends_at_once(tmp_path):
    with start(tmp_path / "once", agents=2, seconds=0.1) as run:
        run.until_step(3)
        for agent in run.processes:  # as schedulers do: it is one wish
            agent.send_signal(signal.SIGTERM)
        assert run.codes() == [cli.PREEMPTED] * 2
        assert run.steps()[-1] < STEPS and run.events("ended")[0].facts["code"] == cli.PREEMPTED
    # as a shell's background jobs have it, agents too
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # too long a step to wait for
    with start(tmp_path / "twice", "--processes=2", seconds=300) as run:
        run.until_step(1)
        run.processes[0].send_signal(signal.SIGINT)
        run.wait_for("aegis: asked")
        run.processes[0].send_signal(signal.SIGINT)
        assert run.codes() == [128 + signal.SIGINT]
        run.until_gone()


def test_strangers_on_the_port_change_nothing_and_a_lost_leader_ends_all(tmp_path):
    with start(tmp_path, agents=2, seconds=0.1, steps=10_000) as run:
        run.until_step(2)
        with contextlib.ExitStack() as strangers:
            for noise in (*multiprocess_runs.STRANGE, *[b""] * 20):  # some say nothing
                stranger = socket.create_connection(("localhost", run.port))
                strangers.enter_context(stranger)
                with contextlib.suppress(OSError):
                    stranger.sendall(noise)
            run.until_step(run.steps()[-1] + 5)
        assert len(run.events("started")) == 1 and not run.events("lost")
        run.processes[0].kill()
        assert run.codes(of=[1]) == [1]
        assert "the leader is gone" in run.err(1)
        run.until_gone(3)


@pytest.mark.slow
def test_an_agent_of_another_job_is_refused(tmp_path):
    with start(tmp_path, agents=2, steps=40_000, variables={"ZAYA_JOIN_SECONDS": "5"}) as run:
        run.until_step(2)
        second = ALONE | {
            "NODES": "2",
            "NODE": "1",
            "JAX_COORDINATOR_ADDRESS": f"localhost:{run.port}",
        }
        for secret, words in (("other", "wrong job"), ("", "another zaya_jax")):
            asked = command(run.workdir, 300, 0.05)
            environ = second | {"ZAYA_SECRET": secret}
            done = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=60)
            assert done.returncode == cli.BAD_INPUT and words in done.stderr, done
        assert not run.events("lost")


@pytest.mark.slow
def test_a_spare_waits_and_takes_the_place_of_a_lost_node(tmp_path):
    """Agents without processes are heard, and hear, for as long as they wait."""
    short = {"ZAYA_HEARTBEAT_SECONDS": "2"}
    with start(tmp_path, "--nodes=2", agents=3, seconds=0.15, steps=36, variables=short) as run:
        run.until_step(1)
        (started,) = until(lambda: run.events("started"))
        time.sleep(4.5)  # two heartbeats, in which the third has nothing to say
        assert not run.events("lost")
        victim = started.facts["places"][1]
        run.processes[victim].kill()
        assert run.codes(of=[0, 3 - victim]) == [0, 0]
        run.until_gone()
    (lost,) = run.events("lost")
    assert "gone: it was killed" in lost.seen and run.steps()[-1] == 36


def test_a_signal_ends_an_agent_that_looks_for_its_leader(tmp_path):
    address = f"localhost:{multiprocess_runs.free_port()}"
    member = {"NODES": "2", "NODE": "1", "JAX_COORDINATOR_ADDRESS": address}
    with start(tmp_path, variables=member) as run:
        (agent,) = run.processes
        until(lambda: stacks.catches(agent.pid, signal.SIGTERM))
        time.sleep(0.3)
        agent.send_signal(signal.SIGTERM)
        assert run.codes() == [cli.PREEMPTED] and "while it looked for its leader" in run.err()


def test_a_second_agent_is_refused_before_it_starts_anything(tmp_path, called, monkeypatch):
    def refuse(workdir):
        raise cli.UserError(f"{workdir} is in use")

    monkeypatch.setattr(claims, "require_free", refuse)
    code, _, err = called(supervise, "--", f"--workdir={tmp_path}")
    assert code == cli.BAD_INPUT and err == f"error: --workdir={tmp_path} is in use\n"
    assert not list(tmp_path.iterdir())


def test_a_refused_start_leaves_nothing(tmp_path):
    workdir = tmp_path / "new"
    asked = [
        sys.executable,
        "-m",
        "experiments.supervise",
        "--",
        f"--workdir={workdir}",
        "--config.optim.lr=-1",
    ]
    done = subprocess.run(
        asked, env=ALONE, cwd=multiprocess_runs.ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == cli.BAD_INPUT and "optim.lr" in done.stderr
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes=2", "--", "--workdir=x"], "--nodes=2 exceeds the number of agents"),
        (["--nodes=1", "--min_nodes=2", "--", "--workdir=x"], "--min_nodes=2 is more"),
        (["--", "--config=x"], "--workdir=DIR is missing after --"),
        (["--workdir=x"], "--workdir"),
        (["--processes=0", "--", "--workdir=x"], "--processes"),
        (["--processes=2", "--", "--workdir=x"], "--processes=2 does not divide the node's 3 GPUs"),
        (["--command=a 'b", "--", "--workdir=x"], "--command: invalid split value"),
        (
            ["--agents=2", "--", "--workdir=x"],
            "--coordinator (JAX_COORDINATOR_ADDRESS) and --agent (NODE)",
        ),
        (["report", "--workdir=nowhere"], "has no events"),
        (
            ["--coordinator=localhost:70000", "--agents=2", "--agent=0", "--", "--workdir=x"],
            "with a port from 1 to 65535",
        ),
        *(
            ([f"{name}={x}", "--", "--workdir=x"], f"{name}={x!r} is not a whole number of seconds")
            for name in ("ZAYA_HEARTBEAT_SECONDS", "ZAYA_JOIN_SECONDS")
            for x in ("0", "-1", "1e3", "9" * 30)
        ),
    ],
)
def test_refuses_in_one_line(options, words, called, monkeypatch):
    if "GPUs" in words:
        monkeypatch.setattr(machine, "gpu_numa_nodes", lambda root: [0, 0, 1])
    if options[0].startswith("ZAYA"):  # a variable
        monkeypatch.setenv(*options.pop(0).split("="))
    code, _, err = called(supervise, *options)
    assert code == cli.BAD_INPUT and words in err and err.count("\n") == 1


def test_damaged_lines_are_passed_over_and_counted(tmp_path, capsys, caplog):
    """A kill, or a full disk, leaves half a line, and the next event was lost with it."""
    folder = tmp_path / events.FOLDER
    folder.mkdir()
    given = {"kind": "died", "time": 1e9, "seen": '{"kind": SIGKILL', "later version": 1}
    whole = json.dumps(given | {"done": "\x1b[2J \u202ereversed"})
    names = [field.name for field in dataclasses.fields(events.RunEvent)]
    odd = [
        *(json.dumps(given | {name: x}) for name in names for x in (None, [{}], True, 10**400)),
        *("[1]", "[" * 100_000, '{"kind": "died"}', '{"kind": "spent", "time": NaN}'),
        '{"kind": "spike", "time": 1, "facts": {"sections": {"step": "x"}}}',
    ]
    written = [whole[:-5], *odd, whole[:-20] + whole, whole[:9]]
    (folder / "events.jsonl").write_text("\n".join(written))
    (event,) = events.read(tmp_path)
    assert event.seen == given["seen"] and f"{len(odd) + 2} lines of" in caplog.text
    assert supervise.report(tmp_path) == 0
    out = capsys.readouterr().out
    assert "died" in out and "\x1b" not in out and "\u202e" not in out


def test_a_process_that_outlives_its_kill_does_not_keep_the_agent(tmp_path, monkeypatch):
    """One that waits in a driver, or for a disk that is gone, is killed when that ends."""
    monkeypatch.setattr(node, "LAST_WAIT", 0.2)
    monkeypatch.setattr(node, "_kill_group", lambda popen: None)
    options = SupervisorOptions(Rules(1, 1, 1), tmp_path)
    held = node.Node(options, selectors.DefaultSelector(), Keeper(tmp_path), None, print)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        held.processes[0] = node.Process(0, sleeper, 0.0)
        begin = time.monotonic()
        held.close()
        assert time.monotonic() - begin < 10
        sleeper.kill()


@pytest.mark.slow
def test_a_run_hurt_in_every_way_names_each_fault_and_has_the_bits_of_one_left_alone(
    tmp_path, capsys
):
    found = chaos.Chaos(tmp_path / "chaos", 1, print)
    assert found.run(10) == 75, capsys.readouterr().out
    assert found.same_bits()[0] and found.survived(), found.table()
