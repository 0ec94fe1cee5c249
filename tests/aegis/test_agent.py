"""Agents with real processes: what dies, hangs or is lost is named, and the run goes on or ends as it should.

The program is a stand-in that counts; `test_training` does the same with training itself.
"""

import os
import re
import selectors
import signal
import socket
import subprocess
import sys

import multiprocess_runs
import pytest
from agents import STAND_IN, STEPS, start

from experiments import supervise
from zaya_jax import cli
from zaya_jax.aegis import accounts, events, node
from zaya_jax.aegis.keeping import Keeper, Terminal


def test_a_killed_process_is_named_and_the_run_goes_on(tmp_path):
    with start(tmp_path, "--processes=2", befalls={1: "12 kill"}) as run:
        assert run.wait() == [0]
    (died,), (restarted,) = run.events("died"), run.events("restarted")
    assert (died.process, died.seen, died.node) == (1, "SIGKILL", socket.gethostname())
    assert died.done == "restart at once"
    assert run.steps()[:13] == [*range(1, 13), 11] and run.steps()[-1] == STEPS  # from checkpoint 10
    assert restarted.step >= 11 and 0 < restarted.seconds < 30
    assert [event.facts["start"] for event in run.events("started")] == [1, 2]
    logs = run.workdir / "aegis" / "logs"
    assert "begins after 0" in (logs / "start-001" / "process-00001.log").read_text()
    assert "begins after 10" in (logs / "start-002" / "process-00001.log").read_text()
    assert "process 1 of 2 begins after 10" in run.out() and "aegis: died process 1" in run.err()
    account = accounts.of(events.read(run.workdir))
    whole = account.end - account.begin
    assert sum(piece.seconds for piece in account.pieces) == pytest.approx(whole, abs=1e-3)
    assert (
        account.totals["step"] > 0.3
        and account.totals["again"] > 0
        and account.totals["untold"] < 0.3 * whole
    )
    assert [row.label for row in accounts.by_cause(account)] == ["died: SIGKILL"]


@pytest.mark.parametrize(
    ("what", "line", "how"),
    [
        ("stop", "(state T|do_signal_stop|stand_in.py)", "stopped (state T)"),
        pytest.param(
            "spin",
            r"stand_in.py:\d+ in stand_still_here \(faulthandler\)",
            "stands at step 12 dispatch",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lock",
            r"stand_in.py:\d+ in befall \(faulthandler\)",
            "without a sign of life",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_who_stands_still_is_named_with_its_line_and_all_start_again(tmp_path, what, line, how):
    with start(tmp_path, "--processes=3", befalls={2: f"12 {what}"}) as run:
        assert run.wait() == [0]
        assert run.gone()
    (hangs,) = run.events("hangs")
    assert hangs.process == 2 and "process 2 stopped first; 2 wait for it" in hangs.concluded
    assert how in hangs.seen
    assert re.search(f"process 2 is at .*{line}", hangs.seen), hangs.seen
    assert "in meet" in hangs.seen  # where the others wait
    stacks = run.workdir / "aegis" / "stacks" / "start-001"
    assert len(list(stacks.glob("process-*.txt"))) == 3
    assert "stand_in.py" in (stacks / "process-00000.txt").read_text()
    assert run.steps()[-1] == STEPS


@pytest.mark.parametrize(("patience", "starts"), [(30, 1), pytest.param(6, 2, marks=pytest.mark.slow)])
def test_all_that_wait_alike_have_the_time_of_a_link_that_comes_back(tmp_path, patience, starts):
    """They wait in one step as for a collective; what is longer than the patience is a hang."""
    befalls = dict.fromkeys(range(2), "12 pause 9")
    with start(tmp_path, "--processes=2", f"--patience={patience}", befalls=befalls) as run:
        assert run.wait() == [0]
        assert len(run.events("started")) == starts and run.steps()[-1] == STEPS
    (waits,) = run.events("waits")
    assert 4.5 < waits.seconds < 7 and "stand alike" in waits.concluded
    if starts == 1:
        (waited,) = run.events("waited")
        assert 8 < waited.seconds < 10 and not run.events("hangs")
    else:
        (hangs,) = run.events("hangs")
        assert 6 <= hangs.seconds < 9


@pytest.mark.parametrize(
    ("code", "starts"),
    [
        (cli.UNHEALTHY, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((cli.BAD_INPUT, 1), (cli.STORAGE, 1), (1, 2))
        ),
    ],
)
def test_ends_or_goes_on_by_the_exit_code(tmp_path, code, starts):
    with start(tmp_path, "--processes=1", "--restarts=1", befalls={0: f"7 exit {code}"}) as run:
        if code == cli.STORAGE:  # once more, after a pause
            run.until("restart in 30 s")
            run.agents[0].send_signal(signal.SIGTERM)
            assert run.wait() == [cli.PREEMPTED]
        else:
            assert run.wait() == [0 if starts > 1 else code]
    assert len(run.events("started")) == starts
    assert run.events("died")[0].seen == f"exit code {code}"


def test_asked_once_it_saves_and_asked_twice_it_ends_at_once(tmp_path):
    with start(tmp_path / "once", "--processes=2", seconds=0.1) as run:
        run.until_step(3)
        run.agents[0].send_signal(signal.SIGTERM)
        assert run.wait() == [cli.PREEMPTED]
        assert run.steps()[-1] < STEPS and run.events("ended")[0].facts["code"] == cli.PREEMPTED
    with start(tmp_path / "twice", "--processes=2", seconds=300) as run:  # a step that nobody awaits
        run.until_step(1)
        run.agents[0].send_signal(signal.SIGINT)
        run.until("aegis: asked")
        run.agents[0].send_signal(signal.SIGINT)
        assert run.wait() == [128 + signal.SIGINT]
        assert run.gone()


def test_a_killed_agent_takes_its_processes_with_it(tmp_path):
    with start(tmp_path, "--processes=2", seconds=0.2) as run:
        run.until_step(3)
        assert len(run.running()) == 2
        run.agents[0].kill()
        assert run.gone(3)


@pytest.mark.slow
def test_without_a_spare_a_lost_node_ends_all(tmp_path):
    with start(tmp_path, agents=2, seconds=0.2) as run:
        run.until_step(3)
        run.agents[1].kill()
        assert run.wait(of=[0]) == [1]
        assert run.gone()
    assert "1 of 2 nodes are there" in run.events("ended")[0].seen


def test_a_lost_leader_ends_all(tmp_path):
    with start(tmp_path, agents=2, seconds=0.2) as run:
        run.until_step(3)
        run.agents[0].kill()
        assert run.wait(of=[1]) == [1]
        assert "the leader is gone" in run.err(1) and run.gone()


@pytest.mark.slow
def test_signals_to_all_agents_are_one_wish(tmp_path):
    """As schedulers send them."""
    with start(tmp_path, agents=2, seconds=0.2) as run:
        run.until_step(3)
        for agent in run.agents:
            agent.send_signal(signal.SIGTERM)
        assert run.wait() == [cli.PREEMPTED] * 2


NOISE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"[" * 4000 + b"\n", os.urandom(1 << 16), b'["here", 1]\n', b"[]\n{}\n",
    b'["here", 1, "host", "digest", "nonce", "proof"]\n', b'["here", 1, 2, 3, 4, 5]\n', b'["end", 0, ""]\n',
    b'["here", "1", "h", "d", "n", "p"]\n', b'["ready", 5]\n', b"\n" * 100, b'"here"\n', b"x" * 100_000,
)  # fmt: skip


def test_strangers_on_the_port_change_nothing(tmp_path):
    with start(tmp_path, agents=2, seconds=0.1) as run:
        run.until_step(2)
        held = []
        for noise in NOISE * 3:
            stranger = socket.create_connection(("localhost", run.port))
            held.append(stranger)
            try:
                stranger.sendall(noise)
                stranger.settimeout(0.2)
                stranger.recv(1000)
            except OSError:
                continue
        held += [socket.create_connection(("localhost", run.port)) for _ in range(20)]  # that say nothing
        assert run.wait() == [0, 0]
        for stranger in held:
            stranger.close()
    assert len(run.events("started")) == 1 and not run.events("lost")


@pytest.mark.slow
def test_an_agent_of_another_job_is_refused(tmp_path):
    with start(tmp_path, agents=2, steps=40_000, variables={"ZAYA_JOIN_SECONDS": "5"}) as run:
        run.until_step(2)
        environ = os.environ | {
            "PYTHONPATH": str(multiprocess_runs.ROOT), "NODES": "2", "NODE": "1", "ZAYA_SECRET": "other",
            "JAX_COORDINATOR_ADDRESS": f"localhost:{run.port}",
        }  # fmt: skip
        workdir = f"--workdir={run.workdir}"
        for change, words in (
            (environ, "not of this job"),
            ({**environ, "ZAYA_SECRET": ""}, "another command"),
        ):
            command = [sys.executable, STAND_IN, "agent", "--", workdir, "300", "0.05"]
            done = subprocess.run(command, env=change, capture_output=True, text=True, timeout=60)
            assert done.returncode == cli.BAD_INPUT and words in done.stderr, done
        assert not run.events("lost")


def test_a_refused_start_leaves_nothing(tmp_path):
    workdir = tmp_path / "new"
    command = [
        sys.executable,
        "-m",
        "experiments.supervise",
        "--",
        f"--workdir={workdir}",
        "--config.optim.lr=-1",
    ]
    environ = os.environ | {"PYTHONPATH": str(multiprocess_runs.ROOT)}
    done = subprocess.run(
        command, env=environ, cwd=multiprocess_runs.ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == cli.BAD_INPUT and "optim.lr" in done.stderr
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes=2", "--", "--workdir=x"], "--nodes=2 are more than there are agents"),
        (["--nodes=1", "--min_nodes=2", "--", "--workdir=x"], "--min_nodes=2 is more"),
        (["--", "--config=x"], "--workdir=DIR is missing after --"),
        (["--workdir=x"], "--workdir"),
        (["--processes=0", "--", "--workdir=x"], "--processes"),
        (["--agents=2", "--", "--workdir=x"], "--coordinator (JAX_COORDINATOR_ADDRESS) and --agent (NODE)"),
        (["report", "--workdir=nowhere"], "has no events"),
    ],
)
def test_refuses_in_one_line(options, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["supervise", *options])
    assert cli.exit_code(supervise.main) == cli.BAD_INPUT
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_heartbeats_go_elsewhere_where_shared_memory_is_full(tmp_path, monkeypatch):
    full = tmp_path / "shm"
    full.mkdir()
    room = node._has_room
    assert room(full, 1) and not room(tmp_path / "nowhere", 1)
    monkeypatch.setattr(node, "SHM", full)
    monkeypatch.setattr(
        node, "_has_room", lambda folder, size: full not in folder.parents and room(folder, size)
    )
    keeper, told = Keeper(tmp_path), []
    here = node.Node(
        node.Task(["true"], tmp_path), selectors.DefaultSelector(), keeper, Terminal(), told.append
    )
    assert full in here.scratch.parents
    here.start(1, "localhost:1", 1, 0)
    assert full not in here.scratch.parents and here.scratch.is_dir() and list(full.iterdir()) == []
    here.close()
    assert not here.scratch.exists()
