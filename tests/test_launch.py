"""The launch templates without a cluster: shells lint, parts of a JobSet name each other, commands
parse; what a forge and a commit's hook call is there, and says what is wrong."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments import supervise
from experiments.prepare_data import __main__ as prepare_data
from zaya_jax import cli
from zaya_jax.cluster import connections, multihost

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
SHELLS = (
    LAUNCH / "slurm.sbatch",
    LAUNCH / "prepare.sbatch",
    ROOT / ".ci" / "run",
    *(ROOT / "tools").glob("*.sh"),
)
SHELLCHECK = Path(sys.executable).with_name("shellcheck")  # no wheel of it on aarch64


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def job_of(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return replicated, job, container, {v["name"]: v.get("value") for v in container["env"]}


def rule(action, container, *codes):
    """What Kubernetes does where a container ends with one of these codes."""
    said = {"containerName": container["name"], "operator": "In", "values": [*codes]}
    return {"action": action, "onExitCodes": said}


@pytest.mark.parametrize("path", SHELLS, ids=lambda path: path.name)
def test_the_projects_shells_parse_and_lint(path):
    subprocess.run(["bash", "-n", path], check=True)
    found = SHELLCHECK if SHELLCHECK.exists() else shutil.which("shellcheck")
    if not found and platform.machine() == "aarch64":
        pytest.skip("there is no wheel of shellcheck for aarch64: install the system's")
    linted = subprocess.run([found, path], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


def test_the_jobset_names_its_parts_consistently(jobset):
    replicated, job, container, variables = job_of(jobset)
    name = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    assert variables["JAX_COORDINATOR_ADDRESS"].split(":")[0] == name
    assert replicated["replicas"] == 1 and job["parallelism"] == job["completions"] == int(
        variables["NODES"]
    )
    command = container["command"]
    gpus = container["resources"]["limits"]["amd.com/gpu"]
    assert command[1:5] == ["-m", "experiments.supervise", f"--processes={gpus}", "--"]
    options, training = command[3:4], command[5:]
    assert supervise.parser().parse_args(options).processes == gpus
    assert str(supervise.workdir_of(training)).startswith("/runs/")
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert job["podFailurePolicy"]["rules"] == [
        rule("Ignore", container, cli.PREEMPTED),
        rule("FailJob", container, cli.BAD_INPUT, cli.UNHEALTHY, cli.STORAGE),
    ]
    (secret,) = [v for v in container["env"] if v["name"] == connections.SECRET]
    reference = secret["valueFrom"]["secretKeyRef"]
    create = f"secret generic {reference['name']} --from-literal={reference['key']}="
    assert create in (LAUNCH / "jobset.yaml").read_text()


def test_the_image_has_what_the_templates_start(jobset, tmp_path):
    text = (LAUNCH / "Dockerfile").read_text()
    steps = dict(re.findall(r"^(WORKDIR|COPY) (.*)$", text, re.M))
    *_, container, _ = job_of(jobset)
    assert container["workingDir"] == steps["WORKDIR"] and steps["COPY"] == ". ."
    shell = tmp_path / "steps.sh"  # the steps as the image's maker runs them, for the linter
    commands = re.findall(r"^RUN ((?:.*\\\n)*.*)$", text, re.M)
    shell.write_text("#!/bin/sh\nEXTRAS=rocm\n" + "\n".join(commands) + "\n")
    test_the_projects_shells_parse_and_lint(shell)
    copied = re.findall(r"^!(.*)$", (LAUNCH / "Dockerfile.dockerignore").read_text(), re.M)
    assert all((ROOT / name).exists() for name in copied)
    # setup.sh reads these
    assert {"pyproject.toml", "requirements", "tools", "README.md", "LICENSE"} <= set(copied)
    assert {
        name.split(".")[0] for name in container["command"] if name.startswith("experiments")
    } <= set(copied)
    assert all(
        "image: registry.example/zaya_jax:latest" in path.read_text()
        for path in LAUNCH.glob("*.yaml")
    )


def test_slurm_and_jobset_set_the_same_values(jobset):
    slurm = (LAUNCH / "slurm.sbatch").read_text()
    there = dict(re.findall(r"^export (\w+)=(.*)$", slurm, re.M))
    there = {name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value) for name, value in there.items()}
    *_, variables = job_of(jobset)
    common = there.keys() & variables.keys()
    assert {
        name
        for name in variables
        if variables[name] and name.startswith(("NCCL", "ZAYA", "HSA", "XLA", "GLIBC"))
    } <= common
    for name in common - {"JAX_COMPILATION_CACHE_DIR", "OMP_NUM_THREADS"}:
        assert there[name] == variables[name], name
    known = {setting[0] for setting in (multihost.JOIN, multihost.WAIT, multihost.HEARTBEAT)}
    assert {name for name in there if name.startswith("ZAYA")} == known
    assert f"0 | {cli.BAD_INPUT} | {cli.UNHEALTHY} | {cli.STORAGE})" in slurm


def batch(script, folder, *options, code=0, **variables):
    """(arguments of srun or python, exit code, request to Slurm) of a batch script whose program
    ends with `code`."""
    called = f'printf "%s\\n" "$@" > given; env | grep OMP_ >> given; exit {code}'
    for name, content in {
        "srun": called,
        "python": called,
        "scontrol": 'echo "$@" >> asked',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{content}\n")
        (folder / name).chmod(0o755)
    asked = folder / "asked"
    asked.unlink(missing_ok=True)
    environ = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "PYTHON": str(folder / "python"),
        "SLURM_CPUS_PER_TASK": "128",
    }
    done = subprocess.run(
        ["bash", LAUNCH / script, *options],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )
    given = (folder / "given").read_text().splitlines()
    return given, done.returncode, asked.read_text() if asked.exists() else ""


def test_slurm_starts_an_agent_on_each_node(tmp_path):
    given, *_ = batch("slurm.sbatch", tmp_path, "--config=x", "--workdir=a b", TRAIN_NODES="126")
    assert "--wait=0" in given  # else a spare that is lost has srun kill the healthy run
    assert "--ntasks-per-node=1" in given and given[-1] == "OMP_NUM_THREADS=16"
    given = given[given.index("experiments.supervise") + 1 : -1]
    assert given == ["--processes=8", "--nodes=126", "--", "--config=x", "--workdir=a b"]
    assert supervise.parser().parse_args(given[: given.index("--")]).processes == 8


def test_slurm_queues_a_run_again_that_saved_and_counts_only_what_failed(tmp_path):
    def ended(code, restarts="20"):
        return batch("slurm.sbatch", tmp_path, code=code, MAX_RESTARTS=restarts)[1:]

    again = (0, "requeue 7\n")
    assert [ended(75, "2") for _ in range(5)] == [again] * 5
    assert [ended(137, "2") for _ in range(3)] == [again, again, (137, "")]
    assert [ended(code, "1") for code in (1, 75, 1, 1)] == [again, again, again, (1, "")]
    for code in (0, cli.BAD_INPUT, cli.UNHEALTHY, cli.STORAGE):
        assert ended(code) == (code, "")
    assert not list(tmp_path.glob("*.failures"))


# ################################################################################################
# Preparing data on many machines
# ##################################################################################################


def parsed(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["prepare_data", *arguments])
    return prepare_data.parse()


def test_parts_and_the_last_job_under_kubernetes_are_one_preparation(monkeypatch):
    parts, last = yaml.safe_load((LAUNCH / "prepare.yaml").read_text())["spec"]["replicatedJobs"]
    assert last["dependsOn"] == [{"name": parts["name"], "status": "Complete"}]
    commands = []
    for job in (parts, last):
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        assert spec["podFailurePolicy"]["rules"] == [rule("FailJob", container, cli.BAD_INPUT)]
        assert container["command"][1:3] == ["-m", "experiments.prepare_data"]
        volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        commands.append((container["command"][3:], container.get("env")))
    (of_part, (variable,)), (of_last, _) = commands
    spec = parts["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] <= spec["completions"]
    found = []
    for index in range(spec["completions"]):
        given = [word.replace(f"$({variable['name']})", str(index)) for word in of_part]
        found.append(parsed(monkeypatch, given).part)
    assert found == [(index, spec["completions"]) for index in range(spec["completions"])]
    a, b = vars(parsed(monkeypatch, given)), vars(parsed(monkeypatch, of_last))
    assert {name for name in a if a[name] != b[name]} == {"part", "processes"} and b["part"] is None
    limit = parts["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"][
        "cpu"
    ]
    assert a["processes"] == int(limit)


@pytest.mark.parametrize(
    ("variables", "step"),
    [
        ({}, None),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "2", "PARTS": "64"}, "--part=7/64"),
    ],
)
def test_slurm_gives_each_task_of_an_array_its_part(tmp_path, monkeypatch, variables, step):
    given, code, asked = batch("prepare.sbatch", tmp_path, "--input=a b/**", "--out=o", **variables)
    given = [word for word in given if not word.startswith("OMP_")]
    assert given == [
        "-m",
        "experiments.prepare_data",
        "--input=a b/**",
        "--out=o",
        *([step] if step else []),
        "--processes=128",
    ]
    assert (code, asked) == (0, "")
    assert parsed(monkeypatch, given[2:]).processes == 128


def test_slurm_starts_again_what_a_person_need_not_mend(tmp_path):
    def ended(code, **variables):
        return batch("prepare.sbatch", tmp_path, code=code, **variables)[1:]

    assert ended(cli.STORAGE) == (0, "requeue 7\n")
    assert ended(137, SLURM_RESTART_COUNT="2") == (0, "requeue 7\n")
    assert ended(137, SLURM_RESTART_COUNT="3") == (137, "")
    assert ended(cli.BAD_INPUT) == (cli.BAD_INPUT, "")


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("optim: pad rows to equal shares", ""),
        ("Merge branch 'main'", ""),
        ("pad rows", 'write "component: do one thing"'),
        ("optim: pad rows.", "without a full stop"),
        ("optim: the rows are padded", "begin with a verb"),
        ("optim: " + "pad rows " * 8, "at most 72"),
    ],
)
def test_a_subject_of_another_form_is_refused(tmp_path, subject, said):
    path = tmp_path / "message"
    path.write_text(f"{subject}\n\nThe reason.\n")
    done = subprocess.run(
        [ROOT / "tools" / "check_subject.sh", path], capture_output=True, text=True
    )
    assert (done.returncode == 0) == (not said) and said in done.stderr


def test_the_forge_and_the_hooks_call_what_is_there():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["run"]["steps"] if "run" in step] == [".ci/run"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert program.startswith(".venv/bin/") or (ROOT / program).is_file()
