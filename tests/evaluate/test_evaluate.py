"""The loss on text: each token once, the bytes that it represents, only the answers of chats, files
as prepared; the program: its files, its refusals before anything is written, several processes."""

import dataclasses
import functools
import itertools
import json
import math
import re

import jax
import multiprocess_runs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import check_refused
from safetensors.numpy import load_file

import zaya_jax as zj
from experiments.evaluate import __main__ as evaluate
from zaya_jax import cli, progress
from zaya_jax.cluster import multihost
from zaya_jax.data import prepared_store
from zaya_jax.evaluate import scorer, texts
from zaya_jax.evaluate.scorer import Scorer, TokenRow
from zaya_jax.text import chat, chat_template, tokenizers
from zaya_jax.text.prepare import Options, prepare


@pytest.fixture
def call(called, monkeypatch):
    # It takes the signals.
    monkeypatch.setattr(multihost, "run_distributed", lambda program: program())
    return functools.partial(called, evaluate)


@pytest.fixture
def score(call, folder, tmp_path):
    """The output for valid paths and options, and the rows of evaluation.json."""

    def scored(*options, model=folder):
        code, out, err = call(f"--model={model}", f"--out={tmp_path / 'out'}", *options)
        assert (code, err) == (cli.DONE, "")
        text = (tmp_path / "out" / "evaluation.json").read_text()
        return out, json.loads(text, parse_constant=pytest.fail)["data"]

    return scored


@pytest.fixture
def data(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "in" / f"{name}.txt").write_text(f"some words of {name}, " * 5)
    return tmp_path / "in"


def test_a_row_for_each_data(score, data, tmp_path):
    (data / "b|.txt").hardlink_to(data / "b.txt")
    out, found = score(
        f"--data={data}/[ac].txt", f"--data={data}/b|.txt", "--limit=1", "--context=99"
    )
    assert list(found) == [f"{data}/[ac].txt", f"{data}/b|.txt"]
    row, other = found.values()
    assert row["documents"] == other["documents"] == 1 and row["tokens"] == other["tokens"]
    names = ["evaluation.html", "evaluation.json", "evaluation.md"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    table, page = (
        (tmp_path / "out" / name).read_text() for name in ("evaluation.md", "evaluation.html")
    )
    assert table in out and f"| {row['loss']:.4f} |" in table and "b\\|.txt " in table
    assert "is above the model's 64 tokens: 64 are used" in out and "--limit=1" in out
    assert "<svg" in page and f"{row['loss']:.4f}" in page
    assert "http://" not in page.replace("http://www.w3", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model={golden}", "--data={data}"], "has no tokenizer"),
        (["--model={golden}"], "has no held-out text; give --data or --tasks"),
        (["--model={data}", "--data={data}"], "has no checkpoint; train first, or give a run"),
        (["--data=nowhere.txt"], r"--data=nowhere\.txt names no file"),
        (["--mesh=rows=2", "--data={data}"], "rows"),
        (["--context=0", "--data={data}"], "must be at least 1"),
        (["--data={data}/empty.txt"], r"empty\.txt has no token to predict"),
        (["--bos", "--data={data}"], "--bos applies to tasks; give --tasks or omit it"),
        (["--seed=3", "--data={data}"], "--seed applies to tasks; give --tasks or omit it"),
        (["--text_field=body"], "--text_field applies to files of --data"),
        (["--context=8", "--tasks=arc_easy"], "--context applies to windows of --data"),
    ],
)
def test_wrong_options_are_one_line_and_nothing_is_written(
    call, folder, data, golden_dir, tmp_path, options, message
):
    (data / "empty.txt").write_text("")
    options = [option.format(data=data, golden=golden_dir / "base") for option in options]
    code, _, err = call(f"--model={folder}", f"--out={tmp_path / 'out'}", *options)
    assert code == cli.BAD_INPUT and err.count("\n") == 1 and re.search(message, err), err
    assert not (tmp_path / "out").exists()


def test_samples_are_of_the_evaluation_beside_them(score, data, tmp_path):
    samples = tmp_path / "out" / "samples.jsonl"
    samples.parent.mkdir()
    samples.write_text("of another user\n")
    for stays in (True, False):  # now it is of an evaluation
        score(f"--data={data}/a.txt")
        assert samples.exists() == stays


def test_answers_that_stand_for_no_byte_have_no_bits_per_byte(score, data):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    (data / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    out, found = score(f"--data={data}/chat.jsonl")
    (row,) = found.values()
    assert row["tokens"] > row["bytes"] == 0 and row["bits_per_byte"] is None
    assert f"{row['perplexity']:,.3f} |             – |" in out


def test_a_model_of_nan_is_said_and_the_files_are_read_by_all(score, model, data, tmp_path):
    broken = dataclasses.replace(
        model, params=jax.tree.map(lambda leaf: leaf * np.nan, model.params)
    )
    out, found = score(f"--data={data}/a.txt", model=broken.save(tmp_path / "broken"))
    assert f"No finite loss, null in evaluation.json: {data}/a.txt." in out
    (row,) = found.values()
    assert row["loss"] is None and row["by_position"][0]["loss"] is None and row["tokens"] > 0
    assert "<svg" not in (tmp_path / "out" / "evaluation.html").read_text()


@pytest.mark.slow
def test_two_processes_share_the_work_and_one_writes(score, folder, data, tmp_path):
    _, found = score(f"--data={data}", "--tokens=64")
    (alone,) = found.values()
    options = [f"--model={folder}", f"--data={data}", "--tokens=64", f"--out={tmp_path / 'both'}"]
    program = ["-m", "experiments.evaluate", *options]
    with multiprocess_runs.start(program, 2, tmp_path / "said") as run:
        results = run.wait()
    assert [result.code for result in results] == [0, 0], results
    assert "| documents |" in results[0].out and results[1].out == ""
    found = json.loads((tmp_path / "both" / "evaluation.json").read_text())
    assert found["device"].startswith("2 x ")
    (both,) = found["data"].values()
    exact = ("documents", "tokens", "bytes", "accuracy")
    assert [both[key] for key in exact] == [alone[key] for key in exact]
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_a_log_has_a_line_of_progress_each_minute(call, folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    out = tmp_path / "out"
    code, _, err = call(f"--model={folder}", f"--data={data}", f"--out={out}", "--tokens=128")
    line = re.compile(rf"{data}: ([\d.]+)(k?) tokens \[.*tokens/s\]")
    found = [line.fullmatch(said) for said in err.splitlines()]
    done = [float(match[1]) * (1000 if match[2] else 1) for match in found]
    assert code == cli.DONE and len(done) > 2 and done == sorted(done)
    (row,) = json.loads((out / "evaluation.json").read_text())["data"].values()
    assert done[-1] == pytest.approx(row["tokens"], rel=0.01)


MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "6"},
]


class Even:
    """A scorer of a model to which a token is as likely as its id says."""

    def __call__(self, rows, tell=lambda done: None):
        return [
            (-np.float32(0.01) * np.asarray(r.ids[r.first :]), np.ones(len(r.ids) - r.first, bool))
            for r in rows
        ]


@given(st.integers(0, 300), st.integers(1, 70))
def test_windows_predict_each_token_once_after_at_least_half_a_context(count, context):
    found = list(texts.windows(count, context))
    predicted = [place for _, end, first in found for place in range(first, end)]
    assert predicted == list(range(1, count))
    for number, (begin, end, first) in enumerate(found):
        assert 0 <= begin < first < end <= count and end - begin <= context + 1
        assert first - begin > context // 2 or number == 0


def test_each_document_s_tokens_are_counted_once_whatever_the_portions(
    tmp_path, tokenizer, monkeypatch
):
    contents = ["a" * n for n in (1, 5, 40, 100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": c}) + "\n" for c in contents))
    expected = {"documents": 4, "tokens": 146 + 4, "bytes": 146}
    for at_once, context in itertools.product((1, 30, 1 << 20), (1, 7, 64)):
        monkeypatch.setattr(texts, "TOKENS_AT_A_TIME", at_once)
        documents = texts.documents(str(tmp_path / "a.jsonl"), tokenizer)
        figures = texts.evaluate(Even(), documents, context)
        assert {name: figures[name] for name in expected} == expected
        assert figures["loss"] == pytest.approx((146 * 0.97 + 4 * 2.57) / 150, rel=1e-5)
        assert sum(bucket["tokens"] for bucket in figures["by_position"]) == 150
        assert [b["from"] for b in figures["by_position"]] == [1, 2, 4, 8, 16, 32, 64]


def test_bits_per_byte_by_hand(tmp_path, tokenizer, model):
    """With bytes as ids each byte is a token, and the end of the document is another one without a
    byte."""
    text = "é and ü"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    documents = texts.documents(str(tmp_path / "a.txt"), tokenizer)
    figures = texts.evaluate(Scorer(model), documents, 64)
    assert (figures["bytes"], figures["tokens"]) == (9, 10)
    ids = np.array([[256, *text.encode(), 257]])
    logits = model.logits(ids)[0, :-1].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -wanted[np.arange(10), ids[0, 1:]].sum()
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / 9, rel=1e-5)
    assert figures["loss"] == pytest.approx(nats / 10, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(nats / 10), rel=1e-4)
    assert figures["accuracy"] == pytest.approx((wanted.argmax(-1) == ids[0, 1:]).mean())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_of_a_chat_answers_alone_are_predicted(tmp_path, kind):
    tokenizer = tokenizers.load("bytes")
    if kind == "bpe":
        tokenizer = tokenizers.train_bpe(["2+2? user " * 30], 265)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    (document,) = texts.documents(str(tmp_path / "a.jsonl"), tokenizer)
    made, _ = chat_template.Template(tokenizer).encode_within(chat.parse_chat(MESSAGES), None)
    np.testing.assert_array_equal(document.tokens, made.tokens)
    np.testing.assert_array_equal(document.predicted, made.predicted)
    learnt = document.tokens[document.predicted].tolist()
    assert tokenizer.decode(learnt).replace("\n", "") == "46" or kind == "bpe"
    figures = texts.evaluate(Even(), [document], 16)
    assert figures["tokens"] == len(learnt) < len(document.tokens) - 10
    assert figures["bytes"] == len(tokenizer.decode(learnt).encode())


def test_prepared_data_are_their_files(tmp_path, tokenizer):
    lines = [{"text": f"line {i} of it, é"} for i in range(30)] + [{"messages": MESSAGES}] * 4
    blank = [{"text": text} for text in ("", " ", "\n\t\u2003")]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, *blank])
    )
    options = Options([str(tmp_path / "in")], "bytes", held_out=0.5)
    prepare(options, str(tmp_path / "out"), 1, lambda *_: None)
    plain = lambda document: (document.tokens.tolist(), document.predicted.tolist(), document.bytes)  # noqa: E731
    notes = []
    files = {
        str(plain(document))
        for document in texts.documents(str(tmp_path / "in"), tokenizer, skipped=notes.append)
    }
    assert len(notes) == len(blank) and all("empty" in note for note in notes)
    held_out = list(texts.documents(str(tmp_path / "out"), tokenizer))
    train = list(
        texts._of_store(prepared_store.PreparedStore(str(tmp_path / "out"), "train"), "", tokenizer)
    )
    assert held_out and train and len(held_out) + len(train) == len(lines)
    assert {str(plain(document)) for document in [*held_out, *train]} == files
    check_refused(
        "was prepared with another tokenizer .* prepare the text again with the latter, or for fresh",
        lambda: list(texts.documents(str(tmp_path / "out"), tokenizers.train_bpe(["a text"], 263))),
    )


def test_what_is_left_out_is_said_and_what_is_damaged_refused(tmp_path, tokenizer):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("x")
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\0\0\xff" * 9)
    notes = []
    (document,) = texts.documents(str(tmp_path), tokenizer, skipped=notes.append)
    assert document.tokens.tolist() == [256, ord("x"), 257]
    about_empty, about_picture = sorted(notes)
    assert "empty.txt" in about_empty and "picture.txt" in about_picture
    nothing = texts.evaluate(Even(), [], 8)
    assert nothing["tokens"] == nothing["documents"] == 0 and nothing["bits_per_byte"] is None
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"tex')
    bad = texts.documents(str(tmp_path / "bad.jsonl"), tokenizer)
    check_refused(r"bad\.jsonl", list, bad)


CLOSE = dict(rtol=0, atol=2e-5)


def some_rows(count, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, count)
    return [TokenRow(rng.integers(0, 256, n).tolist(), int(rng.integers(1, n))) for n in lengths]


@pytest.mark.parametrize("case", ["base", pytest.param("mixed", marks=pytest.mark.slow)])
def test_rows_are_scored_as_the_public_implementation_does(case, golden_dir):
    """Of its logits."""
    expected = load_file(golden_dir / case / "expected.safetensors")
    ids, logits = expected["input_ids"], expected["logits"].astype(np.float64)
    found = Scorer(zj.load(golden_dir / case))(
        [TokenRow(row.tolist(), first) for row, first in zip(ids, (1, 7), strict=True)]
    )
    for row, first, theirs, (log_probs, likeliest) in zip(ids, (1, 7), logits, found, strict=True):
        theirs = theirs[first - 1 : -1]
        wanted = theirs - np.log(np.exp(theirs).sum(-1, keepdims=True))
        np.testing.assert_allclose(
            log_probs, wanted[np.arange(len(wanted)), row[first:]], rtol=0, atol=1e-4
        )
        np.testing.assert_array_equal(likeliest, wanted.argmax(-1) == row[first:])


def test_batch_and_order_change_nothing(model):
    rows = some_rows(12, longest=24)
    found = Scorer(model)(rows)
    alone = [Scorer(model)([row])[0] for row in rows[:3]]
    for (a, x), (b, y) in zip(found, alone, strict=False):
        np.testing.assert_allclose(a, b, **CLOSE)
        np.testing.assert_array_equal(x, y)
    order = np.random.default_rng(1).permutation(len(rows))
    again = Scorer(model, tokens=128)([rows[i] for i in order])
    for i, (log_probs, _) in zip(order, again, strict=True):
        np.testing.assert_allclose(log_probs, found[i][0], **CLOSE)


@pytest.mark.parametrize(
    "mesh",
    [pytest.param({"data": 8}, marks=pytest.mark.slow), {"data": 2, "expert": 2, "context": 2}],
    ids=["data", "mixed"],
)
def test_a_mesh_of_eight_gives_what_one_device_does(model, folder, mesh):
    assert jax.device_count() == 8
    rows = some_rows(9, longest=16)
    for (a, _), (b, _) in zip(
        Scorer(zj.load(folder, mesh=mesh))(rows), Scorer(model)(rows), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-5)


@given(
    st.lists(st.integers(1, 3000), max_size=60),
    st.integers(1, 4096),
    st.sampled_from([None, 3000, 3001, 4096]),
)
def test_each_row_is_in_one_batch_with_room(lengths, tokens, longest):
    found = list(scorer.batches(lengths, tokens, longest))
    assert sorted(number for numbers, _ in found for number in numbers) == list(range(len(lengths)))
    for numbers, length in found:
        assert max(lengths[n] for n in numbers) <= length <= (longest or 4096)
        assert len(numbers) == 1 or scorer.power_of_two(len(numbers)) * length <= tokens
    assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)
