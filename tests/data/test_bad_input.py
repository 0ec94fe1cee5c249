"""Preparing whatever a disk may hold: one bad record costs one record, and no input ends in a traceback."""

import contextlib
import gzip
import io
import json
import pathlib
import tempfile

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zaya_jax import cli
from zaya_jax.data import prepare, storage
from zaya_jax.data.prepare import Options

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def here(options, out):
    """Prepare in this process, without workers."""
    return prepare.prepare(options, str(out), 1, lambda *_: None)


def parquet(columns, **options):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, **options)
    return file.getvalue()


SOUND = {
    ".jsonl": b"".join(json.dumps({"text": f"text {i} \u00fc"}).encode() + b"\n" for i in range(30))
    + json.dumps({"messages": CHAT}).encode(),
    ".parquet": parquet({"text": [f"text {i} \u00fc" for i in range(40)]}, row_group_size=9),
    ".txt": "text\u00fc\n".encode() * 50,
}
PACKED = {"": bytes, ".gz": lambda raw: gzip.compress(raw, 6, mtime=0), ".zst": zstandard.compress}


@st.composite
def files(draw):
    """(name, content) of a file: sound, damaged in one way, or another thing than its name says."""
    kind = draw(st.sampled_from([".jsonl", ".parquet", ".txt", ".json", ".ndjson"]))
    packed = draw(st.sampled_from(list(PACKED)))
    sound = SOUND.get(kind, SOUND[".jsonl"])
    content = draw(
        st.one_of(st.just(sound), st.binary(max_size=300), st.text(max_size=100).map(lambda t: t.encode()))
    )
    damage = draw(st.sampled_from(["none", "cut", "flipped", "not packed"]))
    if damage != "not packed":
        content = PACKED[packed](content)
    place = draw(st.integers(0, max(len(content) - 1, 0)))
    if damage == "cut":
        content = content[:place]
    elif damage == "flipped" and content:
        content = content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
    return f"{draw(st.sampled_from(['a', 'b', 'ü \\n', '__init__']))}{kind}{packed}", content


def check_fuzzed(found, skip_bad, train_bpe):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "in").mkdir()
        for name, content in found:
            (root / "in" / name).write_bytes(content)
        options = Options(
            [str(root / "in")], skip_bad=skip_bad, train_bpe=train_bpe, part_bytes=400, held_out=0.1
        )
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            code = cli.exit_code(lambda: here(options, root / "out") and 0)
        assert code in (0, 2, 4) and len(stderr.getvalue().splitlines()) <= 1
        if code == 0:
            assert storage.verify(str(root / "out")) == []
        elif "tasks are done" not in stderr.getvalue():
            assert not (root / "out").exists()


@pytest.mark.usefixtures("in_process")
@settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)
@given(st.lists(files(), min_size=1, max_size=3), st.booleans(), st.sampled_from([0, 0, 263]))
def test_any_files_are_prepared_or_refused_in_one_line(found, skip_bad, train_bpe):
    check_fuzzed(found, skip_bad, train_bpe)
