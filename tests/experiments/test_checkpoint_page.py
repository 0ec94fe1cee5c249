"""The page of checkpoint times: of few and of many processes and saves, with a slow host and a bad
moment."""

import json
import re

import pytest
from made_run import checked

from experiments.checkpoint import page as checkpoint_page
from zaya_jax.checkpoint.run import timings
from zaya_jax.report import write_report


def make(folder, processes, saves, slow=9.0):
    """Times whose last process is slow; the middle save took all of them long."""
    folder.mkdir(exist_ok=True)
    with (folder / timings.TIMES).open("w") as file:

        def tell(kind, step, process, stages, begun):
            line = {"kind": kind, "step": step, "process": process, "stages": stages, "time": begun}
            file.write(json.dumps({**line, "bytes": 10e9}) + "\n")

        for save in range(1, saves + 1):
            for process in range(processes):
                seconds = slow if process == processes - 1 else 1.0
                seconds *= 60.0 if saves > 4 and save == saves // 2 else 1.0
                stages = {"copy": 0.1, "serialise": 0.2, "write": seconds, "commit": 0.3}
                tell("save", 10 * save, process, stages, save)
        for process in range(processes):
            tell("load", 10, process, {"verify": 0.5, "read": 2.0, "place": 1.0}, 999)
        file.write('{"kind": "save", "step": 3')  # killed while writing
    return folder


def drawn(workdir):
    """The page, and the titles of its pictures."""
    page = checkpoint_page.checkpoints_document(workdir).html()
    checked(page)
    return page, re.findall("<figcaption>(.*?)</figcaption>", page)


def test_page_of_eight_processes(tmp_path):
    page, captions = drawn(make(tmp_path / "run", 8, 12))
    assert captions == [
        "Copy",
        "Whole save",
        "Copy (to the snapshot)",
        "Serialise (chunks, checksums)",
        "Write",
        "Commit (wait for all, then the name)",
        "Step 10 by process",
    ]
    assert (
        "Process 7 is slow: its write takes 9 s, the others&#x27; 1 s (medians of 12 saves)."
        in page
    )
    assert page.count("is slow") == 1 and "The longest, 9 min, is beyond the colours." in page
    assert "80 GB onto all processes" in page and "slowest of" not in page


@pytest.mark.parametrize(("processes", "saves"), [(1, 1), (1, 2), (2, 3), (300, 50), (3, 2000)])
def test_page_of_few_and_of_many(tmp_path, processes, saves):
    page, captions = drawn(make(tmp_path / "run", processes, saves))
    assert len(captions) == 5 + 2 * (saves > 1) and len(page) < 400_000
    assert ("Each row is the slowest of 5 processes." in page) == (processes == 300)
    assert ("Each column is the slowest of 5 processes." in page) == (processes == 300)
    assert ("Each column is the slowest of several saves." in page) == (saves == 2000)
    assert ("Process 299 is slow" in page) == (processes == 300)


def test_no_slow_process_is_named_without_reason(tmp_path):
    for name, processes, saves, slow in (
        ("even", 8, 12, 1.2),
        ("two", 2, 12, 9.0),
        ("once", 8, 1, 9.0),
    ):
        assert "is slow" not in drawn(make(tmp_path / name, processes, saves, slow))[0]


def test_the_training_report_shows_the_times_of_saving(tmp_path):
    run = make(tmp_path / "run", 2, 5)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 60, "loss": 1.0}\n')
    page = write_report(run).read_text()
    assert "<h2>Checkpoints</h2>" in page and "<figcaption>Whole save<" in page
    (run / timings.TIMES).unlink()
    assert "<h2>Checkpoints</h2>" not in write_report(run).read_text()
