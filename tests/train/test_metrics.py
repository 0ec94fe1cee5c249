"""The figures' file when a run goes on: cut from its end, whatever was left there."""

import json
import os
import random
import threading
from pathlib import Path

import pytest

from zaya_jax import config
from zaya_jax.train import metrics


def line(step, size=20):
    return json.dumps({"step": step, "loss": 1.0, "load": "x" * size}).encode() + b"\n"


def cut(path, content, step):
    path.write_bytes(content)
    dropped = metrics.keep_until(path, step)
    left = path.read_bytes()
    assert content.startswith(left) and dropped == len(content) - len(left)
    return left


@pytest.mark.parametrize("block", [1, 7, 64, 300, 1 << 20])
def test_it_is_cut_after_the_restored_step(tmp_path, monkeypatch, block):
    monkeypatch.setattr(metrics, "BLOCK", block)
    path, good = tmp_path / "metrics.jsonl", [line(i, i) for i in range(1, 10)]
    whole = b"".join(good)
    for step in range(12):
        assert cut(path, whole, step) == b"".join(good[:step])
        assert cut(path, whole + b'{"step": 10, "lo', step) == b"".join(good[:step])
        assert cut(path, whole + b"\0" * 500, step) == b"".join(good[:step])
        assert cut(path, whole + b"\0" * 50 + b"\n\0\n" + line(10)[5:], step) == b"".join(good[:step])
    assert (
        cut(path, b"", 3) == b"" and cut(path, b"no line", 3) == b"" and cut(path, b"\n\n[1]\n7\n", 3) == b""
    )
    odd = b'[]\n{"step": "7"}\n{"step": true}\n{"step": null}\n\xff\n{}\n' + b"[" * 9999 + b"\n"
    # Between good lines they stay, as they always did not to the reader's harm; at the end they go.
    assert cut(path, whole + odd, 9) == whole
    assert cut(path, whole + odd + line(10) + odd + line(11), 10) == whole + odd + line(10)
    assert cut(path, odd + line(1), 0) == b""


def test_steps_that_are_there_twice_are_cut_where_they_come_first(tmp_path):
    once = b"".join(map(line, range(1, 6)))
    for step in range(1, 5):
        left = cut(tmp_path / "m", once + b"".join(map(line, (3, 4, 5, 6))), step)
        assert left == b"".join(map(line, range(1, step + 1)))


def test_lines_of_any_length_in_blocks_of_any_length(tmp_path, monkeypatch):
    chance = random.Random(1)
    monkeypatch.setattr(metrics, "MAX_LINE_BYTES", 200)
    for _ in range(200):
        monkeypatch.setattr(metrics, "BLOCK", chance.randrange(1, 400))
        lines = [line(i, chance.choice((0, 30, 150))) for i in range(chance.randrange(9))]
        step = chance.randrange(-1, 9)
        tail = chance.choice((b"", b"x" * 500, b"x" * 500 + b"\n", b"\0" * 250))
        assert cut(tmp_path / "m", b"".join(lines) + tail, step) == b"".join(lines[: step + 1])


def test_of_a_large_file_the_end_alone_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(5 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(line(i, 400) for i in range(10_000)))
    read = lambda: int(Path("/proc/self/io").read_text().split()[1])  # noqa: E731
    before = read()
    assert metrics.keep_until(path, 9_000) == sum(len(line(i, 400)) for i in range(9_001, 10_000))
    assert read() - before < 4 * metrics.BLOCK
    with path.open("rb") as file:
        file.seek(-len(line(9_000, 400)), os.SEEK_END)
        assert file.read() == line(9_000, 400)


def test_a_writer_goes_on_after_the_cut_and_says_what_was_dropped(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + line(3)[:9])
    writer = metrics.Writer(tmp_path, 1)
    assert f"its last {len(line(2)) + 9} bytes, from after step 1, are dropped" in capsys.readouterr().out
    writer.write(2, {"loss": 2.0})
    writer.close()
    writer.close()
    assert path.read_bytes() == line(1) + b'{"step": 2, "loss": 2.0}\n'
    path.unlink()
    path.mkdir()
    with pytest.raises(config.UserError, match=r"metrics\.jsonl cannot be written"):
        metrics.Writer(tmp_path, 1)


def test_a_full_disk_in_tensorboard_s_thread_is_no_traceback(tmp_path, monkeypatch):
    passed_on = []
    monkeypatch.setattr(threading, "excepthook", passed_on.append)
    writer = metrics.Writer(tmp_path, 0)
    thread = writer._events.file_writer.event_writer._worker
    for error in (OSError(28, "No space left on device"), ValueError("a mistake")):
        threading.excepthook(threading.ExceptHookArgs((type(error), error, None, thread)))
    writer.close()
    assert [type(args.exc_value) for args in passed_on] == [ValueError]
