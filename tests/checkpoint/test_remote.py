"""Checkpoints in other places, against a real S3 server on this machine (moto's) and a plain folder."""

import json
import threading

import boto3
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.checkpoint import layout, remote, rewrite, store, writing
from zaya_jax.checkpoint.remote import Vault
from zaya_jax.config import Checkpoint, StorageError, UserError


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01))


@pytest.fixture(params=["s3", "folder"])
def place(request, tmp_path):
    """An empty place for checkpoints, and how to look at and change it behind the vault's back."""
    if request.param == "folder":
        return Folder(tmp_path / "vault")
    request.getfixturevalue("s3_server")
    return Bucket(f"b{abs(hash(str(tmp_path)))}")


class Folder:
    def __init__(self, path):
        self.path, self.url = path, str(path)

    def names(self):
        return sorted(str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file())

    def get(self, name):
        return (self.path / name).read_bytes()

    def put(self, name, content):
        (self.path / name).write_bytes(content)

    def delete(self, name):
        (self.path / name).unlink()


class Bucket:
    def __init__(self, bucket):
        self.s3, self.bucket, self.url = boto3.client("s3"), bucket, f"s3://{bucket}/run"
        self.s3.create_bucket(Bucket=bucket)

    def names(self):
        found = self.s3.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return sorted(entry["Key"].removeprefix("run/") for entry in found)

    def get(self, name):
        return self.s3.get_object(Bucket=self.bucket, Key=f"run/{name}")["Body"].read()

    def put(self, name, content):
        self.s3.put_object(Bucket=self.bucket, Key=f"run/{name}", Body=content)

    def delete(self, name):
        self.s3.delete_object(Bucket=self.bucket, Key=f"run/{name}")


def saved(folder, step=5, **settings):
    """A run's folder with one checkpoint; (its folder, its files without the marker)."""
    checkpoints = store.Store(folder, Checkpoint(**settings), print)
    checkpoints.newest()
    checkpoints.save(step, {"params": {"w": jnp.arange(1000.0) + step}}, {"step": step, "tokens": step})
    checkpoints.close()
    there = folder / "checkpoints" / str(step)
    return there, list(writing.read_seal(there).files)


def test_there_and_back(place, tmp_path):
    folder, names = saved(tmp_path / "run")
    vault = Vault(place.url)
    assert vault.steps() == []
    uploads = [
        threading.Thread(target=Vault(place.url).upload, args=(folder, 5, names[i::2])) for i in (0, 1)
    ]
    for upload in uploads:
        upload.start()
    for upload in uploads:
        upload.join()
    assert vault.steps() == [], "not whole before its marker is there"
    vault.complete(folder, 5)
    assert vault.steps() == [5] and vault.manifest(5) == writing.read_seal(folder)
    assert place.names() == sorted(f"5/{name}" for name in [*names, layout.MARKER])
    vault.download(5, tmp_path / "back")
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    vault.remove(5)
    assert vault.steps() == [] and place.names() == []


def test_an_upload_that_was_cut_short(place, tmp_path):
    folder, names = saved(tmp_path / "run")
    vault = Vault(place.url)
    vault.upload(folder, 5, names[1:])
    with pytest.raises(StorageError, match=f"lacks 1 of {len(names)} files, such as {names[0]}"):
        vault.complete(folder, 5)
    place.put(f"5/{names[1]}", b"half")
    vault.upload(folder, 5, names[:1])
    with pytest.raises(StorageError, match=f"such as {names[1]}"):
        vault.complete(folder, 5)
    assert vault.steps() == []
    assert vault.clear() == [5] and place.names() == []
    vault.upload(folder, 5, names)
    vault.complete(folder, 5)
    assert vault.clear() == [] and vault.steps() == [5]


def test_damage_is_named(place, tmp_path):
    folder, names = saved(tmp_path / "run")
    vault = Vault(place.url)
    vault.upload(folder, 5, names)
    vault.complete(folder, 5)
    chunk = "state/params.w/c.0"
    content = place.get(f"5/{chunk}")
    assert vault.verify(5) == []
    for damaged, what in (
        (content[:9] + bytes([content[9] ^ 1]) + content[10:], "changed"),
        (content[:-3], "truncated"),
        (None, "missing|No such file|cannot read"),
    ):
        place.put(f"5/{chunk}", damaged) if damaged else place.delete(f"5/{chunk}")
        with pytest.raises(StorageError, match=what) as error:
            vault.download(5, tmp_path / what[:4])
        assert chunk in str(error.value) and (damaged is None or "(array params.w)" in str(error.value))
        (found,) = vault.verify(5)
        assert (found.file, found.array) == (chunk, "params.w") and what.split("|")[0] in found.what
    place.put(f"5/{layout.MARKER}", place.get(f"5/{layout.MARKER}").replace(b"1", b"2"))
    with pytest.raises(StorageError, match=f"{layout.MARKER} is changed"):
        vault.download(5, tmp_path / "marker")


def test_deleting_takes_the_marker_first(place, tmp_path, monkeypatch):
    folder, names = saved(tmp_path / "run")
    vault = Vault(place.url)
    vault.upload(folder, 5, names)
    vault.complete(folder, 5)
    gone, delete = [], vault._delete

    def dies(name):
        if gone:
            raise PermissionError("no more")
        gone.append(name)
        delete(name)

    monkeypatch.setattr(vault, "_delete", dies)
    with pytest.raises(StorageError, match="cannot delete"):
        vault.remove(5)
    assert gone == [f"5/{layout.MARKER}"]
    other = Vault(place.url)
    assert other.steps() == [] and other.clear() == [5] and place.names() == []


def test_a_passing_failure_is_tried_again_and_a_lasting_one_said(s3_server, tmp_path, monkeypatch):
    place = Bucket("flaky")
    folder, names = saved(tmp_path / "run")
    vault, fails = Vault(place.url), [2]
    pipe = vault._files.pipe_file

    def sometimes(*args):
        if fails[0]:
            fails[0] -= 1
            raise ConnectionResetError("reset by peer")
        return pipe(*args)

    monkeypatch.setattr(vault._files, "pipe_file", sometimes)
    said = []
    vault.tell = said.append
    vault.upload(folder, 5, names[:1])
    assert place.names() == [f"5/{names[0]}"]
    (line,) = said  # at the first attempt that fails, once
    assert line == f"warning: cannot write s3://flaky/run/5/{names[0]} yet: reset by peer; trying again"
    fails[0] = 1000
    with pytest.raises(
        StorageError, match=r"cannot write s3://flaky/run/5/.* after 3 attempts: reset by peer; look at"
    ):
        vault.upload(folder, 5, names)
    with pytest.raises(StorageError, match="no-such-bucket"):
        Vault("s3://no-such-bucket/run").steps()
    with pytest.raises(UserError, match="no URL that fsspec knows"):
        Vault("nosuch://x")


def test_nobody_there(tmp_path, monkeypatch):
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_MAX_ATTEMPTS", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "PAUSES", ())
    vault = Vault("s3://bucket/run", endpoint="http://127.0.0.1:9")
    vault._files.retries = 1
    with pytest.raises(StorageError, match=r"cannot list s3://bucket/run.*AWS_ENDPOINT_URL"):
        vault.steps()


def test_a_run_keeps_a_copy_and_comes_back_from_it(place, tmp_path):
    saved(tmp_path / "run", 5, durable=place.url)
    saved(tmp_path / "run", 6, durable=place.url)
    assert Vault(place.url).steps() == [5, 6]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / store.TIMES).read_text().splitlines()]
    assert kinds == ["save", "copy"] * 2
    # The commands take its address as they take a workdir.
    rewrite.reshard(place.url, tmp_path / "moved", step=5)
    assert store.Store(tmp_path / "moved").steps() == [5]
    found = remote.vault_at(place.url)
    assert found is not None and found.steps() == [5, 6] and remote.vault_at(tmp_path / "run") is None
    # Another machine, and an empty folder.
    said = []
    other = store.Store(tmp_path / "other", Checkpoint(durable=place.url), said.append)
    assert other.newest() == 6 and "fetched from" in said[0]
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {"params": {"w": jax.ShapeDtypeStruct((1000,), np.float32, sharding=one)}}
    np.testing.assert_array_equal(other.restore(6, like)[0]["params"]["w"], np.arange(1000.0) + 6)
    # A damaged copy is not taken.
    name = "6/state/params.w/c.0"
    place.put(name, place.get(name)[:-1] + b"?")
    with pytest.raises(
        StorageError, match=r"6/state/params.w/c.0 \(array params.w\) is changed.*on_corrupt=previous"
    ):
        store.Store(tmp_path / "third", Checkpoint(durable=place.url), said.append).newest()
    careful = Checkpoint(durable=place.url, on_corrupt="previous")
    assert (
        store.Store(tmp_path / "third", careful, said.append).newest() == 5 and "WARNING: step 6" in said[1]
    )
    # A run that has begun by itself does not take another's.
    saved(tmp_path / "stranger", 1)
    with pytest.raises(UserError, match="holds step 6 of another run"):
        store.Store(tmp_path / "stranger", careful, said.append).newest()
    # What the rules delete goes there too.
    saved(tmp_path / "run", 7, durable=place.url, keep=1)
    assert Vault(place.url).steps() == [7]


def test_a_copy_that_fails_does_not_stop_the_run(place, tmp_path, monkeypatch):
    said = []
    checkpoints = store.Store(tmp_path / "run", Checkpoint(durable=place.url), said.append)

    def no(*args):
        raise StorageError("no such luck")

    monkeypatch.setattr(checkpoints.tiers.durable.vault, "upload", no)
    checkpoints.save(1, {"params": {"w": jnp.zeros(3)}}, {"step": 1, "tokens": 1})
    checkpoints.wait()
    assert said == ["warning: step 1 is saved, but its copy is NOT: no such luck; training goes on"]
    assert checkpoints.steps() == [1] and Vault(place.url).steps() == []


def test_copies_that_are_missing_are_made_up(place, tmp_path, monkeypatch, capsys):
    """At the next start and at each end, whatever kept them away: a store that failed, a kill, another hand."""
    folder, names = saved(tmp_path / "run", 5)  # saved before there was a durable place
    saved(tmp_path / "run", 6)
    durable = Checkpoint(durable=place.url, keep=9)
    checkpoints = store.Store(tmp_path / "run", durable, print)
    assert checkpoints.newest() == 6 and checkpoints.close() == []
    vault = Vault(place.url)
    assert vault.steps() == [5, 6] and vault.verify(5) == [] and vault.verify(6) == []

    # Cut short, of other content, with a damaged list; and one that the rules have deleted is not owed.
    place.delete(f"5/{layout.MARKER}")
    place.put(f"6/{layout.MARKER}", b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(remote, "PAUSES", ())
        patch.setattr(Vault, "_write", lambda *args: (_ for _ in ()).throw(OSError("full")))
        checkpoints = store.Store(tmp_path / "run", durable, print)
        checkpoints.newest()
        assert checkpoints.close() == [5, 6]
        said = capsys.readouterr().out
        assert f"error: {place.url} has no whole copy of step 5, 6; the same command tries again" in said
        patch.setattr(Vault, "steps", lambda self: (_ for _ in ()).throw(StorageError("nobody there")))
        assert checkpoints.tiers.durable.missing() == ([5, 6], "nobody there")
    checkpoints = store.Store(tmp_path / "run", durable, print)
    checkpoints.newest()
    checkpoints.tiers.settle()
    assert vault.steps() == [6], "one at a time, beside the saves, the newest first"
    checkpoints.save(7, {"params": {"w": jnp.arange(1000.0) + 7}}, {"step": 7, "tokens": 7})
    checkpoints.wait()
    assert vault.steps() == [5, 6, 7] and checkpoints.close() == []
    assert all(vault.verify(step) == [] for step in (5, 6, 7))
    # A step that is saved anew is no whole copy until all of it is.
    with monkeypatch.context() as patch:
        patch.setattr(Vault, "complete", lambda *args: (_ for _ in ()).throw(StorageError("cut short")))
        for step in (5, 6, 7):
            writing.remove(tmp_path / "run" / "checkpoints", step)
        checkpoints = store.Store(tmp_path / "run", Checkpoint(durable=place.url), print)
        checkpoints.save(5, {"params": {"w": jnp.zeros(1000)}}, {"step": 5, "tokens": 5})
        checkpoints.close()
        assert vault.steps() == [6, 7] and checkpoints.steps() == [5]
    # What is damaged here is not copied as if it were whole.
    victim = folder / "state" / "params.w" / "c.0"
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.raises(StorageError, match=r"c\.0 is changed"):
        vault.upload(folder, 5, names)


def test_another_run_s_place_is_refused_before_anything_is_copied(place, tmp_path):
    saved(tmp_path / "run", 5, durable=place.url)
    before = {name: place.get(name) for name in place.names()}
    saved(tmp_path / "stranger", 9)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"holds step 5 of another run than .*/stranger \(that is run \w+, this"
        ):
            store.Store(tmp_path / "stranger", Checkpoint(durable=place.url), print).newest()

    def other(meta):
        raise UserError("it has another learning rate")

    for _ in range(2):
        with pytest.raises(UserError, match=r"of another run than .*/new \(it has another learning rate\)"):
            store.Store(tmp_path / "new", Checkpoint(durable=place.url), print, other).newest()
        assert writing.numbered(tmp_path / "new" / "checkpoints") == []
    assert {name: place.get(name) for name in place.names()} == before
    asked = []
    assert store.Store(tmp_path / "same", Checkpoint(durable=place.url), print, asked.append).newest() == 5
    assert asked[0]["step"] == 5


def test_the_throttle(tmp_path, monkeypatch):
    slept, now = [], [0.0]
    monkeypatch.setattr(remote.time, "sleep", lambda s: (slept.append(s), now.__setitem__(0, now[0] + s)))
    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    vault = Vault(str(tmp_path / "v"), megabytes_per_second=2)
    for _ in range(3):
        vault._throttle(1_000_000)
    assert sum(slept) == pytest.approx(1.5)
