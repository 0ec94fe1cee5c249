"""Odd things in place of a file, and JSON that no parser reads: a line and an exit code, never a traceback."""

import contextlib
import errno
import os
import socket

import pytest

from zaya_jax import cli
from zaya_jax.checkpoint import seal, times
from zaya_jax.cluster import leaving
from zaya_jax.config import UserError, files
from zaya_jax.config.fields import parse_json
from zaya_jax.data import tokenizers
from zaya_jax.pytorch import hf, tensor_files


def test_json_that_no_parser_reads(tmp_path):
    text = "[" * 100_000
    for parse in (parse_json, lambda t: seal.parse(t.encode()), lambda t: seal.unsigned(t.encode())):
        with pytest.raises(ValueError, match=r"^[^\n]*$"):
            parse(text)
    header = text.encode()
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / times.TIMES).write_text('{"kind": ' + text)
    for read in (tokenizers.load, hf.read_json, tensor_files.TensorFile):
        with pytest.raises(UserError):
            read(tmp_path / ("x.safetensors" if read is tensor_files.TensorFile else "tokenizer.json"))
    assert times.read(tmp_path) == {}


def test_pipes_are_not_waited_for(tmp_path):
    for name in ("tokenizer.json", times.TIMES):
        os.mkfifo(tmp_path / name)
    with pytest.raises(files.Irregular, match="no regular file"):
        files.read(tmp_path / "tokenizer.json")
    for read in (tokenizers.load, hf.read_json):
        with pytest.raises(UserError, match="no regular file"):
            read(tmp_path / "tokenizer.json")
    assert times.read(tmp_path) == {}
    with pytest.raises(OSError, match="No such device or address"):
        files.appending(tmp_path / times.TIMES)


def test_a_socket_is_not_replaced_and_what_a_link_names_stays(tmp_path):
    """Nor is a device: root can replace /dev/null by a file, which each program of the machine would then use."""
    (tmp_path / "file").write_text("old")
    os.mkfifo(tmp_path / "pipe")
    for name in ("odd", "file"):
        (tmp_path / f"to_{name}").symlink_to(name)
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(tmp_path):
        listening.bind("odd")
    with pytest.raises(files.Irregular, match="no regular file"):
        files.write(tmp_path / "odd", b"text")
    for name in ("pipe", "to_odd", "to_file"):
        files.write(tmp_path / name, b"text")
        assert (tmp_path / name).read_text() == "text"
    assert (tmp_path / "odd").exists() and not (tmp_path / "odd").is_file()
    assert (tmp_path / "file").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "to_odd", "to_file", "odd", "file"}


def test_what_is_in_the_way_is_a_line_with_its_name(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "file").write_text("")

    def nameless():
        raise PermissionError(errno.EACCES, "of a library's own")

    for stumble in (
        lambda: (tmp_path / "metrics.jsonl").read_bytes(),
        lambda: (tmp_path / "file" / "x").read_bytes(),
        lambda: (tmp_path / "file").mkdir(),
    ):
        assert cli.exit_code(stumble) == cli.STORAGE
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and str(tmp_path) in err
    with pytest.raises(PermissionError):
        cli.exit_code(nameless)
    assert leaving.code_of(FileNotFoundError(errno.ENOENT, "gone", "x"))[0] == leaving.FAILED
