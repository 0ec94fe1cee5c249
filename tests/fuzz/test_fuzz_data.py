"""prepare_data and characterize under generated options; what they refuse leaves everything as it was."""

import functools

import pytest
from damage import copied, damage, damages
from harness import call, folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fuzz_workdirs import NUMBERS, TEXTS
from values import make_places, places

from zaya_jax import cli
from zaya_jax.data import prepare_engines, prepare_task

few = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)
many = settings(few, max_examples=1000, derandomize=False, print_blob=True)
SMALL = (
    "characterize",
    "storage",
    "--data=prepared",
    "--out=new",
    "--seconds=0.1",
    "--rows=2",
    "--seq_len=16",
)
FLAGS = {
    "characterize": ("data", "out", "iops_budget", "seconds", "rows", "seq_len", "global_batch", "step_seconds"),
    "prepare_data": (
        "input", "tokenizer", "train_bpe", "out", "text_field", "context", "held_out", "skip_bad", "processes",
        "part_mib", "verify", "part", "merge",
    ),
}  # fmt: skip
BRIEF = (
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "",
    "x",
    "0x10",
    "0.1",
    "1",
    "1.5",
)  # it measures for so long
PATHS, WORDS = ("data", "out", "input", "tokenizer", "verify"), ("text_field", "skip_bad", "part", "merge")


@pytest.fixture(autouse=True, scope="module")
def without_workers():
    """Preparing runs here: worker processes take a second to start."""

    def run(job, todo, processes, tell):
        for task in todo:
            prepare_task.run(task, job, lambda *_: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_engines, "run_processes", run)
        yield


@pytest.fixture(scope="module")
def sandbox(without_workers):
    """Places of every kind, and a prepared directory."""
    with folder() as here:
        make_places(here)
        assert call("prepare_data", ["--input=texts", "--out=prepared"], here).code == 0
        yield here


@functools.cache
def options_of(program, sandbox):
    """Some options with any value; the output mostly new."""
    place = st.sampled_from([*places(sandbox), "bytes", "stdlib.", "*.txt", "**/*"])
    new = st.one_of(st.just("new"), place)

    def of(name):
        if name in PATHS:
            return new if name == "out" else place
        numbers = st.one_of(st.sampled_from(NUMBERS), st.integers(-3, 300).map(str))
        return (
            st.sampled_from({"seconds": BRIEF}.get(name, TEXTS)) if name in (*WORDS, "seconds") else numbers
        )

    value = {name: of(name) for name in FLAGS[program]}
    return st.lists(st.sampled_from(FLAGS[program]), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: value[name] for name in names})
    )


def check_options(sandbox, program, found):
    base = {"input": "texts", "out": "new"} if program == "prepare_data" and "verify" not in found else {}
    base = (
        dict(word.removeprefix("--").split("=") for word in SMALL[2:]) if program == "characterize" else base
    )
    options = [f"--{name}={value}" for name, value in {**base, **found}.items()]
    with folder() as elsewhere:
        here = copied(sandbox, elsewhere / "here")
        options = [option.replace(str(sandbox), str(here)) for option in options]
        command = ["storage", *options] if program == "characterize" else options
        return call(program, command, here).check()


@given(data=st.data(), program=st.sampled_from(sorted(FLAGS)))
@few
def test_any_options_end_in_a_line(sandbox, data, program):
    check_options(sandbox, program, data.draw(options_of(program, sandbox)))


def test_two_dashes_are_a_value(sandbox):
    """Python 3.12.1's argparse takes `--part=--` for a list."""
    assert "--part='--'" in check_options(sandbox, "prepare_data", {"part": "--"}).err


ON_PREPARED = (
    SMALL, ("prepare_data", "--verify=prepared"), ("prepare_data", "--input=texts", "--out=prepared"),
    ("prepare_data", "--input=prepared", "--out=new"),
    ("prepare_data", "--input=texts", "--tokenizer=prepared/tokenizer", "--out=new"),
)  # fmt: skip


def check_damaged(sandbox, command, found):
    """One program on a prepared directory with damaged files."""
    with folder() as elsewhere:
        here = copied(sandbox, elsewhere / "here")
        for one in found:
            damage(here / "prepared", *one)
        call(command[0], list(command[1:]), here).check()


@given(data=st.data(), command=st.sampled_from(ON_PREPARED))
@few
def test_a_damaged_prepared_directory_ends_in_a_line(sandbox, data, command):
    found = data.draw(
        st.lists(damages(sandbox / "prepared"), min_size=1, max_size=2, unique_by=lambda one: one[0])
    )
    check_damaged(sandbox, command, found)


@pytest.mark.parametrize("name", ["--iops_budget", "--seconds", "--step_seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "x", "1e999"])
def test_a_number_that_is_none_is_refused_by_its_option(sandbox, name, value):
    ended = call("characterize", [*SMALL[1:], f"{name}={value}"], sandbox).check()
    assert ended.code == cli.BAD_INPUT and name.lstrip("-") in ended.err


@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf", "-0.01", "0.51", "1e999", "x", ""])
def test_a_share_that_is_none_is_refused(sandbox, value):
    ended = call("prepare_data", ["--input=texts", "--out=new", f"--held_out={value}"], sandbox).check()
    assert ended.code == cli.BAD_INPUT and "held_out" in ended.err


@pytest.mark.parametrize(
    "options",
    [
        ["--input=texts"], ["--out=new"], ["--input=nowhere", "--out=new/a"], ["--input=empty", "--out=new/a"],
        ["--input=noise.bin", "--out=new/a"], ["--input=texts", "--out=text.txt"], ["--input=texts", "--out=texts"],
        ["--input=texts", "--out=text.txt/a/b"], ["--input=texts", "--out=/proc/x/y"],
        ["--input=texts", "--out=new/a", "--tokenizer=nowhere"], ["--input=texts", "--out=new/a", "--tokenizer=texts"],
        ["--input=texts", "--out=new/a", "--tokenizer=json.json"], ["--input=texts", "--out=new/a", "--train_bpe=9"],
        ["--input=texts", "--out=new/a", "--train_bpe=99999"], ["--input=texts", "--out=nothing://host/x"],
        ["--input=texts", "--out=new/a", "--train_bpe=300", "--tokenizer=bytes"],
        ["--input=texts", "--out=new/a", "--processes=0"], ["--input=texts", "--out=new/a", "--part_mib=0"],
        ["--input=texts", "--out=prepared", "--context=9"], ["--input=text.txt", "--out=prepared"],
        ["--verify=texts"], ["--verify=nowhere"], ["--verify=text.txt"], ["--verify", "--out="], ["new"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_prepare_data_refuses_leaves_everything_as_it_was(sandbox, options):
    assert call("prepare_data", options, sandbox).check().code == cli.BAD_INPUT


@pytest.mark.parametrize(
    "options",
    [
        [], ["nothing"], ["storage"], ["storage", "--data=prepared"], ["storage", "--out=new"],
        [*SMALL[1:], "--data=texts"], [*SMALL[1:], "--data=nowhere"], [*SMALL[1:], "--data=memory://x"],
        [*SMALL[1:], "--out=text.txt"], [*SMALL[1:], "--out=text.txt/a"], [*SMALL[1:], "--out=/proc/x/y"],
        [*SMALL[1:], "--rows=0"], [*SMALL[1:], "--rows=9999999"], [*SMALL[1:], "--rows=999999999999"],
        [*SMALL[1:], "--seq_len=0"], [*SMALL[1:], "--seq_len=999999"], [*SMALL[1:], "--seq_len=999999999999"],
        [*SMALL[1:], "--global_batch=0"], [*SMALL[1:], "more"], [*SMALL[1:], "--no=1"],
        ["all"], ["all", "--out=new", "--data=texts"], ["all", "--out=new", "--data="], ["matmul", "--out=text.txt/a"],
        ["memory", "--out=new", "--config=nowhere.py"], ["memory", "--out=new", "--config=text.txt"],
        ["memory", "--out=new", "--chip=abacus"], ["memory", "--out=/proc/x/y"], ["collectives", "--out="],
        ["collectives", "--out=new", "--devices=0"], ["collectives", "--out=new", "--seconds=nan"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_characterize_refuses_leaves_everything_as_it_was(sandbox, options):
    assert call("characterize", options, sandbox).check().code == cli.BAD_INPUT


@pytest.mark.slow
@given(data=st.data(), program=st.sampled_from(sorted(FLAGS)))
@many
def test_many_options_end_in_a_line(sandbox, data, program):
    check_options(sandbox, program, data.draw(options_of(program, sandbox)))


@pytest.mark.slow
@given(data=st.data(), command=st.sampled_from(ON_PREPARED))
@many
def test_many_damaged_prepared_directories_end_in_a_line(sandbox, data, command):
    found = data.draw(
        st.lists(damages(sandbox / "prepared"), min_size=1, max_size=3, unique_by=lambda one: one[0])
    )
    check_damaged(sandbox, command, found)
