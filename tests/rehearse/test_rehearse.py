"""The rehearsal's corpus, recipe and story; its stations are run whole by a slow test."""

import json
import subprocess
import sys

import pytest
from refusals import check_error

from experiments.configs.zaya1_base import get_config as full_size
from tools.rehearse import corpus as rehearsal_corpus
from tools.rehearse import recipe
from tools.rehearse.story import Failed, Story
from zaya_jax import config, schedule


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rehearsal_corpus.make(folder, 0.1, [64, 512, 2048])
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_corpus_is_made_from_this_machine_and_its_tasks_ask_for_what_it_does_not_say(corpus):
    assert all(
        (corpus / f"{name}.jsonl").stat().st_size > 90_000
        for name in ("web", "code", "math", "reasoning")
    )
    taught = {
        line for record in lines(corpus / "math.jsonl") for line in record["text"].splitlines()
    }
    for asked in lines(corpus / "tasks" / "rehearsal_sums.jsonl"):
        *shown, sum_ = (asked["question"] + asked["right"]).splitlines()
        assert sum_ not in taught and len(shown) == 3
        a, b, answer = (int(word) for word in sum_.replace("+", "").replace("=", "").split())
        assert a + b == answer and asked["right"] not in [asked[f"wrong{i}"] for i in range(3)]


def test_the_recipe_has_the_full_size_recipe_s_proportions():
    small, full = (
        schedule.make_plan(config.check(found)).segments
        for found in (recipe.get_config("4"), full_size())
    )
    ours, theirs = ({s.phase.name: s.phase for s in segments} for segments in (small, full))
    assert list(ours) == list(theirs)
    for name, phase in ours.items():
        other = theirs[name]
        assert phase.seq_len * 4096 == other.seq_len * 64 or name == "sft"  # 1 : 8 : 32
        assert (phase.rope_theta, phase.packing) == (other.rope_theta, other.packing)
        assert phase.mesh is None or other.mesh is None or phase.mesh.context == other.mesh.context
        weights = [source.rsplit("=")[1] for source in phase.mixture]
        assert weights == [source.rsplit("=")[1] for source in other.mixture]
    assert [phase.seq_len for phase in ours.values()] == [64, 64, 512, 2048]
    assert small[0].sequences * 4 == small[-4].sequences  # a ramp


def test_a_story_notes_broken_promises_and_ends_at_a_failure(tmp_path, capsys):
    def first(story):
        """Prints."""
        assert story.program("-c", "print(input())", given="hello\n") == "hello\n"
        story.promise("one is one", True, "1")

    def second(story):
        """Fails."""
        story.program("-c", "raise SystemExit(3)")

    def third(story):
        raise AssertionError("a station after a failure")

    story = Story(tmp_path / "out")
    story.visit([first, second, third])
    assert "exit code 3" in story.failed and not story.written("A test", "")
    page = (tmp_path / "out" / "rehearsal.html").read_text()
    assert (
        "one is one" in page
        and "exit code 3" in page
        and "1 of 1 promises kept" in capsys.readouterr().out
    )
    broken = Story(tmp_path / "broken")
    broken.promise("two is one", False, "2")
    assert not broken.written("A test", "")
    check_error(Failed, "exit code 2", broken.program, "-c", "raise SystemExit(2)", ok=(0, 3))


@pytest.mark.slow
def test_the_whole_rehearsal_keeps_its_promises(tmp_path):
    command = [sys.executable, "-m", "tools.rehearse", f"--out={tmp_path / 'out'}", "--minutes=6"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
