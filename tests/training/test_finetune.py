"""Fine-tuning: a run's weights learn to answer as chats do, and only that; others are refused in
one line."""

import dataclasses
import json
import re

import numpy as np
import pytest
import tiny_runs
from refusals import refusal
from tiny_runs import start as train

from experiments.configs import finetune, tiny
from zaya_jax import cli, config
from zaya_jax.data import stores, windows
from zaya_jax.pytorch import exchange, tokenizer_files
from zaya_jax.text import chat, chat_template, prepare, tokenizers
from zaya_jax.text.prepare import Options
from zaya_jax.text.shard_format import SPLITS
from zaya_jax.training.workdir import read_config

SMALL = {
    "model__hidden_size": 32,
    "model__num_hidden_layers": 1,
    "model__head_dim": 8,
    "model__moe_intermediate_size": 32,
    "model__num_experts": 4,
    "model__router_hidden_size": 8,
    "model__max_position_embeddings": 128,
    "data__seq_len": 64,
    "data__global_batch": 8,
    "eval__windows": 8,
    "log__sample_tokens": 0,
    "run__num_steps": 1,
    "mesh__data": 1,
    "optim__name": "adamw",
    "balance__lr": 1e-3,  # as below: one program for both
}
TUNED = {
    "data__global_batch": 8,
    "run__num_steps": 16,
    "eval__every": 16,
    "eval__windows": 8,
    "log__sample_tokens": 0,
    "optim__lr": 0.02,
    "mesh__data": 1,
    "checkpoint__every_steps": 8,
    "balance__lr": 1e-3,
}


def ask(i, wording="Is {} even?"):
    return [
        {"role": "user", "content": wording.format(i)},
        {"role": "assistant", "content": "no" if i % 2 else "yes"},
    ]


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations))
    return str(path)


def settings(weights, path, **keys):
    keys = TUNED | {"data__path": path} | keys
    return tiny_runs.changed(finetune.get_config(str(weights)), **keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base that has taken one step, 80 chats, and what fine-tuning made of both."""
    root = tmp_path_factory.mktemp("finetune")
    base = tiny_runs.changed(tiny.get_config(), **SMALL, data__path=tiny_runs.CORPUS)
    assert train(base, root / "base") == cli.DONE
    write(root / "chats.jsonl", [ask(i) for i in range(80)])
    assert train(settings(root / "base", str(root / "chats.jsonl")), root / "tuned") == cli.DONE
    return root


def test_the_config_is_the_weights_own(folder):
    base, c = read_config(folder / "base"), settings(folder / "base", "x")
    assert (c.precision, c.data.seq_len) == (base.precision, 64)
    assert c.optim.weight_decay == base.optim.weight_decay
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}  # the tokenizer's
    assert dataclasses.replace(c.model, **ids) == base.model


def test_held_out_answers_are_learnt(folder):
    log = (folder / "tuned" / "logs" / "process-00000.log").read_text()
    assert re.search("72 chats to learn and 8 held out, .* tokens .*, 80 kept, ", log)
    found = re.search(r"step 0 \| held-out ([0-9.]+), before training", log)
    before, lines = float(found[1]), tiny_runs.lines(folder / "tuned")
    # Bytes at the start: ln 264 = 5.6 nats. It cannot fall to half of that unless it learns what
    # answers share.
    assert before > 4 and lines[-1]["eval/loss"] < before / 2
    assert lines[0] == {"step": 0, "eval/loss": pytest.approx(before, abs=1e-4)}
    assert lines[1]["step"] == 1
    assert "held-out at step 0: " in (folder / "tuned" / "report.html").read_text()


@pytest.mark.parametrize("form", ["prepared", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_one_that_lost_its_last_steps_ends_in_the_same_bits(folder, tmp_path, form):
    """As after a kill between two saves, of chats read directly and of a prepared directory, a
    whole run of it."""
    path, whole = str(folder / "chats.jsonl"), folder / "tuned"
    if form == "prepared":
        options = Options([path], context=64, held_out=0.2)
        prepare.prepare(options, str(tmp_path / "chats"), 1, lambda *_: None)
        path, whole = str(tmp_path / "chats"), tmp_path / "whole"
        assert train(settings(folder / "base", path), whole) == cli.DONE
    cut = tiny_runs.without_last(whole, tmp_path / "cut")
    assert train(settings(folder / "base", path), cut) == cli.DONE
    tiny_runs.same_run(whole, cut, "eval/loss")
    found = tiny_runs.lines(cut)
    assert [line["step"] for line in found] == [*range(17)] and found[-1]["eval/loss"] < 4


def test_copies_in_two_sources_are_on_one_side(folder, tmp_path):
    paths = [
        write(tmp_path / "a.jsonl", [ask(i) for i in range(300)]),
        write(tmp_path / "b.jsonl", [ask(i) for i in range(200, 260)]),
        write(tmp_path / "c.jsonl", [ask(i) for i in range(0, 300, 7)]),
    ]
    c = settings(folder / "base", paths[0], data__mixture=tuple(f"{path}=1" for path in paths))
    learnt, held_out = set(), set()
    for path in paths:
        for into, split in zip((learnt, held_out), SPLITS, strict=True):
            side = stores.open_store(c, path, tokenizers.Bytes(), split)
            starts = np.flatnonzero(side.block.starts).tolist()
            into |= {
                side.block.tokens[a:b].tobytes()
                for a, b in zip(starts, [*starts[1:], None], strict=True)
            }
    assert len(held_out) == 30 and len(learnt) == 270 and not learnt & held_out


def test_evaluation_keeps_chats_whole(folder):
    c, tok = settings(folder / "base", str(folder / "chats.jsonl")), tokenizers.Bytes()
    batches = windows.eval_batches(c, tok, damaged=set())
    assert batches
    for batch in batches:
        begins = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
        assert begins.any() and (batch["tokens"][begins] == tok.bos_id).all()


def test_named_chats_are_judged_by_their_answers_and_named_text_by_all_of_it(folder, tmp_path):
    """As JSON, all of it was predicted: 3.29 nats where the answers alone have 3.58."""
    asked = [ask(i) for i in range(100, 120)]
    own, other = str(folder / "chats.jsonl"), write(tmp_path / "other.jsonl", asked)
    long = write(tmp_path / "long.jsonl", [ask(1, "x" * 90), ask(2)])
    places = (f"other={other}", f"own={own}", f"text={tiny_runs.CORPUS}", f"long={long}")
    c = settings(folder / "base", own, eval__named=places, eval__windows=9)
    tok = tokenizers.Bytes()
    named = windows.named_stores(c, tok)
    found = {name: store.block for name, store in named.items()}
    template = chat_template.Template(tok)
    documents = [template.encode_within(chat.parse_chat(talk), None)[0].tokens for talk in asked]
    np.testing.assert_array_equal(found["other"].tokens, np.concatenate(documents))
    assert found["other"].learn.sum() == sum(len(answer["content"]) + 2 for _, answer in asked)
    held_out = stores.open_store(c, own, tok, "held_out").block
    assert found["own"].tokens.tolist() == held_out.tokens.tolist()
    assert found["text"].learn.mean() > 0.9
    notes = [store.note for store in named.values()]
    assert re.search(f"{other}: 20 chats to evaluate on .*, 20 kept, ", "\n".join(notes))
    assert re.search(f"{long}: 1 chats to evaluate on .*, 1 dropped, 1 kept, ", "\n".join(notes))


BAD = {
    "text": ('{"text": "a"}\n', "line 1: a text and no chat, but config.data.chats is set"),
    "no answer": (
        '{"messages": [{"role": "user", "content": "a"}]}\n',
        "line 1: a conversation without an answer",
    ),
    "other fields": (
        '{"prompt": "a"}\n',
        "or instruction with output; fix it, or use prepare_data",
    ),
    "too long": (
        json.dumps({"messages": [ask(1)[1] | {"content": "x" * 200}]}) + "\n",
        "its chats are all longer",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_chats_are_one_line(folder, tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    given = settings(folder / "base", str(tmp_path / "a.jsonl"))
    assert message in refusal(train, given, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_other_bad_input_is_one_line(folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_text(re.sub(r"turn\|>", "x|>", tokenizers.Bytes().json()))
    prepared = tmp_path / "prepared"
    prepare.prepare(Options([tiny_runs.CORPUS]), str(prepared), 1, lambda *_: None)

    def start(**keys):
        train(settings(folder / "base", str(folder / "chats.jsonl"), **keys), tmp_path / "new")

    for keys, message in (
        (
            {"data__tokenizer": str(bare)},
            "has no tokens of chats: it needs one of <|turn|>, <start_of_turn>",
        ),
        ({"data__path": tiny_runs.CORPUS}, "0.txt: a text and no chat, but config.data.chats"),
        ({"data__path": str(prepared)}, "prepared holds 0 chats and "),
        ({"data__packing": "concat"}, "would part answers from their questions"),
        (
            {"schedule__phases": (config.Phase(tokens=4096, seq_len=32),)},
            "fits chats to one context",
        ),
    ):
        assert message in refusal(start, **keys)
    run = str(folder / "base")
    for weights, message in (
        ("", "needs the weights"),
        (f"{run}@7", f"finetune.py:{run}@7: {run} has no checkpoint of step 7; it has 1"),
    ):
        assert message in refusal(finetune.get_config, weights)


def test_a_second_set_of_chats_is_learnt_at_the_rate_of_the_first(folder):
    first, second = (finetune.get_config(str(folder / name)) for name in ("base", "tuned"))
    assert first.optim.lr == pytest.approx(0.1 * read_config(folder / "base").optim.lr)
    assert (second.optim.lr, second.balance.lr) == (TUNED["optim__lr"], TUNED["balance__lr"])


@pytest.mark.slow
def test_a_fork_is_fine_tuned_at_the_rate_that_its_parent_gives(folder, tmp_path):
    """A fork of a run that was fine-tuned has no run.init_from."""
    more = {"run__fork": str(folder / "tuned"), "run__init_from": "", "run__num_steps": 17}
    c = settings(folder / "base", str(folder / "chats.jsonl"), **more)
    assert train(c, tmp_path / "fork") == cli.DONE
    again = finetune.get_config(str(tmp_path / "fork"))
    rates = (TUNED["optim__lr"], TUNED["balance__lr"])
    assert (again.optim.lr, again.balance.lr) == pytest.approx(rates)


def test_export_has_the_template_of_what_was_learnt(folder, tmp_path):
    made = exchange.to_hf(folder / "tuned", tmp_path / "hf")
    template = chat_template.make_template(tokenizers.Bytes())
    assert (made / "chat_template.jinja").read_text() == template
    assert (made / "tokenizer.json").read_text() == tokenizers.Bytes().json()
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    settings = json.loads((made / "tokenizer_config.json").read_text())
    assert special.items() <= settings.items()
    for name in ("config.json", "generation_config.json"):  # an answer ends at the end of its turn
        assert json.loads((made / name).read_text())["eos_token_id"] == [257, 260]
    back = exchange.from_hf(made, tmp_path / "imported")
    c = config.check(finetune.get_config(str(back)))
    assert (c.optim.lr, c.data.seq_len, c.model.vocab_size) == (finetune.IMPORTED_LR, 128, 264)
    again = exchange.to_hf(back, tmp_path / "again")  # untrained weights go out as they came in
    for name in (
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (again / name).read_bytes() == (made / name).read_bytes()


@pytest.mark.parametrize("trained", ["not", "on chats"])
def test_a_template_that_came_is_learnt_and_stays(folder, tmp_path, trained):
    source, target = tmp_path / "tokenizer", tmp_path / "out"
    target.mkdir()
    source.mkdir()
    (source / "tokenizer.json").write_text(tokenizers.Bytes().json())
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "theirs"}))
    run = tmp_path / "run"
    tokenizers.load(source).save(run)  # as a run that begins with it does
    c = settings(folder / "base", "x", data__chats=trained == "on chats")
    kept, config = tokenizer_files.read_files(run), None if trained == "not" else c
    tokenizer_files.write(target, kept, tokenizers.load(run), config)
    assert tokenizer_files.came_with_template(target)
