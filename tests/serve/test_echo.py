"""Prompts told back, with the log-probabilities of their tokens."""

import json

import pytest

from colossax.scheduling import Emitted
from colossax.serve import ServeOptions
from colossax.serve.engine.wire import emitted_from_json, emitted_to_json
from colossax.serve.options import Limits
from tests.serve.fake import TOKENIZER
from tests.serve.site import error_of, events, site
from tests.serve.test_answers import COMPLETION, joined, script


@pytest.mark.catches("offsets-without-the-prompt")
@pytest.mark.parametrize("as_ids", [False, True])
def test_log_probabilities_of_a_prompt(as_ids):
    """Of its first token none; offsets count on behind it, whole and in pieces."""
    prompt = "a\N{GRINNING FACE}b"
    tokens = TOKENIZER.encode(prompt)
    body = COMPLETION | {"prompt": tokens if as_ids else prompt, "echo": True, "logprobs": 2}
    with site(script("cd")) as here:
        for stream in (False, True):
            answer = here.ask("/v1/completions", body | {"stream": stream})
            if stream:
                chunks = events(answer.text)
                assert joined(chunks, 0) == (prompt + "cd", "stop")
                parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
                found = {key: sum((part[key] for part in parts), []) for key in parts[0]}
            else:
                (choice,) = answer.json()["choices"]
                assert (choice["text"], choice["finish_reason"]) == (prompt + "cd", "stop")
                found = choice["logprobs"]
            assert here.engine.asked[-1].score_from == 1
            both = [*tokens, *TOKENIZER.encode("cd")]
            assert found["tokens"] == [TOKENIZER.decode([token]) for token in both]
            expected = [None, *(-i / 8 for i in range(1, 6)), -0.5, -0.5]
            assert found["token_logprobs"] == expected
            assert found["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 4]
            assert found["top_logprobs"][0] is None
            assert found["top_logprobs"][5] == {"b": -5 / 8, "c": -9.0}
            assert found["top_logprobs"][6] == {"c": -0.5, "d": -1.5}
        here.ask("/v1/completions", body | {"echo": False})
        assert here.engine.asked[-1].score_from is None


@pytest.mark.catches("a-prompt-alone-says-more")
@pytest.mark.parametrize("told", [None, 0, 1])
def test_a_prompt_alone(told):
    """What scores texts: nothing is told behind the prompt, though the engine says a token."""
    given = {} if told is None else {"logprobs": told}
    body = COMPLETION | {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0} | given
    with site(script("xy")) as here:
        whole = here.ask("/v1/completions", body).json()
        assert whole["usage"]["completion_tokens"] == 0
        for choice, text in zip(whole["choices"], ("ab", "c"), strict=True):
            assert (choice["text"], choice["finish_reason"]) == (text, "length")
            if told is None:
                assert choice["logprobs"] is None
            else:
                assert choice["logprobs"]["tokens"] == list(text)
                assert choice["logprobs"]["token_logprobs"] == [None, -1 / 8][: len(text)]
                tops = [None, {"b": -1 / 8}][: len(text)] if told else None
                assert choice["logprobs"]["top_logprobs"] == tops
        chunks = events(here.ask("/v1/completions", body | {"stream": True}).text)
        assert joined(chunks, 0) == ("ab", "length") and joined(chunks, 1) == ("c", "length")
        assert {one.max_tokens for one in here.engine.asked} == {1}
        assert here.engine.running == 0 and not here.engine.cancelled


@pytest.mark.catches("a-long-prompt-is-slow")
def test_a_prompt_that_is_told_back_counts_for_no_slow_client():
    limits = Limits(buffer_bytes=4096)
    body = COMPLETION | {"prompt": "ab" * 200, "echo": True, "logprobs": 2, "stream": True}
    with site(script("xy"), ServeOptions(limits=limits)) as here:
        assert joined(events(here.ask("/v1/completions", body).text), 0)[0] == "ab" * 200 + "xy"


@pytest.mark.catches("any-number-of-scores")
def test_more_scores_than_are_told_at_once():
    body = COMPLETION | {
        "prompt": ["ab", "c"],
        "echo": True,
        "max_tokens": 0,
        "logprobs": 3,
        "n": 2,
    }
    with site(script("x"), ServeOptions(limits=Limits(scores=24))) as here:
        assert here.ask("/v1/completions", body).status_code == 200
        error = error_of(here.ask("/v1/completions", body | {"prompt": ["ab", "cd"]}), 400)
        assert error["param"] == "logprobs"
        assert "asks for 32 log-probabilities of prompts; ask for at most 24" in error["message"]


def test_scores_between_processes():
    top = ((5, -0.25), (7, -1.5))
    one = Emitted(1, token=5, logprob=-0.5, top=top, scores=((-0.125, top), (-2.0, ())))
    assert emitted_from_json(json.loads(json.dumps(emitted_to_json(one)))) == one
    bare = Emitted(2, ended="cancelled")
    assert emitted_from_json(json.loads(json.dumps(emitted_to_json(bare)))) == bare
