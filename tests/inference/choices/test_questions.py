"""Questions are rated as whole passes over prompt and choice rate them."""

import json
import math

import numpy as np
import pytest

from colossax.errors import InputError
from colossax.inference import choice_requests, rated, read_questions, several
from colossax.models import LlamaConfig
from tests.inference.test_generator import GROUPED, build, forward, single
from tests.serve.fake import TOKENIZER, VOCAB

CONFIG = LlamaConfig(**{**GROUPED, "vocab": VOCAB})
QUESTIONS = [
    ("The city is", [" Oslo", " Rome", " a long way off"], 1),
    ("", ["yes", "no"], 0),
    ("ends in a blank ", ["one", "two", "three", "four"], 3),
    ("1 + 1 =", [" 2", " 3"], 0),
    ("alike", [" same", " same", " else"], 2),
    ("the last", [" b", " ccc"], 1),
]


def written(folder, rows=QUESTIONS):
    file = folder / "questions.jsonl"
    names = ("prompt", "choices", "answer")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    file.write_text("\n\n".join(lines) + "\n")
    return file


def by_hand(prompt, choice):
    """Log-probability of a choice's tokens, by a whole pass over prompt and choice."""
    whole = tuple(TOKENIZER.encode(prompt + choice))
    begin = len(TOKENIZER.encode(prompt.rstrip()))
    if not prompt:
        whole, begin = (TOKENIZER.eos, *whole), 1
    logits = forward(CONFIG)(whole).astype(np.float64)[begin - 1 : -1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return sum(row[token] for row, token in zip(logprobs, whole[begin:], strict=True))


@pytest.mark.catches("choices-by-their-length")
@pytest.mark.catches("another-choices-score")
def test_rating_is_that_of_whole_passes(tmp_path):
    questions = read_questions(written(tmp_path))
    assert [one.line for one in questions] == [1, 3, 5, 7, 9, 11]
    requests = choice_requests(questions, TOKENIZER, CONFIG.max_seq)
    found = several(*single_model(), requests=requests).run()
    sums = iter(math.fsum(p for p, _ in one.scores) for one in found)
    right, right_norm = [], []
    for prompt, choices, answer in QUESTIONS:
        own = [by_hand(prompt, choice) for choice in choices]
        np.testing.assert_allclose([next(sums) for _ in choices], own, atol=1e-3)
        right.append(int(np.argmax(own)) == answer)
        long = [len(choice.lstrip()) for choice in choices]
        right_norm.append(int(np.argmax(np.divide(own, long))) == answer)
    rating = rated(questions, found)
    assert rating.accuracy == np.mean(right) and rating.accuracy_norm == np.mean(right_norm)
    assert right != right_norm, "the two are told apart by no question here"
    np.testing.assert_allclose(rating.stderr, np.std(right, ddof=1) / math.sqrt(len(right)))


def single_model():
    spec, params = build(CONFIG, single())
    return spec, single(), params


GOOD = {"prompt": "a", "choices": ["b", "c"], "answer": 0}


@pytest.mark.catches("answers-that-are-none")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2: it is a list, not an object; give a JSON object a line$"),
        ("{", "line 2: it is no JSON"),
        (json.dumps({**GOOD, "more": 1}), "line 2: has the fields answer, choices, more, prompt;"),
        (json.dumps({**GOOD, "answer": "0"}), "line 2: answer is a text, not an integer; repair"),
        (json.dumps({**GOOD, "answer": 2}), "line 2: answer: found 2; give 0 to 1, the number of"),
        (json.dumps({**GOOD, "choices": ["b"]}), "line 2: choices: give two or more texts"),
        (json.dumps({**GOOD, "choices": ["b", " "]}), "line 2: choices: give two or more texts"),
    ],
)
def test_lines_that_are_refused(tmp_path, line, message):
    file = tmp_path / "x.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(InputError, match=message):
        read_questions(file)


def test_what_is_no_file_of_questions(tmp_path):
    with pytest.raises(InputError, match="cannot be read .*; give a JSONL file of questions$"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InputError, match="holds no questions; give one JSON object a line$"):
        read_questions(tmp_path / "empty")
    questions = read_questions(written(tmp_path, [("a" * 70, ["b", "c"], 0)]))
    with pytest.raises(InputError, match="line 1: prompt and choice are 71 tokens, and the model"):
        choice_requests(questions, TOKENIZER, 64)
