"""Answer-preserving trimming: each of the four outcomes, and what must never be touched."""

import pytest

from zaya_jax.data import trim
from zaya_jax.data.trim import Turn


def user(size):
    return Turn(head=range(size))


def answer(reasoning, size=4):
    return Turn(
        head=[1], opening=[2], reasoning=list(range(reasoning)), closing=[3], tail=[9] * size, answer=True
    )


def length(turns):
    return sum(map(len, turns))


def test_what_fits_is_kept():
    turns = [user(5), answer(10)]
    assert trim.trim(turns, length(turns)) == (turns, trim.KEPT)


def test_the_end_of_the_last_reasoning_is_cut():
    turns = [user(5), answer(10)]
    out, outcome = trim.trim(turns, length(turns) - 3)
    assert outcome == trim.TRIMMED
    assert list(out[1].reasoning) == list(range(7))
    assert length(out) == length(turns) - 3
    assert (out[0], out[1].tail, out[1].closing) == (turns[0], turns[1].tail, turns[1].closing)


def test_marks_go_with_the_last_of_the_reasoning():
    turns = [user(5), answer(2)]
    out, outcome = trim.trim(turns, length(turns) - 4)
    assert outcome == trim.TRIMMED
    assert not len(out[1].reasoning) and length(out) == length(turns) - 4
    out, _ = trim.trim(turns, length(turns) - 2)  # no room for a token of reasoning between its marks
    assert not len(out[1].reasoning)


def test_earlier_reasoning_goes_before_the_last_is_cut():
    turns = [user(5), answer(10), user(3), answer(8)]
    out, outcome = trim.trim(turns, length(turns) - 12)
    assert outcome == trim.REDUCED
    assert not len(out[1].reasoning) and len(out[3].reasoning) == 8
    out, outcome = trim.trim(turns, length(turns) - 15)
    assert outcome == trim.REDUCED
    assert not len(out[1].reasoning) and len(out[3].reasoning) == 5
    assert [t.tail for t in out] == [t.tail for t in turns]
    assert length(out) == length(turns) - 15


def test_a_sample_of_too_long_answers_is_dropped():
    turns = [user(5), answer(10, size=20), user(3), answer(8, size=20)]
    bare = length(turns) - 12 - 10
    assert trim.trim(turns, bare)[1] == trim.REDUCED
    assert trim.trim(turns, bare - 1) == ([], trim.DROPPED)
    assert trim.trim([user(5), answer(0, size=20)], 25) == ([], trim.DROPPED)


@pytest.mark.parametrize("context", range(1, 60))
def test_no_context_is_exceeded_and_no_answer_lost(context):
    turns = [user(4), answer(9), user(2), answer(0), user(1), answer(7)]
    out, outcome = trim.trim(turns, context)
    assert length(out) <= context
    if outcome != trim.DROPPED:
        assert [(t.head, t.tail) for t in out] == [(t.head, t.tail) for t in turns]
    else:
        assert sum(len(t.head) + len(t.tail) for t in turns) > context
