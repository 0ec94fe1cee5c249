"""Every command that README.md and docs/ show is one that its program takes; the rule stands in commands.py."""

import re
import textwrap

import commands
import pytest

BLOCKS = [
    block
    for page in commands.pages()
    for block in commands.blocks(page.read_text(encoding="utf-8"), str(page.relative_to(commands.ROOT)))
]


def test_every_block_says_its_language():
    known = {"sh", "python", "text", "css", "js", "json", "toml", "yaml"}
    wrong = [f"{b.place}: ```{b.language}" for b in BLOCKS if b.language not in known]
    assert not wrong, f"sh is for commands, text for what they print: {wrong}"
    assert len(BLOCKS) > 40


def test_every_fence_is_read():
    """One of four signs, of tildes or left open would hide its commands."""
    for page in commands.pages():
        rest = commands.FENCE.sub("", page.read_text(encoding="utf-8"))
        assert not re.search(r"^ *(?:```|~~~|<pre)", rest, re.M), page


def test_every_command_is_one_that_its_program_takes():
    checked, wrong = 0, []
    for block in BLOCKS:
        for words in commands.commands(block.text) if block.language == "sh" else ():
            checked += 1
            said = commands.wrong(words, bool(block.needs))
            wrong += [f"{block.place}: {' '.join(words)[:90]}: {said}"] if said else []
    assert not wrong, "\n".join(wrong)
    assert checked > 45


def test_options_in_running_text_are_there():
    """`python -m experiments.NAME ...` between backticks, and usages: names alone, since values are left open."""
    wrong, checked = [], 0
    for page in commands.pages():
        text = page.read_text(encoding="utf-8")
        usages = [
            b.text.replace("\\\n", " ") for b in commands.blocks(text, page.name) if b.language == "text"
        ]
        usages = [re.sub(r"\n +(?=\[|--)", " ", usage) for usage in usages]
        quoted = "".join(f"`{line}`\n" for usage in usages for line in usage.splitlines())
        for match in commands.INLINE.finditer(quoted + commands.FENCE.sub("", text)):
            checked += 1
            name, rest = match[1].replace("-", "_"), match[2].partition(" -- ")[0]
            if name not in commands.OPTIONS:
                wrong.append(f"{page.name}: {match[0]}: no such program")
            known = {o for options in commands.OPTIONS.get(name, {}).values() for o in options} | {"help"}
            for option in re.findall(r"(?<=[ \[]--)[\w.]+", rest):
                key = option.removeprefix("config.")
                if option not in known and not (
                    option != key and key in (*commands.config.all_keys(), "KEY")
                ):
                    wrong.append(f"{page.name}: {match[0]}: no --{option}")
    assert not wrong, "\n".join(wrong)
    assert checked > 60


def test_commands_stand_in_fences():
    """What is only indented would be passed over."""
    command = re.compile(
        r"^(?: {4}|\t)(?:\w+=\S+ )*(?:\S*python -|make |launch/|sbatch |kubectl |zaya-)", re.M
    )
    for page in commands.pages():
        assert not command.search(commands.FENCE.sub("", page.read_text(encoding="utf-8"))), page


def test_python_on_the_pages_compiles():
    for block in BLOCKS:
        if block.language == "python":
            lines = textwrap.dedent(block.text).splitlines()
            if ">>> " in block.text:
                lines = [line[4:] for line in lines if line.startswith((">>>", "..."))]
            compile("\n".join(lines) + "\n", block.place, "exec")


def test_the_config_of_the_how_to_is_one():
    (block,) = [b for b in BLOCKS if b.page == "docs/howto/own_data.md" and b.language == "python"]
    names: dict = {}
    exec(textwrap.dedent(block.text), names)
    assert commands.config.check(names["get_config"]()).data.path == "data/mine"


@pytest.mark.slow
def test_the_loss_of_the_how_to_is_one():
    (block,) = [b for b in BLOCKS if b.page == "docs/howto/own_layer.md" and b.language == "python"]
    names: dict = {}
    exec(block.text, names)
    assert 5 < float(names["loss"]) < 6.5  # fresh weights of 264 ids: ln 264 = 5.58
    assert names["grads"]["embed"]["embedding"].shape == (264, 192)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python -m experiments.pretrain --wokdir=runs/x", "has no --wokdir"),
        ("python -m experiments.pretrain --config.run.num_step=5", "key config.run.num_step; did you mean"),
        ("python -m experiments.pretrain --config.run.num_steps=many", "num_steps"),
        ("python -m experiments.pretrain --config.optim.lr=-1", "optim.lr=-1.0 is out of range"),
        ("python -m experiments.pretrain --config=experiments/configs/tony.py", "is no file"),
        ("python -m experiments.pretrain --config=experiments/configs/zaya1_base.py", "Needs"),
        ("python -m experiments.pretend", "experiments.pretend is no program"),
        ("python -m experiments.generate --workdir=runs/x --warmth=2", "--warmth"),
        ("python -m experiments.generate --prompt=x", "workdir"),
        ("python -m experiments.checkpoint inspekt --workdir=runs/x", "inspekt"),
        ("python -m experiments.prepare_data --train_bpe=lots --out=x", "'lots' is no whole number"),
        ("python -m experiments.prepare_data --input=x --out=DIR", "DIR is for the reader"),
        ("python -m experiments.supervise --processes=4 -- --confg=x", "has no --confg"),
        ("launch/node.sh 4 python -m experiments.pretrain --nothing=1", "has no --nothing"),
        ("launch/node.sh python -m experiments.pretrain", "takes a number first"),
        ("make pretrian", "no target pretrian"),
        ("make pretrain ARGS='--config.run.nom=4'", "run.nom"),
        ("make setup EXTRAS=cude", "cude is no extra"),
        ("make setup EXTRAS=cuda", "Needs"),
        ("make setup EXTRA=hf", "knows ARGS, EXTRAS"),
        ("sbatch launch/slurm.sbatch", "needs a cluster"),
        ("zaya-prepare-dater --out=x", "no command of pyproject.toml"),
        ("zaya-generate --workdir=x --hot=1", "--hot"),
        ("tools/nothing.sh", "is no file"),
        ("python nothing.py", "no such script"),
        ("python -m benchmarks.kernels --nothing=1", "has no --nothing"),
        ("make test && python -m experiments.plan --nothing=1", "has no --nothing"),
        ("for i in 1 2; do\n    python -m experiments.plan \\\n        --nothing=$i\ndone", "has no --nothing"),
        ("frobnicate --all", "no program that the documentation knows"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(command, says):
    assert says in " ".join(commands.wrong(words, needs=False) for words in commands.commands(command))


@pytest.mark.parametrize(
    "command",
    [
        "make pretrain     # a comment --with=options",
        "XLA_FLAGS=--x=8 .venv/bin/python -m experiments.pretrain --workdir=runs/x --config.mesh.data=2",
        "python -m experiments.generate --workdir=runs/x --prompt='def main(' | head -3 > out.txt",
    ],
)
def test_a_right_command_passes(command):
    assert [commands.wrong(words, needs=False) for words in commands.commands(command)].count("") > 0
    assert not any(commands.wrong(words, needs=False) for words in commands.commands(command))


def test_what_a_block_needs_stands_on_the_line_before():
    fence = "```sh\nmake setup EXTRAS=cuda\n```\n"
    (said,) = commands.blocks(f"Text.\n\n*Needs: an NVIDIA GPU.*\n\n{fence}", "page")
    (unsaid,) = commands.blocks(f"*Needs: an NVIDIA GPU.*\n\nText.\n\n{fence}", "page")
    assert said.needs and not unsaid.needs and (unsaid.place, unsaid.language) == ("page:5", "sh")


# Options that read what lies at their value; --workdir too, but for the programs that make one.
READ = ("--input", "--data", "--tokenizer", "--verify", "--figures", "--model", "--from", "--config.run.fork")
READ += ("--config.data.path", "--config.data.tokenizer")
MAKERS = ("pretrain", "supervise", "from_hf")


def unmade(found: list[commands.Block]) -> list[str]:
    """What commands of a page read that neither the clone, `make pretrain` nor a command before them has made.

    So too more devices than a computer has, and another process. Blocks that say what they need may.
    """
    made, wrong = {"stdlib", "bytes", "runs/tiny"}, []
    for block in found:
        if block.language != "sh":
            continue
        if not block.needs and "--config.mesh." in block.text and "device_count=" not in block.text:
            wrong.append(f"{block.place}: a mesh without XLA_FLAGS=--xla_force_host_platform_device_count")
        for words in commands.commands(block.text):
            given = [word.split("=", 1) for word in words if word.startswith("--") and "=" in word]
            makes = any(word.endswith(MAKERS) for word in words[:6]) and "report" not in words
            for option, value in given:
                value = value.partition("@")[0].rstrip("/")
                reads = option in READ or (option == "--workdir" and not makes) or option == "--process_id"
                if reads and not block.needs and value not in made and not (commands.ROOT / value).exists():
                    wrong.append(f"{block.place}: {option}={value}")
            made |= {value for option, value in given if option in ("--out", "--workdir", "--to")}
            made |= {f"runs/{name}" for name in re.findall(r"configs/(\w+)\.py", " ".join(words)) if makes}
            made |= {word for word in words[2:] if words[1].startswith("tools/")}
    return wrong


def test_a_block_that_needs_what_is_not_there_says_so():
    pages: dict[str, list[commands.Block]] = {}
    for block in BLOCKS:
        pages.setdefault(block.page, []).append(block)
    wrong = [line for blocks in pages.values() for line in unmade(blocks)]
    assert not wrong, "say it on the line before the block, *Needs: ...*:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python -m experiments.prepare_data --input=corpus/ --out=data/x", "--input=corpus"),
        ("python -m experiments.supervise report --workdir=runs/four", "--workdir=runs/four"),
        ("python -m experiments.generate --workdir=runs/other --prompt=x", "--workdir=runs/other"),
        ("python -m experiments.pretrain --config.mesh.data=2", "a mesh without XLA_FLAGS"),
        ("python -m experiments.pretrain --coordinator=a:1 --num_processes=2 --process_id=1", "--process_id"),
        ("make pretrain\npython -m experiments.checkpoint verify --workdir=runs/tiny", ""),
        ("python -m experiments.prepare_data --input=docs --out=d\npython -m experiments.prepare_data --verify=d", ""),
        ("python tools/example_chats.py c.jsonl\npython -m experiments.pretrain --config.data.path=c.jsonl", ""),
    ],
)  # fmt: skip
def test_what_a_page_has_not_made_is_found(command, says):
    block = commands.Block("page", 1, "sh", command, "")
    said = " ".join(unmade([block]))
    assert says in said if says else not said
    assert not unmade([block._replace(needs="*Needs: all of it.*")])
