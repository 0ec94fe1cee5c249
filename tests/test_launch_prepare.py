"""The templates that prepare data on many machines: their commands are the program's."""

import os
import subprocess
import sys

import pytest
import yaml
from test_launch import LAUNCH

from experiments import prepare_data
from zaya_jax import cli
from zaya_jax.data import prepare_plan


def parsed(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["prepare_data", *arguments])
    return prepare_data.parse()


def test_parts_and_merge_under_kubernetes_are_one_preparation(monkeypatch):
    jobset = yaml.safe_load((LAUNCH / "prepare.yaml").read_text())
    parts, merge = jobset["spec"]["replicatedJobs"]
    assert merge["dependsOn"] == [{"name": parts["name"], "status": "Complete"}]
    commands = []
    for job in (parts, merge):
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        (rule,) = spec["podFailurePolicy"]["rules"]
        assert rule["onExitCodes"]["values"] == [cli.BAD_INPUT]
        assert rule["onExitCodes"]["containerName"] == container["name"]
        assert container["command"][1:3] == ["-m", "experiments.prepare_data"]
        volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        commands.append((container["command"][3:], container.get("env")))
    (of_part, (variable,)), (of_merge, _) = commands
    spec = parts["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] <= spec["completions"]
    found = []
    for index in range(spec["completions"]):
        given = [word.replace(f"$({variable['name']})", str(index)) for word in of_part]
        found.append(prepare_plan.parse_part(parsed(monkeypatch, given).part))
    assert found == [prepare_plan.Part(index, spec["completions"]) for index in range(spec["completions"])]
    a, b = vars(parsed(monkeypatch, of_part)), vars(parsed(monkeypatch, of_merge))
    assert {name for name in a if a[name] != b[name]} == {"part", "merge", "processes"} and b["merge"]
    limit = parts["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    assert a["processes"] == int(limit)


def slurm(folder, code, **variables):
    """(what the program was called with, exit code, what Slurm was asked) of the batch script."""
    for name, script in {
        "python": f'printf "%s\\n" "$@" > given; exit {code}',
        "scontrol": 'echo "$@" >> asked',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    (folder / "asked").unlink(missing_ok=True)
    environ = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7",
        "PYTHON": str(folder / "python"), "SLURM_CPUS_PER_TASK": "6",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", LAUNCH / "prepare.sbatch", "--input=a b/**", "--out=o"], env=environ | variables,
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    asked = folder / "asked"
    return (
        (folder / "given").read_text().splitlines(),
        done.returncode,
        asked.read_text() if asked.exists() else "",
    )


@pytest.mark.parametrize(
    ("variables", "step"),
    [
        ({}, "--merge"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "64"}, "--part=3/64"),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "2", "PARTS": "64"}, "--part=7/64"),
    ],
)
def test_slurm_gives_each_task_of_an_array_its_part(tmp_path, monkeypatch, variables, step):
    given, code, asked = slurm(tmp_path, 0, **variables)
    assert given == ["-m", "experiments.prepare_data", "--input=a b/**", "--out=o", step, "--processes=6"]
    assert (code, asked) == (0, "")
    assert parsed(monkeypatch, given[2:]).processes == 6


def test_slurm_starts_again_what_a_person_need_not_mend(tmp_path):
    assert slurm(tmp_path, cli.STORAGE)[1:] == (0, "requeue 7\n")
    assert slurm(tmp_path, 137, SLURM_RESTART_COUNT="2")[1:] == (0, "requeue 7\n")
    assert slurm(tmp_path, 137, SLURM_RESTART_COUNT="3")[1:] == (137, "")
    assert slurm(tmp_path, cli.BAD_INPUT)[1:] == (cli.BAD_INPUT, "")
