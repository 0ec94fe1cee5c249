"""The file of times: lines of many processes, of several kinds, cut short, or of something else."""

import json
import math

import numpy as np
import pytest

from zaya_jax.checkpoint import times


def line(**changes):
    return {
        "kind": "save",
        "step": 3,
        "process": 0,
        "stages": {"write": 1.0},
        "bytes": 10,
        "time": 5.0,
    } | changes


def write(folder, *lines):
    texts = [one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines]
    (folder / times.TIMES).write_text("".join(texts))


def test_nothing_is_there(tmp_path):
    assert times.read(tmp_path) == {} and times.read(tmp_path / "nowhere") == {}


def test_lines_of_one_event_are_put_together(tmp_path):
    stages = {"copy": 0.5, "write": 2.0}
    write(tmp_path, line(), line(process=2, stages=stages, bytes=30), line(kind="load", step=1), line(step=1))
    found = times.read(tmp_path)
    assert list(found) == ["save", "load"] and list(found["save"]) == [1, 3]
    save = found["save"][3]
    assert save.processes == 3
    np.testing.assert_array_equal(save.bytes, [10, math.nan, 30])
    np.testing.assert_array_equal(save.of("write"), [1.0, math.nan, 2.0])
    np.testing.assert_array_equal(found["save"][1].of("copy"), [math.nan])
    assert save.slowest("write") == 2.0 and math.isnan(found["save"][1].slowest("copy"))


def test_the_whole_is_process_0s_as_its_commit_waits_for_all(tmp_path):
    quick, slow = {"write": 1.0, "commit": 8.5}, {"write": 9.0, "commit": 8.5}
    write(tmp_path, line(stages=quick), line(process=1, stages=slow), line(step=4, process=1, stages=quick))
    saves = times.read(tmp_path)["save"]
    assert saves[3].whole() == 9.5
    assert saves[4].whole() == 9.5  # process 0's line is lost: what another tells


def test_a_step_saved_twice_counts_once(tmp_path):
    again = line(stages={"write": 7.0}, time=9.0)
    write(tmp_path, line(), line(process=1), again, line(process=2))
    save = times.read(tmp_path)["save"][3]
    assert (save.processes, save.time, save.slowest("write")) == (1, 9.0, 7.0)


def test_lines_cut_short_cost_no_other(tmp_path):
    write(tmp_path, line(), '{"kind": "save", "step": 4, "pro', line(step=5), json.dumps(line(step=6))[:-3])
    assert list(times.read(tmp_path)["save"]) == [3, 5]


@pytest.mark.parametrize(
    "bad",
    [
        "\n",
        "[]\n",
        "7\n",
        "\x00\xff\n",
        line(process=-1),
        line(process=10**15),
        line(stages=[1]),
        line(stages={"write": "slow"}),
        line(stages={"write": math.nan}),
        line(time=math.inf),
        line(bytes=None),
        {"kind": "save"},
    ],
)
def test_what_is_no_line_is_left_out(tmp_path, bad):
    write(tmp_path, bad, line(step=8))
    found = times.read(tmp_path)
    assert list(found) == ["save"] and list(found["save"]) == [8]
