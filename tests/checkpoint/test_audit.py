"""Wrong content is found that agrees with itself (whole chunks, arrays and steps in each other's
places); what people see of checkpoints: the tables, the file of times, and the commands."""

import errno
import itertools
import json
import math
import os
import re
import shutil
import threading
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import flip, put, put_in_place, save, train
from refusals import check_error, check_refused, check_storage_error
from waiting import until

from experiments.checkpoint import __main__ as checkpoint
from zaya_jax.checkpoint import folders, layout, partial, seal, storage
from zaya_jax.checkpoint.run import look, store, timings
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.config import Checkpoint


def state(seed):
    """Arrays of one shape, and one of many chunks."""

    def normal(i, *shape):
        return jnp.asarray(np.random.default_rng([seed, i]).normal(size=shape), jnp.float32)

    return {
        "params": {"a": normal(0, 6, 5), "b": normal(1, 6, 5), "large": normal(2, 8, 4)},
        "optimizer": {"mean": {"a": normal(3, 6, 5)}, "square": {"a": normal(4, 6, 5)}},
    }


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The checkpoints of two runs with the same shapes."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 32)
    return train(tmp_path / "one", 36, 40, state=state), train(
        tmp_path / "two", 36, 40, state=state, plus=1000
    )


def test_every_chunk_in_the_place_of_another_is_found(runs):
    """Chunks of the same size: another's of this step, the same of another step, the same of
    another run."""
    newest = runs[0] / "40"
    chunks = sorted(newest.rglob("c.*"))
    pairs = [
        (p, q) for p, q in itertools.combinations(chunks, 2) if p.stat().st_size == q.stat().st_size
    ][::5]
    for folder in (runs[0] / "36", runs[1] / "40"):
        pairs += [(chunk, folder / chunk.relative_to(newest)) for chunk in chunks]
    assert len(chunks) > 20 and len(pairs) > 100
    for chunk, other in pairs:
        content = chunk.read_bytes()
        chunk.write_bytes(other.read_bytes())
        (damage,) = Vault(runs[0]).verify(40)
        assert damage.file == str(chunk.relative_to(newest)) and "changed: crc32c" in damage.what
        chunk.write_bytes(content)
    assert Vault(runs[0]).verify(40) == []


def test_a_disk_that_cannot_read_a_file_is_damage_at_once(runs, monkeypatch):
    def fails(path, *rest, **options):
        if str(path).endswith("40/state/params.a/c.0.0"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open(path, *rest, **options)

    monkeypatch.setattr(storage, "open", fails, raising=False)
    monkeypatch.setattr(storage, "DELAYS", (1e9,))
    (damage,) = Vault(runs[0]).verify(40)
    assert str(damage) == "state/params.a/c.0.0 (array params.a) is unreadable (Input/output error)"


def test_a_disk_that_refuses_for_another_reason_has_damaged_nothing(runs, monkeypatch):
    """With on_corrupt=previous a good checkpoint was set aside."""
    refuses = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr(storage, "open", refuses, raising=False)
    monkeypatch.setattr(storage, "DELAYS", (0.01,))
    checkpoints = store.Store(runs[0].parent, Checkpoint(on_corrupt="previous"), print)
    says = r"after 2 attempts: Too many open files"
    check_error(storage.Unreachable, says, checkpoints.find_newest)
    assert (runs[0] / "40").exists()


def test_another_run_s_step(runs):
    put_in_place(runs[0] / "40", runs[1] / "40")
    assert "is of run " in str(Vault(runs[0]).verify(40)[0])
    check_storage_error(
        r"is of run \w+, not of run \w+, whose name is in .run",
        lambda: store.Store(runs[0].parent, Checkpoint(), print).find_newest(),
    )
    careful = store.Store(runs[0].parent, Checkpoint(on_corrupt="previous"), print)
    assert careful.find_newest() == 36
    name = (runs[0] / seal.RUN).read_text()  # where it is lost, the checkpoints have it
    (runs[0] / seal.RUN).unlink()
    assert store.Store(runs[0].parent, Checkpoint(), print).find_newest() == 36
    assert (runs[0] / seal.RUN).read_text() == name


def test_any_byte_of_the_list_itself(runs):
    marker = runs[0] / "40" / layout.SEAL_FILE
    content = marker.read_bytes()
    for byte, bit in itertools.product(range(0, len(content), 7), (0, 5)):
        flip(marker, 8 * byte + bit)
        assert [d.file for d in Vault(runs[0]).verify(40)][:1] == [layout.SEAL_FILE], byte
        marker.write_bytes(content)
    for other in (content + b"\n", content.replace(b'3,"', b'4,"')):
        marker.write_bytes(other)
        assert Vault(runs[0]).verify(40)[0].file == layout.SEAL_FILE


def test_a_checkpoint_of_an_earlier_format_is_refused_and_stays(runs):
    """It is no damage: with on_corrupt=previous, too, it is not set aside."""
    for step in (36, 40):
        marker = runs[0] / str(step) / layout.SEAL_FILE
        marker.write_bytes(
            seal.with_checksum(seal.without_checksum(marker.read_bytes()) | {"format": 2})
        )
    words = "/checkpoints/40 is a checkpoint of format 2, and this version reads format 3 alone; go"
    start = store.Store(runs[0].parent, Checkpoint(on_corrupt="previous"), print)
    for read in (
        start.find_newest,
        lambda: partial.read(runs[0].parent, "*"),
        lambda: Vault(runs[0]).verify(40),
    ):
        check_refused(words, read)
    assert {path.name for path in runs[0].iterdir()} >= {"36", "40"}


def test_what_is_not_listed_is_named(runs, tmp_path):
    folder = runs[0] / "40"
    (folder / "state" / "params.a" / "c.9.9").write_bytes(b"more")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("/nowhere")
    names = [d.file for d in Vault(runs[0]).verify(40) if d.what == "not part of the checkpoint"]
    assert names == ["link", "state/params.a/c.9.9"], "an empty folder is no damage"
    check_storage_error(
        "link is not part of the checkpoint",
        lambda: store.Store(runs[0].parent, Checkpoint(), print).find_newest(),
    )
    (folder / "link").unlink()
    shutil.copytree(folder, tmp_path / "vault" / "40")
    assert any("c.9.9" in str(damage) for damage in Vault(tmp_path / "vault").verify(40))


@pytest.mark.parametrize("kind", ["workdir", "vault"])
def test_verify_beside_a_run_that_saves_and_deletes(tmp_path, monkeypatch, called, kind):
    """28 of 449 such looks had found damage that was none."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 32)
    durable = str(tmp_path / "vault") if kind == "vault" else ""
    checkpoints = store.Store(tmp_path / "run", Checkpoint(keep=2, durable=durable), print)
    checkpoints.find_newest()
    over, saved, looks = threading.Event(), [], []

    def saves():
        while not over.is_set():
            saved.append(len(saved) + 1)
            save(checkpoints, saved[-1], state=state)

    thread = threading.Thread(target=saves)
    thread.start()
    place = durable or tmp_path / "run"
    try:
        until(lambda: len(saved) >= 3)
        while len(saved) < 15:
            looks.append(called(checkpoint, "verify", f"--workdir={place}"))
    finally:
        over.set()
        thread.join()
        checkpoints.close()
    assert {code for code, _, _ in looks} == {0}, [look for look in looks if look[0]]
    line = r"(step \d+: ([\d.]+ kB, whole|deleted meanwhile)|\d+: its upload has not ended)\n"
    assert [out for _, out, _ in looks if not re.fullmatch(f"({line})+", out)] == []


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run's folder with steps 4 and 9, of eight devices."""
    w, b = put(jnp.ones((32, 1000)), ("data", "expert"), None), put(jnp.ones(7))
    tree = {"params": {"w": w, "b": b}, "optimizer": {"w": w.astype(jnp.bfloat16)}}
    meta = {"version": "1", "metrics": {"eval/loss": 4 / 3}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PART_BYTES", 1000)  # otherwise parts as small lie in one chunk
        root = train(tmp_path_factory.mktemp("look") / "run", 4, 9, state=lambda _: tree, meta=meta)
    return root.parent


def test_inspect_shows_steps_and_arrays(called, workdir):
    (workdir / "checkpoints" / ".saving-12").mkdir()
    code, out, _ = called(checkpoint, "inspect", f"--workdir={workdir}", "--step=4", "--html")
    (workdir / "checkpoints" / ".saving-12").rmdir()
    text = re.sub("[ |]+", " ", out).replace(" \n", "\n")
    assert code == 0
    assert re.search(r"4 4 19\d(\.\d)? kB 1 1.3333 20\S+ \S+( [\d.]+ (m|µ)?s){5}\n", text)
    assert "\n 9 9 " in text and "was killed): .saving-12." in text
    assert "params.w 32 x 1000 float32 128 kB 4 x 1000 8\n" in text
    assert "params.b 7 float32 28 B 7 1\n" in text
    assert "optimizer.w 32 x 1000 bfloat16 64 kB 4 x 1000 8\n = optimizer 64 kB\n" in text
    assert "Where the time goes" in (workdir / "checkpoints.html").read_text()
    assert str(workdir / "checkpoints.html") in out


def test_damage_is_a_line_and_its_exit_code(called, workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "9"
    os.truncate(step / "state" / "params.b" / "c.0", 10)
    code, out, err = called(checkpoint, "verify", f"--workdir={tmp_path}/run")
    assert (code, err) == (4, "error: 1 of 2 checkpoints damaged\n")
    what = r"step 9: state/params.b/c.0 \(array params.b\) is truncated: 10 bytes instead of 32"
    assert re.fullmatch(rf"step 4: \S+ kB, whole\n{what}\n", out), out
    os.truncate(step / layout.META, 10)
    code, out, err = called(checkpoint, "inspect", f"--workdir={tmp_path}/run")
    assert (
        code == 4
        and "DAMAGED, `verify` says where: 9." in out
        and f"{layout.META} is truncated" in err
    )


def test_a_step_that_the_run_deletes_meanwhile_is_none(workdir, monkeypatch):
    numbered, first = folders.numbered, [[2, 4, 9]]
    monkeypatch.setattr(folders, "numbered", lambda root: first.pop() if first else numbered(root))
    seen, damaged = look.summarise_all(workdir)
    assert [one.step for one in seen] == [4, 9] and not damaged


# ################################################################################################
# The file of times
# ##################################################################################################


def lines(*processes, kind="save", step=3, time=5.0):
    """The lines of a save: of each process, by its number and its seconds by stage."""
    event = {"kind": kind, "step": step, "time": time}
    return [
        json.dumps(event | {"process": number, "stages": stages, "bytes": 10 + number}) + "\n"
        for number, stages in processes
    ]


def test_lines_of_one_event_are_put_together(tmp_path):
    assert timings.read_timings(tmp_path) == {}
    cut_short = ["12\n", '{"kind": "save", "step": 6}\n', '{"kind": "save", "step": 4, "pro']
    content = [
        *lines((0, {"write": 1.0}), (2, {"copy": 0.5, "write": 2.0})),
        *lines((0, {}), kind="load", step=1),
        *lines((0, {"write": 1.0, "commit": 8.5}), (1, {"write": 9.0, "commit": 8.5}), step=4),
        *cut_short,
        *lines((0, {"write": 1.0}), step=7),  # after what a kill has left of a line
        # saved again, it counts once
        *lines((0, {"write": 7.0}), step=1, time=9.0),
        *lines((0, {"write": 1.0}), (1, {"write": 1.0}), step=1),
    ]
    (tmp_path / timings.TIMES).write_text("".join(content))
    found = timings.read_timings(tmp_path)
    saves = found["save"]
    assert list(found) == ["save", "load"] and list(saves) == [1, 3, 4, 7]
    assert (saves[3].processes, saves[3].sizes) == (3, {0: 10, 2: 12})
    np.testing.assert_array_equal(saves[3].by_process("write"), [1.0, math.nan, 2.0])
    assert saves[3].slowest("write") == 2.0 and math.isnan(saves[7].slowest("copy"))
    assert saves[4].total() == 9.5, "process 0's, whose commit waits for all"
    assert (saves[1].processes, saves[1].time, saves[1].slowest("write")) == (1, 9.0, 7.0)
