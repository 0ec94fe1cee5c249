"""A preparation on a Ray cluster of two nodes gives what one machine does, also when its workers
die.

Ray is an extra and not in the default environment: without it these tests are left out, and say so.
"""

import os
import pathlib
import signal
import sys

import pytest
from data_helpers import contents, here, jsonl, run_here

from zaya_jax.config import UserError
from zaya_jax.text import prepare, prepare_task
from zaya_jax.text.prepare import Options

ROOT = pathlib.Path(__file__).parents[2]


def test_without_ray_the_way_out_is_said(monkeypatch, tmp_path, source):
    monkeypatch.setitem(sys.modules, "ray", None)
    options, nothing = Options([str(source)]), lambda _: None
    for do in (
        lambda: by_ray(options, tmp_path / "out"),
        lambda: prepare.prepare(options, str(tmp_path / "out"), 1, nothing, "ray", (0, 2)),
    ):
        with pytest.raises(UserError, match=r"--engine=ray needs Ray.*pip install ray"):
            do()
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes of one core each, without dashboard and statistics."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        found = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False},
            shutdown_at_exit=True,
        )
        found.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", found.address)
        yield found
        ray.shutdown()  # a node that a driver uses cannot be removed
        found.shutdown()


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in put ä").mkdir()
    for i in range(3):
        records = jsonl({"text": f"{i} {j} " + "word " * (j % 90)} for j in range(300))
        (tmp_path / "in put ä" / f"{i}.jsonl").write_bytes(records + b"{\n")
    return tmp_path / "in put ä"


def by_ray(options, out, **more):
    return prepare.prepare(options, str(out), 0, lambda _: None, engine="ray", **more)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("killed", [False, True])
def test_on_two_nodes_the_bytes_are_one_machine_s(tmp_path, source, cluster, monkeypatch, killed):
    """Also where workers are killed, which costs a retry each."""
    monkeypatch.chdir(tmp_path)
    options, mark = Options([source.name], part_bytes=9000, skip_bad=True), tmp_path / "killed once"
    if killed:
        monkeypatch.setattr(prepare_task, "_ray_work", dying(str(mark)))
    manifest, _ = by_ray(options, "ray")
    monkeypatch.setattr(prepare_task, "run_processes", run_here)
    here(options, tmp_path / "whole")
    assert (
        manifest["left_out"]["bad"] == 3 and len(list(tmp_path.glob("killed once-*"))) == 4 * killed
    )
    assert contents(tmp_path / "ray") == contents(tmp_path / "whole")


def dying(mark):
    """A task that is killed in its middle, in every seventh the first time."""
    work = prepare_task._ray_work

    def dies(task, job, folder):
        if task.number % 7 == 0:
            try:
                os.close(os.open(f"{mark}-{task.number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return work(task, job, folder)
            (
                pathlib.Path(folder)
                / job.directory
                / ".work"
                / f"train-{task.number:05d}.tokens.partial-1"
            ).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return work(task, job, folder)

    return dies
