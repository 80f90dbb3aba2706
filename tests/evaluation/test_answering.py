"""Answers are what the model says greedily, up to a text that ends them."""

import numpy as np
import pytest

from colossax.errors import InputError
from colossax.evaluation import AnswerItem, Prompt, Reader
from tests.evaluation.examined import READER, SLOTS, examined, forward
from tests.serve.fake import TOKENIZER


def said(prompt, count):
    """Greedy tokens, by whole passes."""
    tokens = TOKENIZER.encode(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(forward()(tuple(tokens))[-1])))
    return tokens[len(TOKENIZER.encode(prompt)) :]


def item(prompt="who is it", ends=(), max_tokens=12, **options):
    return AnswerItem(
        prompt=Prompt(text=prompt, **options),
        answers=("nobody",),
        measure=lambda text, answers: {"long": len(text), "known": float(text in answers)},
        max_tokens=max_tokens,
        ends=ends,
        where="here",
    )


@pytest.mark.catches("answers-go-on")
@pytest.mark.catches("end-of-another")
@pytest.mark.catches("what-ends-an-answer-is-kept")
def test_an_answer_ends_before_the_first_text_that_ends_it():
    whole = TOKENIZER.decode(said("who is it", 40))
    ends = (whole[7:9], "never said")
    found, stats = examined([item(max_tokens=40), item(ends=ends, max_tokens=40)])
    cut = whole[: whole.index(ends[0])]
    assert [one["said"] for one in found.records] == [whole, cut]
    assert [one["long"] for one in found.records] == [len(whole), len(cut)]
    assert found.scores["long"].value == (len(whole) + len(cut)) / 2
    both = 2 * len(TOKENIZER.encode("who is it"))
    assert both + 39 < stats.planned < both + 39 + 20, "it is not said to its end"


def test_a_token_that_ends_is_no_part_of_an_answer():
    whole = said("who is it", 12)
    found, _ = examined([item()], eos=whole[5])
    assert found.records[0]["said"] == TOKENIZER.decode(whole[: whole.index(whole[5])])


def test_what_does_not_fit():
    asked = item("x" * 300, cut="middle").asked(READER)
    (request,) = asked.requests
    assert asked.shortened and len(request.prompt) == SLOTS - 12
    long = item("b" * 100 + "x" * 100 + "e" * 100, cut="middle").asked(READER).requests[0]
    half = (SLOTS - 12) // 2
    assert TOKENIZER.decode(long.prompt) == "b" * half + "e" * half
    shots = tuple(letter * 60 for letter in "st")
    asked = item(shots=shots, head="h").asked(READER)
    assert asked.shortened and TOKENIZER.decode(asked.requests[0].prompt) == f"h{shots[0]}who is it"
    with pytest.raises(
        InputError, match="^here: the prompt is 300 tokens, and the model reads 116 "
    ):
        item("x" * 300, cut=None).asked(READER)
    small = Reader(tokenizer=TOKENIZER, slots=12)
    with pytest.raises(
        InputError, match="^here: its answer may have 12 tokens, and the model's seq"
    ):
        item().asked(small)
