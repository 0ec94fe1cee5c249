"""lm-eval's tasks: with lm-eval installed, and against its own `hf` model where an interpreter with
torch is named.

    ZAYA_TORCH_PYTHON=ORACLE/bin/python python -m pytest tests/evaluate/test_harness.py

ORACLE has torch, transformers and lm-eval (benchmarks/evaluation.md says which); lm-eval must be
here too.
"""

import json
import math
import os
from pathlib import Path

import pytest
from refusals import check_refused

from zaya_jax.evaluate import harness
from zaya_jax.evaluate.scorer import Scorer, TokenRow
from zaya_jax.text import tokenizers

TASKS = str(Path(__file__).parent / "tasks")


def test_without_lm_eval_the_way_to_it_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_refused(r"--tasks needs lm-eval-harness: pip install lm-eval", harness.require)


def test_figures_have_their_standard_errors():
    values = {
        "alias": "a",
        "sample_len": 3,
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "em,strict": 1,
        "em_stderr,strict": "N/A",
    }
    assert harness.figures({"results": {"task": values}}) == {
        "task": {"acc": (0.5, 0.1), "em (strict)": (1.0, None)}
    }
    assert harness.figures({}) == {}


def test_samples_are_json_that_all_read():
    found = harness.sample_lines(
        {"samples": {"task": [{"resps": [[(-math.inf, False)]], "filtered": math.nan, "of": {1}}]}}
    )
    assert json.loads(found, parse_constant=pytest.fail) == {
        "task": "task",
        "resps": [[[None, False]]],
        "filtered": None,
        "of": "{1}",
    }


@pytest.fixture
def lm(model, monkeypatch):
    """The model as lm-eval's; data sets are read from this folder alone."""
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return harness.make_lm(model)


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_log_likelihoods_are_sums_over_the_answer(lm, model):
    long = "words " * 30
    asked = [
        ("a question", " an answer"),
        ("", "no question"),
        (long, " its answer"),
        ("a ", "space"),
    ]
    found = lm.loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)
    # A space at the end of a question belongs to the answer, as in lm-eval's own models.
    rows = [
        TokenRow([256, *b"a question an answer"], 11),
        TokenRow([256, *b"no question"], 1),
        TokenRow([*(long + " its answer").encode()][-65:], 53),
        TokenRow([256, *b"a space"], 2),
    ]
    for (total, greedy), (log_probs, likeliest) in zip(found, Scorer(model)(rows), strict=True):
        assert total == pytest.approx(log_probs.sum(), abs=1e-4) and greedy == likeliest.all()


def test_a_question_of_white_space_is_the_begin_of_document(lm):
    """lm-eval moves the space to the answer, which leaves no question; its own hf model stops at an
    assertion."""
    ask = lambda *pairs: lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)  # noqa: E731
    assert ask(("  ", "a"), ("\n", "b")) == ask(("", "  a"), ("", "\nb"))


def test_rolling_windows_predict_each_token_once(lm, model):
    text = "a text of some length, " * 7  # 161 bytes in a context of 64
    (total,) = lm.loglikelihood_rolling(
        requests("loglikelihood_rolling", (text,)), disable_tqdm=True
    )
    # The tokenizer adds a begin of document, which lm-eval's hf predicts too.
    ids = [256, 256, *text.encode()]
    rows = [TokenRow(ids[0:65]), TokenRow(ids[64:129]), TokenRow(ids[98:163], 31)]
    assert sum(len(row.ids) - row.first for row in rows) == 1 + len(text)
    assert total == pytest.approx(sum(x.sum() for x, _ in Scorer(model)(rows)), abs=1e-3)


def test_generations_end_before_their_stop_strings_and_are_a_seed_s_own(lm, model):
    plain = model.generate("def f", 12).removeprefix("def f")
    greedy = {"until": [], "max_gen_toks": 12}
    stop = {"until": [plain[3]], "max_gen_toks": 12}
    sampled = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_k": 50}
    asked = [
        *(("def f", options) for options in (greedy, stop, sampled, sampled)),
        ("x" * 100, greedy),
        ("", greedy),
    ]
    found = lm.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert found[1] == found[0].split(plain[3])[0]
    assert found[2] != found[3]  # requests have seeds of their own
    assert lm.generate_until(requests("generate_until", *asked), disable_tqdm=True) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4, which is not supported"),
        ({"max_gen_toks": 64}, "64 new tokens, and the model's context is 64"),
        ({"do_sample": True}, "without a temperature"),
    ],
)
def test_generation_that_there_is_not_is_refused(lm, options, message):
    asked = requests("generate_until", ("a", {"until": [], "max_gen_toks": 4} | options))
    check_refused(message, lm.generate_until, asked, disable_tqdm=True)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "an answer that adds no token to its question"),
        ("x" * 90, r"answer of 90 tokens, above the model's context of 64"),
    ],
)
def test_answers_that_have_no_likelihood_are_refused(lm, answer, message):
    asked = requests("loglikelihood", ("a", answer))
    check_refused(message, lm.loglikelihood, asked, disable_tqdm=True)


def test_tasks_are_run_and_their_samples_kept(lm, model):
    found = harness.run(model, ["zaya_choice", "zaya_rolling"], include_path=TASKS, limit=3)
    figures = harness.figures(found)
    assert (
        list(figures["zaya_choice"]) == ["acc", "acc_norm"]
        and figures["zaya_rolling"]["bits_per_byte"][0] > 0
    )
    lines = [json.loads(line) for line in harness.sample_lines(found).splitlines()]
    assert [line["task"] for line in lines] == ["zaya_choice"] * 3 + ["zaya_rolling"] * 3
    few = harness.run(model, ["zaya_nothing"], include_path=TASKS, limit=2, num_fewshot=0)
    assert len(few["samples"]["zaya_nothing"]) == 2


def test_tasks_that_are_not_there_or_broken_are_one_line(lm, model, tmp_path):
    check_refused(
        r"--tasks=zaya_choise is not one of .*; did you mean zaya_choice\?",
        harness.run,
        model,
        ["zaya_choise"],
        include_path=TASKS,
    )
    text = (Path(TASKS) / "choice.yaml").read_text().replace("zaya_choice", "broken")
    (tmp_path / "broken.yaml").write_text(text.replace("tasks/choice.jsonl", "tasks/gone.jsonl"))
    check_refused(
        "--tasks=broken cannot be loaded: ",
        harness.run,
        model,
        ["broken"],
        include_path=str(tmp_path),
    )


@pytest.mark.slow
def test_each_request_is_answered_as_lm_eval_s_hf_model_does(tmp_path):
    """See benchmarks/evaluation.md for the figures of a run of 200 steps."""
    pytest.importorskip("lm_eval")
    python = os.environ.get("ZAYA_TORCH_PYTHON")
    if not python:
        pytest.skip("ZAYA_TORCH_PYTHON names no interpreter with torch, transformers and lm-eval")
    import evaluation  # of benchmarks

    model = evaluation.exported(evaluation.trained(tmp_path, 20), tmp_path / "hf_model")
    ours, theirs = evaluation.ours(model, tmp_path), evaluation.theirs(python, model, tmp_path)
    found = evaluation.compared(ours, theirs)
    assert {task: row["requests"] for task, row in found.items()} == {
        "zaya_choice": 36,
        "zaya_nothing": 36,
        "zaya_go_on": 12,
        "zaya_rolling": 6,
    }
    # A rolling likelihood is a sum over windows, each of them some 300 nats that `hf` adds up in
    # float32.
    encode = tokenizers.load(tmp_path / "tokenizer").encode
    lines = (Path(TASKS) / "rolling.jsonl").read_text().splitlines()
    windows = max(-(-len(encode(json.loads(line)["text"])) // 64) for line in lines)
    assert windows > 2
    for task, row in found.items():
        bound = 1e-4 * (windows if task == "zaya_rolling" else 1)
        assert row["distance"] < bound and row["other"] == 0, task
    assert len(found["zaya_go_on"]["texts"]) > 1


def test_a_chat_template_spells_the_question_and_its_marks_are_ids(model, lm):
    """As lm-eval asks a model that --apply_chat_template names; without one the marks are text."""
    asked = harness.make_lm(model, in_chat=True)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    text = asked.apply_chat_template(turns)
    assert (
        text == "<|bos|><|turn|>system\nBe"
        " brief.<|end_turn|>\n<|turn|>user\n2+2?<|end_turn|>\n<|turn|>assistant\n"
    )
    ids = asked.tok_encode(text)
    assert (
        ids[:2] == [256, 259] and ids.count(260) == 2 and lm.tok_encode(text)[:2] == [256, ord("<")]
    )
    begun = [*turns, {"role": "assistant", "content": "It is"}]
    assert asked.apply_chat_template(begun, add_generation_prompt=False) == text + "It is"
    assert "generation" in asked.chat_template(True)


@pytest.mark.parametrize("adds", [False, True])
def test_the_tokenizer_says_whether_texts_have_a_begin_of_document(adds):
    """As transformers' tokenizers do for lm-eval's hf: Gemma's and Llama's post-processor adds
    one."""
    content = json.loads(tokenizers.Bytes().json())
    if not adds:
        content["post_processor"] = None
    found = tokenizers.Tokenizer(json.dumps(content).encode(), {}, "made here")
    answers = [harness._Answers(None, found, bos, 1, 0, False) for bos in (None, True, False)]
    for one in answers:
        one.prefix_token_id = found.bos_id
    assert [one.tok_encode("a") for one in answers] == [[256] * adds + [97], [256, 97], [97]]
    assert found.encode("a") == [97]  # training's documents are as before
