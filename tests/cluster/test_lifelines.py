"""The lifelines between processes, with threads and bare sockets for processes: who is missing at
the roll call, who is silent, whose end counts; whatever one end of a connection sends, the other
goes on."""

import contextlib
import functools
import selectors
import socket
import threading
import time
from concurrent import futures
from unittest import mock

import pytest
from multiprocess_runs import STRANGE, free_port
from waiting import until

from zaya_jax.cluster import connections, leaving, lifelines
from zaya_jax.cluster.lifelines import Lifelines, RunEnd
from zaya_jax.cluster.rank import LostProcess, Rank, split_address
from zaya_jax.config import UserError

HOST = socket.gethostname()


class Run:
    """Processes of one run as threads: `ends` has each one's reason for its end. `ranks`: those that
    begin, with the number that each counts, if they do not agree."""

    def __init__(self, count, seconds, ranks=(), address=None):
        self.address = address or f"localhost:{free_port()}"
        self.count, self.ends = count, {}
        ranks = ranks or [(count, i) for i in range(count)]
        self.lifelines = [
            Lifelines(Rank(self.address, *rank), seconds, functools.partial(self.leave, i))
            for i, rank in enumerate(ranks)
        ]

    def leave(self, index, end):
        self.ends[index] = end
        self.lifelines[index].wait_for_hangups()

    def begin(self, indices, seconds=20):
        threads = [threading.Thread(target=self.call, args=(i, seconds)) for i in indices]
        for thread in threads:
            thread.start()
        return threads

    def call(self, index, seconds):
        try:
            self.lifelines[index].roll_call(seconds)
        except UserError as error:  # as a program ends by it
            self.ends[index] = RunEnd(leaving.BAD_INPUT, index, HOST, str(error))

    def hang_up(self):
        for one in reversed(self.lifelines):
            threading.Thread(target=one.hang_up).start()
        for one in self.lifelines:
            one._thread.join(20)
            assert not one._thread.is_alive()

    def wait_for_ends(self, count):
        until(lambda: len(self.ends) >= count, 30)
        for one in self.lifelines:
            if one._thread.ident is None:  # it never called
                one._close()
        return self.ends


def bare(run, index):
    """A process of nothing but a connection, which has called."""
    return connections.connect(run.address, index, str(run.count), 20).socket


def test_a_silent_process_is_named_with_its_host():
    run = Run(3, 0.5)
    threads = run.begin([0, 1])
    with bare(run, 2):
        for thread in threads:
            thread.join()
        ends = run.wait_for_ends(2)
    assert ends[0] == ends[1] and ends[0].code == 1
    assert ends[0].text.startswith(f"process 2 on {HOST} is silent for")


@pytest.mark.parametrize("cause", [f"process 2 on {HOST} is gone", "no space left"])
def test_what_follows_from_a_loss_or_an_error_is_not_taken_for_the_cause(cause):
    run = Run(3, 20)
    threads = run.begin([0, 1])
    with bare(run, 2):
        for thread in threads:
            thread.join()
        threading.Thread(
            target=run.lifelines[1].report, args=(1, "a collective failed", False)
        ).start()
        time.sleep(0.3)
        assert not run.ends  # process 2 has said nothing since
        if cause == "no space left":
            threading.Thread(target=run.lifelines[0].report, args=(4, cause, True)).start()
            run.wait_for_ends(2)
    assert all(end.text.startswith(cause) for end in run.wait_for_ends(2).values())


def test_an_error_of_one_is_everybodys_once_all_have_answered():
    run = Run(3, 20)
    for thread in run.begin([0, 1, 2]):
        thread.join()
    run.lifelines[2].report(1, "by none", certain=False)
    assert set(run.wait_for_ends(3).values()) == {RunEnd(1, 2, HOST, "by none")}


def test_a_process_lost_during_the_roll_call_is_named_by_those_who_came():
    run = Run(4, 20)
    run.begin([0, 1])
    # losses before a process comes do not concern it
    until(lambda: 1 in run.lifelines[0]._connections)
    bare(run, 2).close()
    ends = run.wait_for_ends(2)
    assert ends[0] == ends[1] and ends[0].code == leaving.FAILED
    assert ends[0].text.startswith(f"process 2 on {HOST} is gone")


def test_who_is_interrupted_while_it_looks_for_process_0_ends_at_once():
    """It took 80 s: the thread that looked was waited for."""
    ends, rank = [], Rank(f"localhost:{free_port()}", 2, 1)
    one = Lifelines(rank, 60, ends.append)
    with futures.ThreadPoolExecutor() as pool:
        search = pool.submit(one.roll_call, 3)
        began = time.monotonic()
        one.report(130, "interrupted by SIGINT", certain=True)
        assert time.monotonic() - began < 2
        assert ends == [RunEnd(130, 1, HOST, "interrupted by SIGINT")]
        assert isinstance(search.exception(), LostProcess)


def test_all_who_come_go_on_and_the_port_is_free_again():
    first = Run(4, 60)
    for run in (first, Run(4, 60, address=first.address)):
        for thread in run.begin([3, 1, 2, 0]):
            thread.join()
        run.hang_up()
        assert not run.ends


@pytest.mark.parametrize(
    ("ranks", "seconds", "code", "words"),
    [
        ([(6, 0), (6, 2), (6, 3)], 1, 1, "processes 1, 4 and 5 of 6 did not come within"),
        ([(2, 0), (3, 2)], 5, 2, "counts 3"),
        ([(3, 0), (3, 1), (3, 1)], 5, 2, "process 1 is there twice"),
    ],
)
def test_who_is_missing_or_contradicts_the_others_is_named_by_all(ranks, seconds, code, words):
    run = Run(0, 60, ranks)
    run.begin(range(len(ranks)), seconds)
    for end in run.wait_for_ends(len(ranks)).values():
        assert end.code == code and words in end.text


def test_nothing_that_a_stranger_sends_ends_a_roll_call_or_stands_for_a_process():
    run = Run(2, 20)
    threads = run.begin([0])
    until(lambda: run.lifelines[0]._hub._server)
    for strange in STRANGE:
        line = socket.create_connection(split_address(run.address), 5)
        with line, contextlib.suppress(OSError):
            line.sendall(strange)
            while line.recv(1 << 16):  # until process 0 hangs up
                pass
        assert threads[0].is_alive() and run.lifelines[0]._thread.is_alive(), strange[:40]
    for thread in [*threads, *run.begin([1])]:
        thread.join()
    assert not run.ends and run.lifelines[0]._connections.keys() == {1}
    run.hang_up()


def test_after_standing_still_it_asks_anew_before_it_blames_others(monkeypatch):
    run, said, asleep = Run(2, 1.0), mock.Mock(), threading.Event()
    for thread in run.begin([0, 1]):
        thread.join()
    select = run.lifelines[0]._selector.select

    def sleepy(patience):
        if not asleep.is_set():
            asleep.set()
            time.sleep(0.9)  # the other one's answers lie unread, or were not asked for
        return select(patience)

    monkeypatch.setattr(lifelines._log, "warning", said)
    monkeypatch.setattr(run.lifelines[0]._selector, "select", sleepy)
    assert asleep.wait(10)
    time.sleep(2)
    assert "stood still" in said.call_args.args[0] and not run.ends
    run.hang_up()


@pytest.mark.parametrize("error", [connections.OddMessage, RuntimeError])
def test_an_odd_message_hangs_up_on_its_sender_and_an_error_of_this_end_is_raised(error):
    """An error of our own was told as the other end's, and written down nowhere."""
    lost, (here, there) = [], socket.socketpair()
    hear = mock.Mock(side_effect=error)
    with selectors.DefaultSelector() as selector, there:
        hub = connections.Hub(selector, "x", 2, "", lambda *_: None, hear, lost.append)
        hub.by_index[1] = connection = connections.Connection(here, "")
        connection.index = 1
        hub.register(connection)
        there.sendall(b'["odd"]\n')
        (key, _), *_ = selector.select(1)
        ends = pytest.raises(RuntimeError) if error is RuntimeError else contextlib.nullcontext()
        with ends:
            key.data()
        connection.socket.close()
    assert hear.called and bool(lost) == (error is connections.OddMessage) == (not hub.by_index)
