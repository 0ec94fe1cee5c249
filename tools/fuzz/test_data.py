"""prepare_data and characterize under generated options; a refusal leaves everything unchanged."""

import functools

import pytest
from damage import copied, damage, damages
from harness import call, folder, search
from hypothesis import given
from hypothesis import strategies as st
from places import make_places, places
from test_workdirs import NUMBERS, TEXTS

from zaya_jax.text import prepare_task

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
    "characterize": (
        "data",
        "out",
        "iops_budget",
        "seconds",
        "rows",
        "seq_len",
        "global_batch",
        "step_seconds",
    ),
    "prepare_data": (
        "input",
        "tokenizer",
        "train_bpe",
        "out",
        "text_field",
        "context",
        "held_out",
        "skip_bad",
        "processes",
        "part_mib",
        "verify",
        "part",
        "merge",
    ),
}
# it measures for so long
BRIEF = ("-1", "0", "nan", "inf", "-inf", "1e999", "", "x", "0x10", "0.1", "1", "1.5")
PATHS, WORDS = (
    ("data", "out", "input", "tokenizer", "verify"),
    ("text_field", "skip_bad", "part", "merge"),
)


@pytest.fixture(autouse=True, scope="module")
def without_workers():
    """Preparing runs here: worker processes take a second to start."""

    def run(job, todo, processes):
        for task in todo:
            yield task, prepare_task.run(task, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_task, "run_processes", run)
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
            st.sampled_from({"seconds": BRIEF}.get(name, TEXTS))
            if name in (*WORDS, "seconds")
            else numbers
        )

    value = {name: of(name) for name in FLAGS[program]}
    return st.lists(st.sampled_from(FLAGS[program]), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: value[name] for name in names})
    )


def check_options(sandbox, program, found):
    base = (
        {"input": "texts", "out": "new"}
        if program == "prepare_data" and "verify" not in found
        else {}
    )
    base = (
        dict(word.removeprefix("--").split("=") for word in SMALL[2:])
        if program == "characterize"
        else base
    )
    options = [f"--{name}={value}" for name, value in {**base, **found}.items()]
    with folder() as elsewhere:
        here = copied(sandbox, elsewhere / "here")
        options = [option.replace(str(sandbox), str(here)) for option in options]
        command = ["storage", *options] if program == "characterize" else options
        return call(program, command, here).check()


@given(data=st.data(), program=st.sampled_from(sorted(FLAGS)))
@search
def test_any_options_end_in_a_line(sandbox, data, program):
    check_options(sandbox, program, data.draw(options_of(program, sandbox)))


ON_PREPARED = (
    SMALL,
    ("prepare_data", "--verify=prepared"),
    ("prepare_data", "--input=texts", "--out=prepared"),
    ("prepare_data", "--input=prepared", "--out=new"),
    ("prepare_data", "--input=texts", "--tokenizer=prepared/tokenizer", "--out=new"),
)


def check_damaged(sandbox, command, found):
    """One program on a prepared directory with damaged files."""
    with folder() as elsewhere:
        here = copied(sandbox, elsewhere / "here")
        for one in found:
            damage(here / "prepared", *one)
        call(command[0], list(command[1:]), here).check()


@given(data=st.data(), command=st.sampled_from(ON_PREPARED))
@search
def test_a_damaged_prepared_directory_ends_in_a_line(sandbox, data, command):
    found = data.draw(
        st.lists(
            damages(sandbox / "prepared"), min_size=1, max_size=3, unique_by=lambda one: one[0]
        )
    )
    check_damaged(sandbox, command, found)
