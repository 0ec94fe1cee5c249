"""The engine of checkpoints: complete or absent, failing storage, damage, retention."""

import contextlib
import errno
import functools
import gc
import json
import os
import shutil
import threading
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import cut, flip, put, same
from orbax.checkpoint import v1 as ocp
from refusals import check_storage_error
from saved_trees import restore_tree, save_tree

from zaya_jax.checkpoint import boxes, folders, layout, seal, writing
from zaya_jax.checkpoint.run import look, retention, store, timings
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint

META = {"step": 0, "tokens": 0}


def state(seed, rows=64):
    """A small state on eight devices: one array cut, one on all of them, a number."""
    key = jax.random.key(seed)
    return {
        "params": {"layers": {"w": put(jax.random.normal(key, (2, rows, 8)), None, "data")}},
        "optimizer": {"momentum": put(jnp.full((rows, 3), seed, jnp.bfloat16)), "empty": {}},
        "balance": {"steps": put(jnp.int32(seed))},
    }


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


class Run:
    """A store in a folder, and its messages."""

    def __init__(self, folder, **settings):
        self.messages = []
        self.store = store.Store(
            folder, Checkpoint(**{"max_wait": 0.2, **settings}), self.messages.append
        )

    def save(self, step, tree=None, **meta):
        save_tree(
            self.store, step, tree or state(step), META | {"step": step, "tokens": step} | meta
        )
        self.store.wait()


def visible(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir() if not p.name.startswith("."))


class Place:
    """A device of one of several processes."""

    def __init__(self, number, each=2):
        self.id, self.process_index = number, number // each


def bucket_of(total, cut, each):
    """A holding of a table [total, 4], `cut` rows per device, as processes of `each` devices have
    them."""
    parts = []
    for first in range(0, total, cut):
        box = slice(first, min(first + cut, total)), slice(0, 4)
        place = layout.full_box(layout.shape_of(box))
        device = Place(first // cut, each)
        parts.append(boxes.LocatedBox("w", box, "bucket", device, place))
    whole = jax.ShapeDtypeStruct((total, 4), np.float32)
    leaf = jax.ShapeDtypeStruct((len(parts) * cut, 4), np.float32)
    return boxes.Locations({"w": whole}, {"bucket": leaf}, parts)


def test_each_process_writes_its_part():
    """Four processes of two devices: an array that is cut, and nine that all devices hold."""
    parts, shapes = [], {"cut": (16, 4)} | {f"whole{i}": (10 + i, 10) for i in range(9)}
    for name, (rows, width) in shapes.items():
        for device in map(Place, range(8)):
            first, last = (2 * device.id, 2 * device.id + 2) if name == "cut" else (0, rows)
            box = (slice(first, last), slice(0, width))
            parts.append(boxes.LocatedBox(name, box, name, device, box))
    arrays = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    writers = boxes.Locations(arrays, arrays, parts).writers()
    sizes = writers.bytes.values()
    assert sum(sizes) == sum(4 * rows * width for rows, width in shapes.values())
    assert max(sizes) - min(sizes) <= 800
    found = [(process, part) for process, its in writers.parts.items() for part in its]
    assert {part.name for _, part in found} == set(shapes)
    assert all(part.device.process_index == process for process, part in found)


@pytest.mark.parametrize(
    ("total", "cut", "each", "chunk"),
    [
        (64, 16, 2, 16),  # a chunk is a device's part
        (64, 4, 2, 8),  # a process's part, where a device's is small
        (64, 4, 16, 64),  # one process has it all
        (50, 7, 2, 14),  # the last chunk is filled up, where no other would be as large
    ],
)
def test_each_chunk_is_one_process_s(tmp_path, monkeypatch, total, cut, each, chunk):
    monkeypatch.setattr(layout, "PART_BYTES", 16 * 4 * 4)
    whole = np.random.default_rng(0).normal(size=(total, 4)).astype(np.float32)
    writers = bucket_of(total, cut, each).writers()
    assert writers.arrays["w"].chunk == (chunk, 4) and sum(writers.bytes.values()) == whole.nbytes
    sums = {}
    for parts in writers.parts.values():  # each process in turn, with what its devices have
        copies = {"bucket": {}}
        for part in parts:
            device_part = np.zeros((cut, 4), np.float32)
            part.view(device_part)[:] = whole[part.box]
            copies["bucket"][part.device] = device_part
        found = writing.write_parts(
            tmp_path / "1", writers.arrays, parts, copies, writing.StageTimer()
        )
        assert not found.keys() & sums.keys()
        sums |= found
    assert len(sums) == -(-total // chunk)
    frame = layout.metadata_files(tuple(writers.arrays.values()), {})
    sums |= writing.write_files(tmp_path / "1", frame)
    writing.write_files(tmp_path / "1", {layout.SEAL_FILE: seal.Seal(sums, 1).to_bytes()})
    np.testing.assert_array_equal(ocp.load_checkpointables(tmp_path / "1")["state"]["w"], whole)
    like_whole = jax.ShapeDtypeStruct(
        whole.shape, whole.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    np.testing.assert_array_equal(
        SealedSource(tmp_path / "1").restore({"w": like_whole})["w"], whole
    )


class Killed(BaseException):
    pass


def kill_after(monkeypatch, count):
    """After so many changes of the file system no other happens."""
    left = iter(range(count))

    def counted(function):
        def call(*args, **kwargs):
            if next(left, None) is None:
                raise Killed
            return function(*args, **kwargs)

        return call

    for module, name in ((writing, "write_file"), (writing.Path, "rename"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))


def test_killed_at_any_operation_it_is_complete_or_absent(tmp_path):
    killed, count = True, 0
    while killed:
        folder = tmp_path / str(count)
        run = Run(folder, keep=1)
        run.save(1)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            kill_after(patch, count)
            run.save(2)
            killed = False
        steps = visible(folder)
        assert steps in (["1"], ["1", "2"], ["2"])  # and deleted only when the newer is there
        again = Run(folder, keep=1)
        assert again.store.find_newest() == max(map(int, steps))
        for step in map(int, steps):
            same(restore_tree(again.store, step, like(state(step))), state(step))
        left = {p.name for p in (folder / "checkpoints").iterdir()} - set(steps)
        assert left == {".run"}, "half-done work is cleared"
        count += 1
    assert count > 10 and steps == ["2"]


def test_a_full_disk_is_said_each_time_and_ends_the_run_after_so_many(tmp_path, monkeypatch):
    run = Run(tmp_path, max_failures=2)
    run.save(1)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "x"))
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_file", full)
        run.save(2)
        assert run.store.wait_for_room(3)
        assert visible(tmp_path) == ["1"] and not (tmp_path / "checkpoints" / ".saving-2").exists()
        assert "step 2 is NOT saved: No space left on device" in run.messages[0]
        assert "newest complete checkpoint is step 1's; training goes on" in run.messages[0]
    run.save(3)
    assert run.store.wait_for_room(4), "a success forgets the failures"
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_file", full)
        patch.setattr(store, "RETRY_SECONDS", 0)
        run.save(4)
        run.save(5)
        failed = r"2 saves failed in a row.*No space left.*step 3's"
        check_storage_error(failed, run.store.wait_for_room, 6)
        last = functools.partial(save_tree, run.store, 6, state(6), META, last=True)
        check_storage_error("No space left", last)
    assert len(run.messages) == 5
    save_tree(run.store, 7, state(7), META, last=True)
    assert visible(tmp_path) == ["1", "3", "7"]


@pytest.fixture
def slow_disk(monkeypatch):
    """Writes wait until this event."""
    goes_on, write = threading.Event(), writing.write_file
    monkeypatch.setattr(writing, "write_file", lambda *args: goes_on.wait() and write(*args))
    return goes_on


def test_a_slow_store_is_waited_for_a_while(tmp_path, slow_disk):
    run = Run(tmp_path, max_failures=2)
    save_tree(run.store, 1, state(1), META)
    assert not run.store.wait_for_room(2) and "still being written" in run.messages[0]
    check_storage_error("2 saves failed in a row", run.store.wait_for_room, 3)
    threading.Timer(1.5, slow_disk.set).start()
    run.store.wait()
    assert "the last save is still being written" in run.messages[-1]
    assert run.store.wait_for_room(4) and visible(tmp_path) == ["1"]


def test_a_start_waits_for_the_save_of_a_run_that_an_error_ended(tmp_path, slow_disk):
    run = Run(tmp_path)
    assert run.store.find_newest() is None
    save_tree(run.store, 1, state(1), META)
    threading.Timer(0.5, slow_disk.set).start()
    assert Run(tmp_path).store.find_newest() == 1
    assert not run.messages


# Orbax leaves coroutines of a failed load un-awaited.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damage_stops_or_goes_one_back(tmp_path):
    run = Run(tmp_path)
    run.save(1)
    run.save(2)
    flip(next((tmp_path / "checkpoints" / "2").rglob("c.0.0.0")), 42)
    check_storage_error(
        r"state/params.layers.w/c.0.0.0 .array params.layers.w. is changed.*on_corrupt=previous",
        run.store.find_newest,
    )
    check_storage_error(
        r"/2 is damaged: .*params.layers.w", lambda: restore_tree(run.store, 2, like(state(2)))
    )
    other = Run(tmp_path, on_corrupt="previous")
    assert other.store.find_newest() == 1 and visible(tmp_path) == ["1"]
    assert "WARNING" in other.messages[0] and (tmp_path / "checkpoints" / ".damaged-2").is_dir()
    # With the only one set aside the run would begin anew, and end as if nothing had been.
    next((tmp_path / "checkpoints" / "1").rglob("c.0.0.0")).unlink()
    check_storage_error("there is none before it", other.store.find_newest)
    assert visible(tmp_path) == ["1"]
    other.save(2)
    assert other.store.find_newest() == 2
    gc.collect()


def test_every_file_is_watched(tmp_path):
    run = Run(tmp_path)
    run.save(1)
    folder = tmp_path / "checkpoints" / "1"
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        content = path.read_bytes()
        for damage in (cut, flip, os.remove):
            damage(path)
            check_storage_error(path.name.replace("_", "."), run.store.find_newest)
            path.write_bytes(content)
    assert run.store.find_newest() == 1


def test_a_list_of_files_that_leads_outside_is_refused():
    for name in ("../evil", "/etc/evil", "state/../../evil"):
        with pytest.raises(ValueError, match="outside of the checkpoint"):
            seal.parse(seal.Seal({name: [1, 2, 0]}, 1).to_bytes())


def test_a_failed_save_is_cleared_before_any_process_tries_again(tmp_path, monkeypatch):
    """Process 0 cleared up while the others wrote the next attempt's chunks into the same folder."""
    run, broadcast, there = Run(tmp_path / "run"), multihost.broadcast_from_zero, []

    def watched(name, function):
        answer = broadcast(name, function)
        if name == "save: end":
            there.append((tmp_path / "run" / "checkpoints" / ".saving-5").exists())
        return answer

    monkeypatch.setattr(
        multihost, "gather_to_zero", lambda name, value: [value, ["no space", None]]
    )
    monkeypatch.setattr(multihost, "broadcast_from_zero", watched)
    run.save(5)
    assert there == [False] and visible(tmp_path / "run") == []
    assert "step 5 is NOT saved: no space (process 1)" in run.messages[0]


def test_what_comes_after_the_rename_fails_no_save(tmp_path, monkeypatch):
    run = Run(tmp_path, keep=1, max_failures=1)
    run.save(1)
    denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", "x"))
    monkeypatch.setattr(folders, "remove", denied)
    run.save(2)
    assert run.store.wait_for_room(3) and visible(tmp_path) == ["1", "2"]
    assert "older checkpoints are not deleted: Permission denied" in run.messages[0]


def test_the_last_save_is_content_with_what_an_attempt_renamed(tmp_path, monkeypatch):
    run, sync, failing = Run(tmp_path, max_failures=2), folders.sync_folder, [True]

    def sometimes(folder):
        if folder.name == "checkpoints" and failing:
            failing.pop()
            raise OSError(errno.EIO, "Input/output error", str(folder))
        sync(folder)

    monkeypatch.setattr(folders, "sync_folder", sometimes)
    monkeypatch.setattr(store, "RETRY_SECONDS", 0)
    save_tree(run.store, 5, state(5), META | {"step": 5}, last=True)
    assert visible(tmp_path) == ["5"] and len(run.messages) == 1
    assert run.store.find_newest() == 5


NAN, INF = float("nan"), float("inf")
LOSSES = [9, 3, 5, None, 4, 8, 7, 9, 9, 9]
SKIPPED = [(None, True)] * 3 + [(None, False)] * 50


# a step is its loss, and whether its update was made where that is not certain
@pytest.mark.parametrize(
    ("steps", "rules", "gone"),
    [
        (LOSSES, {"keep": 3}, [1, 2, 3, 4, 5, 6, 7]),
        (LOSSES, {"keep": 1, "keep_every": 4}, [1, 2, 3, 5, 6, 7, 9]),
        (LOSSES, {"keep": 1, "keep_best": 2}, [1, 3, 4, 6, 7, 8, 9]),
        (LOSSES, {"keep": 20}, []),
        # A loss that is not finite is never the best, wherever it stands in the order that a sort
        # would go through.
        *(
            (
                [*[3.0, 1.0, 2.0][:at], bad, *[3.0, 1.0, 2.0][at:], 9.0],
                {"keep": 1, "keep_best": 9},
                [at + 1],
            )
            for bad in (NAN, INF, -INF, None)
            for at in range(4)
        ),
        # with none evaluated the newest stays
        ([NAN, NAN, NAN], {"keep": 1, "keep_best": 2}, [1, 2]),
        ([5.0, 5.0, NAN, 5.0], {"keep": 1, "keep_best": 1}, [2, 3]),  # of equal ones the first
        (SKIPPED, {"keep": 2}, []),  # nothing goes while the newest is not sound
        ([*SKIPPED, (None, True)], {"keep": 2}, [1, 2, *range(4, 54)]),
        ([None, (None, False)] * 2 + [None], {"keep": 2, "keep_every": 2}, [1]),
        ([3.0, (2.9, False), 3.1], {"keep": 1, "keep_best": 1}, [2]),
    ],
)
def test_what_is_kept(steps, rules, gone):
    saved = [
        retention.SavedStep(i, *(step if isinstance(step, tuple) else (step,)))
        for i, step in enumerate(steps, start=1)
    ]
    assert retention.to_delete(saved, Checkpoint(**rules)) == gone


def test_checkpoints_of_skipped_steps_are_marked_and_the_way_back_is_said(tmp_path):
    run = Run(tmp_path, keep=1)
    assert run.store.advice_on_return() == "No checkpoint is from before"
    run.save(1, metrics={"loss": 2.0, "skipped": 0.0})
    run.save(2, metrics={"loss": float("nan"), "skipped": 1.0})
    run.save(3, metrics={"loss": 2.0, "skipped": 1.0})
    assert visible(tmp_path) == ["1", "2", "3"]
    assert f"init_from={tmp_path}@1" in run.store.advice_on_return()
    assert (
        "skipped or not finite: 2, 3." in look.remarks(tmp_path, *look.summarise_all(tmp_path))[0]
    )
    run.save(4, metrics={"loss": 2.0, "skipped": 0.0, "eval/loss": 1.0})
    assert visible(tmp_path) == ["4"]


def test_times_are_written_down(tmp_path):
    run = Run(tmp_path)
    run.save(1)
    run.store.restore(1, like(state(1)), boxes.of_tree(state(1)), lambda x: x)
    save, load = map(json.loads, (tmp_path / timings.TIMES).read_text().splitlines())
    assert (save["kind"], [*save["stages"]]) == ("save", [*timings.STAGES])
    assert save["bytes"] == sum(x.nbytes for x in jax.tree.leaves(state(1)))
    assert (load["kind"], {*load["stages"]}) == ("load", {"verify", "read", "place"})
    figures = {f"checkpoint/{stage}_seconds" for stage in ("held", *timings.STAGES)}
    assert run.store.figures().keys() == figures and run.store.figures() == {}
