"""What a run may be examined by."""

import dataclasses

import pytest

from colossax.config import Plan
from colossax.errors import InputError
from colossax.evaluation import EvaluationConfig, Examiner
from colossax.recipes import recipe
from tests.serve.fake import TOKENIZER

ASKED = EvaluationConfig(tasks="docstrings", limit=3)


def test_what_it_is_examined_by_is_told():
    assert Examiner(ASKED, TOKENIZER, 512).description == "examined by docstrings (3)"
    assert recipe("llama_tiny").replace(evaluation=ASKED).evaluation.limit == 3


@pytest.mark.catches("examined-with-stages")
def test_stages_are_refused():
    plan = Plan(mesh={"stage": 2})
    with pytest.raises(
        InputError, match="^evaluation.tasks: with stages no prompt is scored; leave"
    ):
        recipe("llama_tiny").replace(evaluation=ASKED, plan=plan)
    assert recipe("llama_tiny").replace(plan=plan).plan == plan


@pytest.mark.parametrize("name", ["bert_stdlib", "vit_digits"])
def test_what_continues_no_text_is_refused(name):
    with pytest.raises(
        InputError, match="^evaluation.tasks: the model that the run trains continues"
    ):
        recipe(name).replace(evaluation=ASKED)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("docstrings, docstrings", "^evaluation.tasks: docstrings_accuracy comes twice; give it"),
        ("docstrings,", "^evaluation.tasks: there is no ''; give one of docstrings"),
        ("mmlu", "^evaluation.tasks: mmlu needs a path"),
    ],
)
def test_words_that_are_refused(tasks, message):
    with pytest.raises(InputError, match=message):
        Examiner(dataclasses.replace(ASKED, tasks=tasks), TOKENIZER, 512)


def test_a_drafter_is_not_examined():
    with pytest.raises(
        InputError, match="^evaluation.tasks: a drafter learns beside a model that s"
    ):
        recipe("glide_tiny").replace(evaluation=ASKED)
