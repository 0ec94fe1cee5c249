"""A file of metrics that grows, is cut, rewritten, taken away or half written while it is read."""

import json

from zaya_jax.report.follow import Followed


def line(step, more=0.0):
    return json.dumps({"step": step, "loss": 1 / step + more}) + "\n"


def steps(run):
    return sorted(b.step for b in run.series["loss"].bins.values()) if run.series else []


def test_only_what_is_new_is_read_and_a_half_line_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    followed = Followed(tmp_path)
    assert followed.read()[0].lines == 0 and not followed.read()[1]
    path.write_text(line(1) + line(2) + line(3)[:9])
    run, new = followed.read()
    assert new and steps(run) == [1, 2] and run.notes == []
    assert not followed.read()[1]
    path.write_text(line(1) + line(2) + line(3) + line(4))
    run, new = followed.read()
    assert new and steps(run) == [1, 2, 3, 4] and run.unreadable == 0


def test_a_run_that_goes_back_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    followed = Followed(tmp_path)
    path.write_text("".join(line(s) for s in range(1, 9)))
    assert steps(followed.read()[0]) == [*range(1, 9)]
    # Cut after step 4 and gone on with, past the place where reading stopped, between two looks.
    path.write_text("".join(line(s) for s in range(1, 5)) + "".join(line(s, 0.5) for s in range(5, 15)))
    run, new = followed.read()
    assert new and steps(run) == [*range(1, 15)] and run.series["loss"].bins[6].mean == 1 / 6 + 0.5
    path.write_text(line(1))
    assert steps(followed.read()[0]) == [1]
    path.write_text("")
    run, new = followed.read()
    assert new and run.lines == 0
    path.unlink()
    assert followed.read()[0].notes == ["There is no metrics.jsonl in this workdir."]
    path.write_text(line(1))
    assert steps(followed.read()[0]) == [1]


def test_files_beside_are_read_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(1))
    followed = Followed(tmp_path)
    assert followed.read()[0].sample == "" and not followed.read()[1]
    (tmp_path / "sample.txt").write_text("def f():")
    run, new = followed.read()
    assert new and run.sample == "def f():" and run.lines == 1


def test_damaged_lines_count_once(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(1) + "no line\n" + line(2))
    followed = Followed(tmp_path)
    followed.read()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line(3))
    assert followed.read()[0].notes == ["1 line of metrics.jsonl could not be read and is left out."]
