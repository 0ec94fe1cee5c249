"""The run's time: each second has one use, lost ones have a cause, and they sum to the whole,
whatever happens."""

import math
import random

import pytest

from zaya_jax.aegis import accounts
from zaya_jax.aegis.accounts import TimeLedger
from zaya_jax.cluster.events import RunEvent


def spent(time, seconds, first, last, **sections):
    return RunEvent(
        "spent", time, step=last, seconds=seconds, facts={"from": first, "sections": sections}
    )


def run():
    """100 s of a run: a process dies at 50, found after 2, stopped at 53, again at 55, its first
    step at 65."""
    return [
        RunEvent("started", 0.0, step=-1, facts={"start": 1}),
        spent(20.0, 20.0, 0, 0, start=8.0, compile=12.0),
        spent(40.0, 20.0, 0, 20, step=19.0, save=1.0),
        spent(50.0, 10.0, 20, 30, step=10.0),
        RunEvent(
            "died",
            53.0,
            "critical",
            "node1",
            3,
            30,
            "SIGKILL",
            "oom killer",
            "",
            2.0,
            {"start": 1, "stop": 1.0},
        ),
        RunEvent("started", 55.0, step=20, facts={"start": 2}),
        RunEvent("restarted", 65.0, step=21, seconds=15.0, concluded="after it died"),
        spent(66.0, 11.0, 20, 21, start=5.0, compile=5.0, step=1.0),
        spent(100.0, 34.0, 21, 54, step=33.0, evaluate=1.0),
        RunEvent("ended", 100.0, step=54, facts={"code": 0}),
    ]


def whole(account):
    return sum(span.seconds for span in account.spans)


def test_each_second_has_one_use():
    account = accounts.account_of(run())
    totals = account.totals
    assert whole(account) == pytest.approx(100.0)
    assert (totals["start"], totals["compile"], totals["save"]) == pytest.approx((8, 12, 1))
    assert totals["recomputed"] == pytest.approx(10)  # steps 21 to 30
    assert (totals["undetected"], totals["stopping"], totals["recovering"]) == pytest.approx(
        (2, 3, 10)
    )
    # of the window that began before the first new step its end
    assert totals["step"] == pytest.approx(19 + 1 + 33)
    assert account.goodput == pytest.approx(totals["step"] / 100)
    (row,) = accounts.by_cause(account)
    assert (row.label, row.group, row.count) == ("oom killer", "critical", 1)
    assert row.lost == pytest.approx(10 + 2 + 3 + 10)
    assert row.detect == (2.0, 2.0) and row.recover == (15.0, 15.0)


SPIKE = {"step": 15, "at": 20, "batches": 5}
HISTORIES = {  # events, the seconds of some uses, causes and when the run had recovered from them
    "time between an end and a start is nobody's": (
        [
            *run(),
            RunEvent("started", 1000.0, step=54, facts={"start": 1}),
            spent(1010.0, 10.0, 54, 64, step=10.0),
            RunEvent("ended", 1010.0, step=64),
        ],
        {"idle": 900, "recomputed": 10, "step": 63},
        [("oom killer", 15.0)],
    ),
    "a spike loses the steps that it goes back": (
        [
            RunEvent("started", 0.0, step=-1, facts={"start": 1}),
            spent(10.0, 10.0, 0, 10, step=10.0),
            spent(20.0, 10.0, 10, 20, step=10.0),
            RunEvent("spike", 20.0, "numbers", step=20, seen="loss 9.1", facts=SPIKE),
            spent(30.0, 10.0, 15, 25, step=10.0),
            RunEvent("ended", 30.0, step=25),
        ],
        {"recomputed": 5, "step": 25},
        [("a spike", None)],
    ),
    "a start that says nothing is unrecorded": (
        [RunEvent("started", 5.0, step=-1), RunEvent("ended", 25.0)],
        {"unrecorded": 20, "step": 0},
        [],
    ),
    "starts that never step are lost to what began it": (
        [
            *run()[:5],
            RunEvent("started", 55.0, step=20, facts={"start": 2}),
            RunEvent("died", 60.0, seen="exit code 1", seconds=0.1, facts={"start": 2}),
            RunEvent("started", 61.0, step=20, facts={"start": 3}),
            RunEvent("ended", 70.0, seen="gave up"),
        ],
        {"step": 19, "recovering": 4.9 + 9},
        [("oom killer", None), ("died: exit code 1", None)],
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_other_histories(name):
    history, uses, causes = HISTORIES[name]
    account = accounts.account_of(history)
    assert whole(account) == pytest.approx(history[-1].time - history[0].time)
    assert {use: account.totals[use] for use in uses} == pytest.approx(uses)
    assert [(cause.label, cause.recover) for cause in account.interruptions] == causes
    known = uses["step"] / account.supervised if uses["step"] else math.nan
    assert account.goodput == pytest.approx(known, nan_ok=True)
    assert accounts.account_of([RunEvent("log", 1.0)]) is None


@pytest.mark.parametrize("seed", range(200))
def test_they_sum_to_the_whole_whatever_befell(seed):
    rng = random.Random(seed)
    time, step, events = rng.uniform(0, 1e9), 0, []
    kinds = [
        *["spent"] * 6,
        *accounts.INTERRUPTIONS,
        "started",
        "restarted",
        "ended",
        "spike",
        "log",
    ]
    for _ in range(rng.randrange(1, 60)):
        time += rng.choice([0.0, rng.expovariate(0.1)])
        step = max(step + rng.randrange(-3, 9), 0)
        facts = {
            "stop": rng.uniform(0, 3),
            "step": max(step - 5, 0),
            "from": step - rng.randrange(4),
            "sections": {rng.choice(accounts.SECTIONS): rng.uniform(0, 9)},
        }
        facts |= {"start": 1} if rng.random() < 0.8 else {}
        kind, seconds = rng.choice(kinds), rng.uniform(-1, 9)
        events.append(RunEvent(kind, time, "note", step=step, seconds=seconds, facts=facts))
    account = accounts.account_of(events)
    if account is None:
        assert all(event.kind != "started" for event in events)
        return
    assert whole(account) == pytest.approx(account.end - account.begin, abs=1e-3)
    assert all(span.seconds >= 0 for span in account.spans)
    at = account.begin
    for span in sorted(account.spans, key=lambda p: p.begin):
        assert span.begin >= at - 1e-3  # none lies on another
        at = span.begin + span.seconds
    lost = sum(interruption.lost for interruption in account.interruptions)
    assert lost == pytest.approx(
        sum(p.seconds for p in account.spans if p.interruption is not None), abs=1e-3
    )


def test_spending_adds_up_and_gets_rarer():
    spending, now, given = TimeLedger(0.0, 100), 0.0, []
    for second in range(20_000):
        now = float(second)
        steady = "save" if second % 600 < 20 else "step"
        section = "start" if second < 30 else "compile" if second < 90 else steady
        given.append(spending.observe(section, 101 + max(second - 90, 0) // 2, now))
    windows = [one for one in [*given, spending.close(now)] if one]
    assert sum(one["seconds"] for one in windows) == pytest.approx(now)
    assert sum(sum(one["facts"]["sections"].values()) for one in windows) == pytest.approx(
        now, abs=0.1
    )
    assert 100 < len(windows) < 600
    assert [one["facts"]["from"] for one in windows[1:]] == [one["step"] for one in windows[:-1]]
    assert windows[0]["facts"]["from"] == 100 and windows[-1]["step"] == 100 + (19_999 - 90) // 2
