"""The lifelines between processes, with threads and bare sockets for processes: who is missing at
the roll call, who is silent, whose end counts; whatever one end of a connection sends, the other
goes on."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from unittest import mock

import pytest
from multiprocess_runs import STRANGE, free_port
from waiting import until

from zaya_jax.cluster import connections
from zaya_jax.cluster.lifelines import Lifelines, RunEnd
from zaya_jax.cluster.rank import LostProcess, Rank
from zaya_jax.config import UserError

HOST = socket.gethostname()


class Run:
    """Processes of one run as threads: `ends` has each one's reason for its end."""

    def __init__(self, count, seconds):
        self.address, self.count, self.ends = f"localhost:{free_port()}", count, {}
        self.lifelines = [
            Lifelines(Rank(self.address, count, i), seconds, self.leave(i)) for i in range(count)
        ]

    def leave(self, index):
        def call(end):
            self.ends[index] = end
            self.lifelines[index].wait_for_hangups()

        return call

    def begin(self, indices):
        threads = [
            threading.Thread(target=self.lifelines[i].roll_call, args=(20,)) for i in indices
        ]
        for thread in threads:
            thread.start()
        return threads

    def hang_up(self):
        for one in reversed(self.lifelines):
            threading.Thread(target=one.hang_up).start()
        for one in self.lifelines:
            one._thread.join(20)
            assert not one._thread.is_alive()

    def wait_for_ends(self, count):
        until(lambda: len(self.ends) >= count, 30)
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


@contextlib.contextmanager
def calling(ranks, seconds=20):
    """A roll call of these all at once; what each raises, complete after it."""
    raised = {}
    lines = [Lifelines(rank, 60, lambda end: None) for rank in ranks]

    def call(place):
        try:
            lines[place].roll_call(seconds)
            lines[place].hang_up()
        except Exception as error:
            raised[place] = error

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(lines))]
    for thread in threads:
        thread.start()
    yield lines, raised
    for thread in threads:
        thread.join(20)


def test_a_process_lost_during_the_roll_call_is_named_by_those_who_came():
    run = Run(4, 20)
    with calling([Rank(run.address, 4, i) for i in range(2)]) as (lines, raised):
        # losses before a process comes do not concern it
        until(lambda: 1 in lines[0]._connections)
        bare(run, 2).close()
    texts = {str(error) for error in raised.values()}
    assert len(raised) == 2 and {type(error) for error in raised.values()} == {LostProcess}
    assert len(texts) == 1 and texts.pop().startswith(f"process 2 on {HOST} is gone")


def test_who_is_interrupted_while_it_looks_for_process_0_ends_at_once():
    """It took 80 s: the thread that looked was waited for."""
    ends, rank = [], Rank(f"localhost:{free_port()}", 2, 1)
    one = Lifelines(rank, 60, ends.append)

    def look():
        with pytest.raises(LostProcess):
            one.roll_call(3)

    search = threading.Thread(target=look)
    search.start()
    began = time.monotonic()
    one.report(130, "interrupted by SIGINT", certain=True)
    assert time.monotonic() - began < 2
    assert ends == [RunEnd(130, 1, HOST, "interrupted by SIGINT")]
    search.join()


def test_all_who_come_go_on_and_the_port_is_free_again():
    address = f"localhost:{free_port()}"
    for _ in range(2):
        with calling([Rank(address, 4, i) for i in (3, 1, 2, 0)]) as (_, raised):
            pass
        assert not raised


@pytest.mark.parametrize(
    ("ranks", "seconds", "kind", "words"),
    [
        ([(6, 0), (6, 2), (6, 3)], 1, LostProcess, "processes 1, 4 and 5 of 6 did not come within"),
        ([(2, 0), (3, 2)], 5, UserError, "counts 3"),
        ([(3, 0), (3, 1), (3, 1)], 5, UserError, "process 1 is there twice"),
    ],
)
def test_who_is_missing_or_contradicts_the_others_is_named_by_all(ranks, seconds, kind, words):
    address = f"localhost:{free_port()}"
    with calling([Rank(address, *rank) for rank in ranks], seconds) as (_, raised):
        pass
    assert len(raised) == len(ranks), raised
    assert all(type(error) is kind and words in str(error) for error in raised.values()), raised


def test_nothing_that_a_stranger_sends_ends_a_roll_call_or_stands_for_a_process():
    run = Run(2, 20)
    threads, port = run.begin([0]), int(run.address.rsplit(":", 1)[1])
    for strange in STRANGE:
        while True:
            try:
                line = socket.create_connection(("localhost", port))
                break
            except OSError:
                time.sleep(0.05)
        with line, contextlib.suppress(OSError):
            line.sendall(strange)
            line.settimeout(5)
            while line.recv(1 << 16):  # until process 0 hangs up
                pass
        assert threads[0].is_alive() and run.lifelines[0]._thread.is_alive(), strange[:40]
    for thread in [*threads, *run.begin([1])]:
        thread.join()
    assert not run.ends and run.lifelines[0]._connections.keys() == {1}
    run.hang_up()


def test_after_standing_still_it_asks_anew_before_it_blames_others(monkeypatch, caplog):
    run = Run(2, 1.0)
    for thread in run.begin([0, 1]):
        thread.join()
    select = run.lifelines[0]._selector.select
    asleep = threading.Event()

    def sleepy(patience):
        if not asleep.is_set():
            asleep.set()
            time.sleep(0.9)  # the other one's answers lie unread, or were not asked for
        return select(patience)

    monkeypatch.setattr(run.lifelines[0]._selector, "select", sleepy)
    with caplog.at_level(logging.WARNING, "zaya_jax"):
        logging.getLogger("zaya_jax").addHandler(caplog.handler)
        assert asleep.wait(10)
        time.sleep(2)
        logging.getLogger("zaya_jax").removeHandler(caplog.handler)
    assert "stood still" in caplog.text and not run.ends
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
        if error is RuntimeError:
            with pytest.raises(RuntimeError):
                key.data()
            connection.socket.close()
        else:
            key.data()
    assert hear.called and bool(lost) == (error is connections.OddMessage) == (not hub.by_index)
