"""What a forge and a commit's hook call is there, and says what is wrong."""

import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("optim: pad rows to equal shares", ""),
        ("Merge branch 'main'", ""),
        ("pad rows", 'write "component: do one thing"'),
        ("optim: pad rows.", "without a full stop"),
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
