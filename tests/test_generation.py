"""Texts as they come: parts of characters, stop strings wherever tokens cut them, and
conversations."""

import itertools

import jax
import numpy as np
import pytest

from zaya_jax import generation
from zaya_jax.config import Model, Precision
from zaya_jax.model import decode, zaya
from zaya_jax.model.sampling import Sampling
from zaya_jax.text import tokenizers

EXACT = Precision(compute="float32", router="float32", matmul="highest")
MODEL = Model(
    vocab_size=264,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    moe_intermediate_size=4,
    num_experts=2,
    router_hidden_size=4,
    max_position_embeddings=64,
    lm_head_bias=True,
)
BYTES = tokenizers.load("bytes")


def test_a_character_waits_until_it_is_whole():
    text = generation.Text(BYTES)
    raw = "a\u20acb".encode()
    assert [text.add([byte]) for byte in raw] == ["a", "", "", "\u20ac", "b"]
    assert text.add([0xE2]) == "" and text.rest() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("written", "stop", "left"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("aab aaab", ["aaab"], "aab "),
        ("\u20ac\u20ac\u20acx", ["\u20acx", "never"], "\u20ac\u20ac"),
        ("xabab", ["aba", "bab"], "x"),
        ("abaa", ["b", "abaa"], "a"),  # the first one that is whole
        ("abb\u20aca", ["abb\u20ac", "bb"], "a"),
    ],
)
def test_a_text_ends_before_its_stop_string(written, stop, left, size):
    """However tokens cut it: within the stop string, and within its characters."""
    text, ids = generation.Text(BYTES, stop), BYTES.encode(written)
    parts = [text.add(ids[i : i + size]) for i in range(0, len(ids), size)]
    for so_far in itertools.accumulate(parts):
        assert left.startswith(so_far)  # nothing is shown that is taken back
    assert "".join(parts) + text.rest() == left
    assert text.stopped == (left != written)
    assert text.add(BYTES.encode("more")) == "" or not text.stopped


WORDS = "hello world this is a line of many words ; it's line twenty"


def spelt_as_llama():
    """A tokenizer.json of its kind: a word has its space before it, and a text's first word loses
    it again."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    words += [f"\u2581{word}" for word in dict.fromkeys(WORDS.split())]
    made = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [], byte_fallback=True, ignore_merges=True
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["<s>", "</s>"])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizers.Tokenizer(made.to_str().encode(), {}, "made here")


def test_a_text_goes_on_from_its_prompt_with_its_space():
    tokenizer = spelt_as_llama()
    written = "hello world \u20ac of many \U0001f600 words \U0001f600 \U0001f600"
    ids = tokenizer.encode(written)
    first = len(tokenizer.encode("hello"))
    # no space
    assert tokenizer.decode(ids) == written and tokenizer.decode(ids[first:]) == written[6:]
    for cut in range(len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        if "\N{REPLACEMENT CHARACTER}" in prompt:
            continue
        text = generation.Text(tokenizer, before=[tokenizer.bos_id, *ids[:cut]])
        parts = [text.add([token]) for token in ids[cut:]]
        assert prompt + "".join(parts) + text.rest() == written, cut
    spaces = generation.Text(tokenizer, before=[tokenizer.bos_id, *tokenizer.encode(" ")])
    assert spaces.add(tokenizer.encode("words")) == " words"
    # A separate text, like an answer, has no such space, and bytes of an incomplete character are
    # not text yet.
    assert generation.Text(tokenizer).add(tokenizer.encode("words")) == "words"
    euro = tokenizer.encode("\u20ac")
    assert generation.Text(tokenizer, before=euro[-2:]).add(tokenizer.encode("words")) == "words"


@pytest.mark.parametrize("make", [spelt_as_llama, lambda: BYTES])
def test_ids_that_the_tokenizer_has_not_give_nothing(make):
    """A model's vocabulary is often rounded up, and its last rows have no meaning."""
    tokenizer = make()
    ids = tokenizer.encode("world hello")
    text = generation.Text(tokenizer)
    parts = [
        text.add([token])
        for i in ids
        for token in (tokenizer.vocab_size, i, tokenizer.vocab_size + 63)
    ]
    assert "".join(parts) + text.rest() == "world hello"


@pytest.mark.parametrize("make", [spelt_as_llama, lambda: BYTES])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_long_text_is_decoded_in_a_time_that_grows_with_its_length(make, size, monkeypatch):
    """Also where ids have no text, bytes make no character, and a stop string begins all the time."""
    tokenizer, decoded = make(), []
    written = "hello world \u20ac of many \U0001f600 words " * 60
    odd = [tokenizer.vocab_size] * 90 + tokenizer.encode("\u20ac")[1:2] * 90
    ids = [*tokenizer.encode(written), *odd, *tokenizer.encode("hello" * 20)]
    whole, decode = tokenizer.decode(ids), tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    text = generation.Text(tokenizer, ["hellq", "lohellohellq", "\N{REPLACEMENT CHARACTER}x"])
    parts = [text.add(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(parts) + text.rest() == whole
    assert sum(decoded) < 12 * len(ids) + 120 * generation.LONGEST


@pytest.fixture(scope="module")
def weights():
    """A model that writes letters alone, each by the one before."""
    params = zaya.abstract(MODEL)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), params)
    params["head"]["bias"] = np.where(
        (np.arange(264) >= 97) & (np.arange(264) < 123), 100.0, 0
    ).astype(np.float32)
    return MODEL, params, zaya.init_balance(MODEL)


def test_rows_stop_each_by_itself(weights):
    prompts = [[256, *BYTES.encode(text)] for text in ("abc", "x", "hello")]

    def generate(stop=(), ends=()):
        decoder, ends = decode.Decoder(*weights, EXACT), [BYTES.eos_id, *ends]
        rows = decode.Continuation(
            decoder, prompts, 20, seeds=[1, 2, 3], sampling=Sampling(5.0), ends=ends
        )
        return generation.generate(rows, BYTES, prompts, stop), rows.ids

    free, free_ids = generate()
    assert [len(text) for text in free] == [20] * 3 and len(set(free)) == 3
    stop = free[1][9:12]
    stopped, ids = generate([stop])
    assert stopped == [text.split(stop)[0] for text in free]
    assert len(stopped[1]) <= 9
    # One character of these texts is one id: a stopped row has no ids beyond its text.
    assert ids == [row[: len(text)] for row, text in zip(free_ids, stopped, strict=True)]
    assert generate(ends=BYTES.encode(free[0][0]))[0][0] == ""
