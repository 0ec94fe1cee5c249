"""The wall clock of real agents: what the leader writes down of it adds up, and faults owe what they cost."""

import pytest
from agents import start

from zaya_jax.aegis import accounts, events


def test_the_account_of_a_real_run_with_a_death(tmp_path):
    with start(tmp_path, "--processes=2", befalls={1: "12 kill"}, seconds=0.1) as run:
        assert run.wait() == [0]
    account = accounts.of(events.read(run.workdir))
    assert sum(piece.seconds for piece in account.pieces) == pytest.approx(
        account.end - account.begin, abs=1e-3
    )
    totals = account.totals
    assert totals["step"] > 1 and totals["again"] > 0 and totals["idle"] == 0  # 25 steps of 0.1 s
    assert totals["untold"] < 0.1 * (account.end - account.begin)
    (row,) = accounts.by_cause(account)
    assert row.label == "died: SIGKILL" and row.lost > 0 and row.recover[0] > 0
    assert 0.2 < account.goodput < 1
