"""The profile of a run's steps."""

import pytest
import tiny_runs

from zaya_jax import cli
from zaya_jax.config import UserError


def test_a_profile_has_the_steps_and_scopes_that_were_asked_for(tmp_path, capsys):
    tiny_runs.write_corpus(tmp_path / "text")
    # the end comes first
    keys = {"data__path": str(tmp_path / "text"), "run__num_steps": 3, "log__profile": "2:9"}
    assert tiny_runs.train(tmp_path / "run", **keys) == cli.DONE
    (trace,) = (tmp_path / "run" / "plugins" / "profile").glob("*/*.xplane.pb")
    found = trace.read_bytes()
    assert b"/experts/" in found and b"/optimizer/" in found and b"step_num" in found
    assert capsys.readouterr().out.count("profile written: ") == 1


@pytest.mark.parametrize("wrong", ["0", "5:0", "first", "3:", "-1", "1:2:3"])
def test_a_wrong_wish_is_refused(wrong):
    with pytest.raises(UserError, match=r"config\.log\.profile=.* is not STEP or STEP:STEPS"):
        tiny_runs.settings(log__profile=wrong)
