"""Every command that README.md and docs/ show is one that its program takes; commands.py has the
rule."""

import itertools
import re
import textwrap

import commands
import pytest

from zaya_jax import config

KEYS = {f"config.{key}" for key in (*config.all_keys(), "KEY")}
KNOWN = {
    name: {"help", *KEYS, *itertools.chain(*options.values())}
    for name, options in commands.OPTIONS.items()
}


def test_every_block_says_its_language():
    known = {"sh", "python", "text", "css", "js", "json", "toml", "yaml"}
    wrong = [f"{b.place}: ```{b.language}" for b in commands.BLOCKS if b.language not in known]
    assert not wrong, f"sh is for commands, text for what they print: {wrong}"
    assert len(commands.BLOCKS) > 40


@pytest.fixture
def my_layers(tmp_path, monkeypatch):
    """The module that docs/howto/own_layer.md has the reader write, and then names."""
    (layer,) = [block.text for block in commands.BLOCKS if "class Halved" in block.text]
    code = layer.partition("\nmodel = ")[0]
    (tmp_path / "my_layers.py").write_text(f"import zaya_jax as zj\n{code}")
    monkeypatch.syspath_prepend(tmp_path)


def test_every_command_is_one_that_its_program_takes(my_layers):
    checked, wrong = 0, []
    for block in commands.BLOCKS:
        for words in commands.commands(block.text) if block.language == "sh" else ():
            checked += 1
            said = commands.wrong(words, bool(block.needs))
            wrong += [f"{block.place}: {' '.join(words)[:90]}: {said}"] if said else []
    assert not wrong, "\n".join(wrong)
    assert checked > 45


def test_options_in_running_text_are_there():
    """`python -m experiments.NAME ...` between backticks, and usages: names alone, since values are
    left open."""
    wrong, checked = [], 0
    for page in commands.pages():
        text = page.read_text(encoding="utf-8")
        printed = [b.text for b in commands.blocks(text, page.name) if b.language == "text"]
        usages = re.sub(r"\\\n|\n +(?=\[|--)", " ", "".join(printed))
        quoted = "".join(f"`{line}`\n" for line in usages.splitlines())
        for match in commands.INLINE.finditer(quoted + commands.FENCE.sub("", text)):
            checked += 1
            name, rest = match[1].replace("-", "_"), match[2].partition(" -- ")[0]
            options = re.findall(r"(?<=[ \[]--)[\w.]+", rest)
            if name not in KNOWN or not KNOWN[name].issuperset(options):
                wrong.append(f"{page.name}: {match[0]}")
    assert not wrong, "\n".join(wrong)
    assert checked > 60


def test_commands_stand_in_fences():
    """Indented blocks would be passed over."""
    command = re.compile(
        r"^(?: {4}|\t)(?:\w+=\S+ )*(?:\S*python -|make |launch/|sbatch |kubectl |zaya-)", re.M
    )
    for page in commands.pages():
        assert not command.search(commands.FENCE.sub("", page.read_text(encoding="utf-8"))), page


def test_python_on_the_pages_compiles():
    for block in commands.BLOCKS:
        if block.language == "python":
            lines = textwrap.dedent(block.text).splitlines()
            if ">>> " in block.text:
                lines = [line[4:] for line in lines if line.startswith((">>>", "..."))]
            compile("\n".join(lines) + "\n", block.place, "exec")


def test_the_config_of_the_how_to_is_one():
    (block,) = [
        b for b in commands.BLOCKS if b.page == "docs/howto/own_data.md" and b.language == "python"
    ]
    names: dict = {}
    exec(textwrap.dedent(block.text), names)
    assert config.check(names["get_config"]()).data.path == "data/mine"


@pytest.mark.slow
def test_the_loss_and_the_router_of_the_how_to_are_ones():
    names: dict = {}
    first_layers = []
    for block in (
        b for b in commands.BLOCKS if b.page == "docs/howto/own_layer.md" and b.language == "python"
    ):
        exec(block.text, names)
        if "model" in names:
            first_layers.append(names["model"].layer(0))
    assert 5 < float(names["loss"]) < 6.5  # fresh weights of 264 ids: ln 264 = 5.58
    assert isinstance(first_layers[-1], names["Halved"])
    assert any(isinstance(layer.router, names["LinearRouter"]) for layer in first_layers)
    assert names["grads"]["embed"]["embedding"].shape == (264, 192)


@pytest.mark.slow
def test_what_the_page_on_debugging_shows_is_found(capfd):
    names: dict = {}
    for block in (
        b for b in commands.BLOCKS if b.page == "docs/debugging.md" and b.language == "python"
    ):
        if "breakpoint" not in block.text:  # which would wait for a person
            exec(block.text, names)
    said = capfd.readouterr().out
    assert said.count("greatest number of the stream") == 4
    assert "not finite: 2" in said and re.search(r"nan.* in .*router\.py line", said)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python -m experiments.pretrain --wokdir=runs/x", "--wokdir"),
        (
            "python -m experiments.pretrain --config.run.num_step=5",
            "key config.run.num_step; did you mean",
        ),
        ("python -m experiments.pretend", "experiments.pretend is no program"),
        ("python -m experiments.prepare_data --input=x --out=DIR", "DIR is for the reader"),
        ("make pretrian", "no target pretrian"),
        ("zaya-prepare-dater --out=x", "experiments.prepare_dater is no program"),
        ("python -m benchmarks.kernels --nothing=1", "--nothing"),
        ("make test && python -m experiments.plan --nothing=1", "--nothing"),
        (
            "for i in 1 2; do\n    python -m experiments.plan \\\n        --nothing=$i\ndone",
            "--nothing",
        ),
    ],
)
def test_a_wrong_command_is_found(command, says):
    assert says in " ".join(
        commands.wrong(words, needs=False) for words in commands.commands(command)
    )


def test_what_a_block_needs_stands_on_the_line_before():
    fence = "```sh\nmake setup EXTRAS=cuda\n```\n"
    (said,) = commands.blocks(f"Text.\n\n*Needs: an NVIDIA GPU.*\n\n{fence}", "page")
    (unsaid,) = commands.blocks(f"*Needs: an NVIDIA GPU.*\n\nText.\n\n{fence}", "page")
    assert said.needs and not unsaid.needs and (unsaid.place, unsaid.language) == ("page:5", "sh")
