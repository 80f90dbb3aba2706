"""Questions are rated as whole passes over prompt and choice rate them."""

import math

import jax
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError
from colossax.evaluation import ChoiceItem, Prompt, Reader
from colossax.inference.engine.sizing import PAGE_TOKENS
from tests.evaluation.examined import READER, SLOTS, examined, scored
from tests.serve.fake import TOKENIZER

QUESTIONS = [
    ("The city is", [" Oslo", " Rome", " a long way off"], 1),
    ("", ["yes", "no"], 0),
    ("ends in a blank ", ["one", "two", "three", "four"], 3),
    ("1 + 1 =", [" 2", " 3"], 0),
    ("alike", [" same", " same", " else"], 2),
    ("the last", [" b", " ccc"], 1),
    ("of characters", [" äöü", " abcd"], 0),
]
MEASURES = {
    "accuracy": lambda own, _: math.fsum(own),
    "accuracy_norm": lambda own, text: math.fsum(own) / len(text.lstrip()),
    "accuracy_bytes": lambda own, text: math.fsum(own) / len(text.lstrip().encode()),
    "accuracy_tokens": lambda own, _: math.fsum(own) / len(own),
    "accuracy_first": lambda own, _: own[0],
}


def bound_of(mesh):
    return Plan(mesh=mesh).bind(jax.devices()[: math.prod(mesh.values())])


def items(rows=QUESTIONS, **prompt):
    return [
        ChoiceItem(
            prompt=Prompt(text=text, **prompt), choices=tuple(choices), answer=answer, where="here"
        )
        for text, choices, answer in rows
    ]


def by_hand(prompt, choice):
    """Log-probabilities of a choice's tokens."""
    whole = TOKENIZER.encode(prompt + choice)
    begin = len(TOKENIZER.encode(prompt.rstrip()))
    if not prompt:
        whole, begin = [TOKENIZER.eos, *whole], 1
    return scored(whole, begin)


@pytest.mark.catches("choices-by-their-length")
@pytest.mark.catches("another-choices-score")
@pytest.mark.catches("first-token-of-the-last")
def test_rating_is_that_of_whole_passes():
    result, _ = examined(items())
    rights = {name: [] for name in MEASURES}
    for record, (prompt, choices, answer) in zip(result.records, QUESTIONS, strict=True):
        own = [by_hand(prompt, choice) for choice in choices]
        np.testing.assert_allclose(record["logprobs"], [math.fsum(one) for one in own], atol=1e-3)
        assert record["tokens"] == [len(one) for one in own]
        for name, measure in MEASURES.items():
            values = [measure(one, text) for one, text in zip(own, choices, strict=True)]
            rights[name].append(float(np.argmax(values) == answer))
            assert record[name] == rights[name][-1], (name, prompt)
    assert len(set(map(tuple, rights.values()))) >= 4, "measures are told apart by the questions"
    for name, right in rights.items():
        assert result.scores[name].value == np.mean(right)
        expected = np.std(right, ddof=1) / math.sqrt(len(right))
        np.testing.assert_allclose(result.scores[name].stderr, expected)


LONG = [("w" * (3 * PAGE_TOKENS + 5), [" a", " bb", " ccc", " dddd"], 0)]


@pytest.mark.catches("choices-computed-anew")
@pytest.mark.catches("run-uncounted")
def test_what_is_before_choices_is_computed_once():
    """Whole pages of it; the rest of a page is computed with each choice, as its tokens are."""
    result, stats = examined(items(LONG))
    ((prompt, choices, _),) = LONG
    np.testing.assert_allclose(
        result.records[0]["logprobs"],
        [math.fsum(by_hand(prompt, one)) for one in choices],
        rtol=1e-4,
    )
    before = len(prompt) // PAGE_TOKENS * PAGE_TOKENS
    whole = sum(len(prompt) + len(choice) for choice in choices)
    assert stats.reused == 3 * before
    assert stats.planned == whole - 3 * before


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2, "fsdp": 2}, {"data": 2, "tensor": 2}, {"ring": 2}])
def test_any_mesh_says_what_one_device_says(mesh):
    rows = items([*QUESTIONS, *LONG])
    found, one = examined(rows, bound_of(mesh)), examined(rows)
    for a, b in zip(found[0].records, one[0].records, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.catches("neighbours-apart")
@pytest.mark.parametrize("data", [2, 4])
def test_engines_share_what_one_would(data):
    """Each gets whole questions where those are alike."""
    rows = items([(letter + LONG[0][0], *LONG[0][1:]) for letter in "abcd"])
    found, one = examined(rows, bound_of({"data": data})), examined(rows)
    assert found[1].reused == one[1].reused == 4 * 3 * 3 * PAGE_TOKENS
    assert found[1].planned == one[1].planned
    for a, b in zip(found[0].records, one[0].records, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], rtol=1e-5, atol=1e-4)


@pytest.mark.catches("shots-of-the-end")
def test_examples_are_left_out_from_the_last_where_there_is_no_room():
    shots = ("s" * 50 + "\n", "t" * 50 + "\n")
    (item,) = items([("asked", [" a", " bb"], 0)], head="head\n", shots=shots)
    asked = item.asked(READER)
    assert not asked.shortened
    assert TOKENIZER.decode(asked.requests[1].prompt) == f"head\n{shots[0]}{shots[1]}asked bb"
    asked = item.asked(Reader(tokenizer=TOKENIZER, slots=100))
    assert asked.shortened
    assert TOKENIZER.decode(asked.requests[0].prompt) == f"head\n{shots[0]}asked a"


@pytest.mark.catches("cut-into-the-choice")
def test_what_is_longer_all_the_same_loses_its_beginning():
    (item,) = items([("x" * 200 + "y" * 100, [" a", " bb"], 0)])
    asked = item.asked(READER)
    assert asked.shortened
    for request, choice in zip(asked.requests, item.choices, strict=True):
        assert len(request.prompt) == SLOTS - 1
        assert TOKENIZER.decode(request.prompt[request.score_from :]) == choice
        assert TOKENIZER.decode(request.prompt).endswith("y" * 100 + choice)
    with pytest.raises(InputError, match="^here: prompt and choice are 302 tokens, and the model "):
        items([("x" * 300, [" a", " b"], 0)], cut=None)[0].asked(READER)
    with pytest.raises(InputError, match="^here: prompt and choice are 201 tokens"):
        items([("x", ["y" * 200, "z"], 0)])[0].asked(READER)


def test_a_choice_without_a_token_is_refused():
    item = ChoiceItem(prompt=Prompt(text="a"), choices=("", "b"), answer=0, where="here")
    with pytest.raises(InputError, match="^here: the choice '' has no token of its own behind the"):
        item.asked(READER)
