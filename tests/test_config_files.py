"""A config file that gives no config is one line and exit code 2, whatever it does instead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_jax import cli, given
from zaya_jax.config import UserError

ROOT = Path(__file__).resolve().parent.parent
START = "from zaya_jax import config\ndef get_config():\n    c = config.default()\n"
FILES = {
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit in line 2: 3"),
    "raises": ("def get_config():\n    raise RuntimeError('boom\\nmore')\n", "RuntimeError in line 2: boom)"),
    "none": ("def get_config():\n    pass\n", "get_config() returns NoneType, not a ConfigDict"),
    "dict": ("def get_config():\n    return {'name': 'x'}\n", "returns dict, not a ConfigDict"),
    "lacks": ("x = 1\n", "it has no get_config()"),
    "empty": ("", "it has no get_config()"),
    "json": ('{"model": 1}', "is JSON, but a config file is Python with get_config()"),
    "recorded": ('{"name": "tiny", "run": null}', "read_config(WORKDIR)) has what a run recorded"),
    "base": ("class E(BaseException):\n    pass\nraise E('b')\n", "(E in line 3: b)"),
    "mute": ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n", "in line"),
    "number": ("class E(Exception):\n    def __str__(self): return 5\nraise E\n", "in line 3: E)"),
    "generator": ("def get_config():\n    yield 1\n", "get_config() returns generator, not a ConfigDict"),
    "async": ("async def get_config():\n    return 1\n", "returns coroutine, not a ConfigDict"),
    "blank": (
        "from ml_collections import ConfigDict as C\ndef get_config():\n    return C()\n",
        "what get_config() returns has no data.path, which --config.data.path is to change",
    ),
    "required": (
        "from ml_collections import config_dict as d\n"
        + START
        + "    c.optim.unlock()\n    c.optim.lr = d.required_placeholder(float)\n    return c\n",
        "config.optim.lr must be given: the config file leaves it open",
    ),
    "binary": (b"\x7fELF\x00\xff\xfe", "SyntaxError"),
    "syntax": ("def get_config(:\n", "SyntaxError in line 1"),
    "imports": ("\nimport nowhere_module\n", "ModuleNotFoundError in line 2"),
    "arguments": ("def get_config(a, b):\n    return a\n", "missing 2 required positional arguments"),
    "key": (START + "    c.optim.lrr = 1\n", "unknown config key 'lrr' in line 4; did you mean lr?"),
    "type": (START + "    c.optim.lr = 'x'\n", "TypeError"),
    "range": (START + "    c.optim.lr = -1.0\n    return c\n", "config.optim.lr=-1.0 is out of range"),
    "round": (
        "def get_config():\n    try:\n        raise OSError('x')\n    except OSError as e:\n        raise e from e\n",
        "(OSError in line",
    ),
    "cycle": (
        START + "    c.unlock()\n    c.model.me = c\n    return c\n",
        "config.model.me is a group that holds itself",
    ),
    "folder": (None, "is no file"),
}

# Each in a fork of one process that has imported the program: absl's flags are global, and importing takes seconds.
RUN_ALL = """
import os, sys
from experiments import pretrain
from zaya_jax import cli
for file in sys.argv[1:]:
    sys.stderr.flush()
    child = os.fork()
    if not child:
        code = 99
        try:
            code = cli.run(pretrain.main, ["pretrain", f"--config={file}", "--config.data.path=x", "--describe"])
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(f"<<exit>> {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each file makes the program say, exit code last."""
    folder = tmp_path_factory.mktemp("files")
    for name, (content, _) in FILES.items():
        if content is None:
            (folder / f"{name}.py").mkdir()
        else:
            (folder / f"{name}.py").write_bytes(content if isinstance(content, bytes) else content.encode())
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *(str(folder / f"{name}.py") for name in FILES)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert sorted(path.stem for path in folder.iterdir() if path.name != "__pycache__") == sorted(FILES)
    parts = done.stderr.split("<<exit>> ")
    codes = [int(part.splitlines()[0]) for part in parts[1:]]
    texts = [parts[0], *(part.split("\n", 1)[1] for part in parts[1:-1])]
    return dict(zip(FILES, zip(texts, codes, strict=True), strict=True))


@pytest.mark.parametrize("name", FILES)
def test_it_is_one_line(said, name):
    text, code = said[name]
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1, text
    assert FILES[name][1] in text


def test_what_is_shipped_is_found_from_any_folder(tmp_path, monkeypatch):
    """An installed package's pages say --config=experiments/configs/NAME.py too. A file that is there comes first."""
    monkeypatch.chdir(tmp_path)
    assert cli.read_config("experiments/configs/tiny.py").name == "tiny"
    with pytest.raises(UserError, match="needs the weights"):
        cli.read_config("experiments/configs/finetune.py")
    with pytest.raises(UserError, match="nowhere has no checkpoint"):
        cli.read_config("experiments/configs/finetune.py:nowhere")
    for name in ("experiments/configs/../pretrain.py", "experiments/configs/no.py", "configs/tiny.py"):
        with pytest.raises(UserError, match="is no file; give") as error:
            cli.read_config(name)
    assert str(ROOT / "experiments" / "configs") in str(error.value)
    folder = tmp_path / "experiments" / "configs"
    folder.mkdir(parents=True)
    (folder / "tiny.py").write_text(START + "    c.name = 'mine'\n    return c\n")
    assert cli.read_config("experiments/configs/tiny.py").name == "mine"
    told = [
        sys.executable,
        "-m",
        "experiments.pretrain",
        "--config=experiments/configs/small_bpe.py",
        "--describe",
    ]
    done = subprocess.run(
        told, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert "data/stdlib_bpe" in done.stdout + done.stderr  # its own key, though the data are not there


@pytest.mark.parametrize("name", ["finetune:nowhere", "experiments/configs/finetune.py:nowhere"])
def test_a_config_with_an_argument_in_python(name):
    with pytest.raises(UserError, match="nowhere has no checkpoint"):
        given.config_of(name)
