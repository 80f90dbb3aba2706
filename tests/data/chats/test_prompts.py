"""Prompts of files: their forms, their tokens, who is held out, and in which order they come."""

import collections
import json

import numpy as np
import pytest

from colossax.data import Mixture
from colossax.data.chats.forms import Wanted, example_of
from colossax.data.chats.prompts import PromptOrder, read_prompts
from colossax.data.chats.template import PLAIN, ChatTemplate
from colossax.data.sources import path_documents
from colossax.errors import DataError
from tests.serve.fake import TOKENIZER

ASKED = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
FORMS = {
    "prompt": ({"prompt": "2 + 2?", "answer": 4}, (ASKED,)),
    "question": ({"question": "2 + 2?"}, (ASKED,)),
    "instruction": ({"instruction": "2 +", "input": "2?"}, ({**ASKED, "content": "2 +\n\n2?"},)),
    "with a system": ({"system": "Be brief.", "prompt": "2 + 2?"}, (SYSTEM, ASKED)),
    "messages": ({"messages": [SYSTEM, ASKED]}, (SYSTEM, ASKED)),
    "an answer at the end": ({"messages": [ASKED, SAID, ASKED, SAID]}, (ASKED, SAID, ASKED)),
    "prompt of messages": ({"prompt": [SYSTEM, ASKED]}, (SYSTEM, ASKED)),
}


@pytest.mark.catches("last-answer-is-asked")
@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    record, messages = FORMS[form]
    found = example_of(record, Wanted.PROMPT, "here")
    assert (found.prompt, found.answers) == (messages, ())


@pytest.mark.parametrize("record", [{"text": "a"}, {"messages": [SAID]}, {"messages": [SYSTEM]}])
def test_what_asks_nothing_is_refused(record):
    with pytest.raises(DataError, match="here: asks nothing, its fields are"):
        example_of(record, Wanted.PROMPT, "here")


def written(folder, records):
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    documents = path_documents(str(folder / "prompts.jsonl"))
    how = {"bos": "", "eos": TOKENIZER.end, "most_chars": 10_000}
    return read_prompts(documents, ChatTemplate(PLAIN, TOKENIZER, **how))


def test_prompts_are_what_a_server_makes_of_the_messages(tmp_path):
    found = written(tmp_path, [{"prompt": "2 + 2?", "right": 4}, {"prompt": "3 + 3?", "right": 6}])
    text = TOKENIZER.decode(found.prompts[0].tokens)
    template = ChatTemplate(PLAIN, TOKENIZER, bos="", eos=TOKENIZER.end, most_chars=10_000)
    assert found.prompts[0].tokens == tuple(template.tokens([ASKED]))
    assert "2 + 2?" in text
    assert found.prompts[1].record["right"] == 6
    other = written(tmp_path, [{"prompt": "2 + 2?", "right": 5}, {"prompt": "3 + 3?", "right": 6}])
    assert other.fingerprint != found.fingerprint


@pytest.mark.catches("prompts-in-one-order")
@pytest.mark.catches("copies-of-prompts-apart")
def test_copies_stay_together_and_each_epoch_asks_all(tmp_path):
    found = written(tmp_path, [{"prompt": f"{n % 20}?"} for n in range(60)])
    training, held_out = found.split(0.25, longest=100)
    texts = [{found.prompts[n].tokens for n in side} for side in (training, held_out)]
    assert not texts[0] & texts[1]
    assert len(training) + len(held_out) == 60
    order = PromptOrder(training, seed=3, first=100)
    epochs = [
        [int(order[e * len(training) + at]["prompt"][0]) for at in range(len(training))]
        for e in range(2)
    ]
    for epoch in epochs:
        assert sorted(epoch) == sorted(100 + training)
    assert epochs[0] != epochs[1]


@pytest.mark.catches("prompts-of-the-first-source")
def test_a_mixture_asks_by_weights():
    numbers = np.arange(10)
    orders = [PromptOrder(numbers, seed=0, first=first) for first in (0, 100)]
    mixture = Mixture(orders, [3.0, 1.0], seed=0)
    asked = collections.Counter(int(mixture[at]["prompt"][0]) >= 100 for at in range(4096))
    assert asked[True] / 4096 == pytest.approx(0.25, abs=0.01)
