"""Answers, whole and in pieces, in OpenAI's forms."""

import asyncio
import base64
import json
import struct

import numpy as np
import pytest

from colossax.errors import InputError
from colossax.scheduling import Keep
from colossax.serve import EngineDown, EngineFailed, EngineFull, ServeOptions
from colossax.serve.engine.wire import request_from_json, request_to_json
from colossax.serve.options import Limits
from tests.serve.fake import CHATML, TOKENIZER, FakeEngine, alone
from tests.serve.site import error_of, events, site

COMPLETION = {"model": "toy", "prompt": "hello", "seed": 3, "max_tokens": 40}
CHAT = {
    "model": "toy",
    "messages": [{"role": "user", "content": "hello"}],
    "seed": 3,
    "max_tokens": 40,
}


def script(text):
    """An engine that says a text, then the end."""
    return lambda **facts: FakeEngine(TOKENIZER.encode(text), **facts)


def truth(request, stops=()):
    """Text and end of a request, made at once of all of its tokens."""
    tokens, ended = alone(request)
    text = TOKENIZER.decode(tokens[:-1] if ended == "stop" else tokens)
    places = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(places)], "stop") if places else (text, ended)


def joined(chunks, index, of=lambda choice: choice["text"]):
    """Text and end of one choice of a stream."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(ends) == 1 and choices[-1]["finish_reason"]
    return "".join(map(of, choices)), ends[0]


def content(choice):
    return choice["delta"].get("content", "")


@pytest.mark.catches("end-in-the-text")
def test_a_completion_is_what_the_engine_says():
    with site(FakeEngine) as here:
        for seed in range(30):
            told = here.ask("/v1/completions", COMPLETION | {"seed": seed}).json()
            request = here.engine.asked[-1]
            (choice,) = told["choices"]
            assert (choice["text"], choice["finish_reason"]) == truth(request)
            said = len(alone(request)[0])
            assert told["usage"] == {
                "prompt_tokens": 5,
                "completion_tokens": said,
                "total_tokens": 5 + said,
            }
        assert {told["object"], told["model"]} == {"text_completion", "toy"}
        assert here.engine.running == 0 and not here.engine.cancelled
        assert here.api.doors.inside == 0


@pytest.mark.catches("keep-is-not-named")
def test_what_is_kept_is_named():
    """In the answer and in each piece of a stream, and the engine is asked for it."""
    keep = {"sinks": 4, "window": 32}
    with site(lambda: FakeEngine(keeps="first")) as here:
        told = here.ask("/v1/completions", COMPLETION | {"keep": {"window": 32}}).json()
        assert told["keep"] == keep and here.engine.asked[-1].keep == Keep(window=32)
        assert here.engine.asked[-1] == request_from_json(
            json.loads(json.dumps(request_to_json(here.engine.asked[-1])))
        )
        streamed = here.ask("/v1/chat/completions", CHAT | {"keep": keep, "stream": True})
        assert all(piece["keep"] == keep for piece in events(streamed.text))
        assert "keep" not in here.ask("/v1/completions", COMPLETION).json()
        other = here.ask("/v1/completions", COMPLETION | {"keep": {"heavy": 32, "window": 32}})
        assert other.json()["error"]["message"] == (
            "keep: this server keeps the first tokens and a window of each request; leave it out,"
            " or ask one that was started with --keeps heavy"
        )
    keep = {"heavy": 64, "window": 32}
    with site(lambda: FakeEngine(keeps="heavy")) as here:
        told = here.ask("/v1/completions", COMPLETION | {"keep": keep}).json()
        assert told["keep"] == keep and here.engine.asked[-1].keep == Keep(**keep)
        assert here.engine.asked[-1] == request_from_json(
            json.loads(json.dumps(request_to_json(here.engine.asked[-1])))
        )


@pytest.mark.catches("stream-is-another-text")
def test_pieces_of_a_stream_are_the_text():
    with site(FakeEngine) as here:
        for seed in range(30):
            body = {"seed": seed, "stream": True, "stop": ["e", "\n"]}
            whole = here.ask("/v1/completions", COMPLETION | body | {"stream": False}).json()
            expected = truth(here.engine.asked[-1], ["e", "\n"])
            choice = whole["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == expected
            answer = here.ask("/v1/completions", COMPLETION | body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            chunks = events(answer.text)
            assert joined(chunks, 0) == expected
            assert {chunk["object"] for chunk in chunks} == {"text_completion"}
            chunks = events(here.ask("/v1/chat/completions", CHAT | body).text)
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert joined(chunks, 0, content) == truth(here.engine.asked[-1], ["e", "\n"])
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    "text",
    ["\N{GRINNING FACE}\N{GRINNING FACE}", "e\N{COMBINING ACUTE ACCENT}x", "\u4f60\u597d"],
)
def test_a_piece_has_no_half_of_a_character(text):
    with site(script(text)) as here:
        chunks = events(here.ask("/v1/completions", COMPLETION | {"stream": True}).text)
        pieces = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(pieces) == text and all(piece in text for piece in pieces)


@pytest.mark.catches("stop-does-not-cancel")
def test_a_stop_text_across_tokens_cuts_and_cancels():
    with site(script("one STO two STOP three")) as here:
        for stream in (False, True):
            answer = here.ask("/v1/completions", COMPLETION | {"stop": "STOP", "stream": stream})
            if stream:
                assert joined(events(answer.text), 0) == ("one STO two ", "stop")
            else:
                assert answer.json()["choices"][0]["text"] == "one STO two "
        assert here.engine.cancelled == [1, 2] and here.engine.running == 0
        # One that begins and is not finished is text.
        answer = here.ask("/v1/completions", COMPLETION | {"stop": "three!"}).json()
        assert answer["choices"][0]["text"] == "one STO two STOP three"


def test_the_length_ends_before_a_held_character():
    with site(script("ab\N{GRINNING FACE}")) as here:
        told = here.ask("/v1/completions", COMPLETION | {"max_tokens": 4}).json()["choices"][0]
        assert (told["text"], told["finish_reason"]) == ("ab\N{REPLACEMENT CHARACTER}", "length")


@pytest.mark.catches("choices-mixed-up")
def test_choices_are_of_their_prompts():
    with site(FakeEngine) as here:
        body = COMPLETION | {"prompt": ["a", "bc"], "n": 2}
        told = here.ask("/v1/completions", body).json()
        asked = here.engine.asked[-4:]
        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
        found = [(choice["text"], choice["finish_reason"]) for choice in told["choices"]]
        assert found == [truth(request) for request in asked]
        assert told["usage"]["prompt_tokens"] == 3
        chunks = events(here.ask("/v1/completions", body | {"stream": True}).text)
        assert [joined(chunks, i) for i in range(4)] == found


@pytest.mark.catches("usage-in-every-stream")
def test_usage_of_a_stream_comes_last_and_when_asked_for():
    with site(FakeEngine) as here:
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            whole = here.ask(path, body).json()["usage"]
            asked = {"stream": True, "stream_options": {"include_usage": True}}
            *chunks, last = events(here.ask(path, body | asked).text)
            assert last["usage"] == whole and last["choices"] == []
            assert all(chunk["usage"] is None for chunk in chunks)
            chunks = events(here.ask(path, body | {"stream": True}).text)
            assert not any("usage" in chunk for chunk in chunks)


def test_echo_puts_the_prompt_before():
    with site(script("lo")) as here:
        for prompt in ("hel", TOKENIZER.encode("hel")):
            body = COMPLETION | {"prompt": prompt, "echo": True, "stop": "el"}
            assert here.ask("/v1/completions", body).json()["choices"][0]["text"] == "hello"
            chunks = events(here.ask("/v1/completions", body | {"stream": True}).text)
            assert joined(chunks, 0) == ("hello", "stop")


@pytest.mark.catches("logprob-below-all")
def test_log_probabilities_of_a_completion():
    with site(script("a\N{GRINNING FACE}b")) as here:
        told = here.ask("/v1/completions", COMPLETION | {"logprobs": 2}).json()
        found = told["choices"][0]["logprobs"]
        tokens = TOKENIZER.encode("a\N{GRINNING FACE}b")
        assert found["tokens"] == [TOKENIZER.decode([token]) for token in tokens]
        assert found["token_logprobs"] == [-0.5] * 6
        assert found["text_offset"] == [0, 1, 1, 1, 1, 2]
        assert found["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
        told = here.ask("/v1/completions", COMPLETION | {"logprobs": 3}).json()["choices"][0]
        assert told["logprobs"]["top_logprobs"][0] == {"a": -0.5, "b": -1.5, "c": -9999.0}
        none = here.ask("/v1/completions", COMPLETION).json()["choices"][0]
        assert none["logprobs"] is None
        none = here.ask("/v1/completions", COMPLETION | {"logprobs": 0}).json()["choices"][0]
        assert none["logprobs"]["top_logprobs"] is None
        chunks = events(
            here.ask("/v1/completions", COMPLETION | {"logprobs": 2, "stream": True}).text
        )
        told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [one for some in told for one in some[name]] == found[name]


def test_log_probabilities_of_a_chat():
    with site(script("\u00e9b")) as here:
        body = CHAT | {"logprobs": True, "top_logprobs": 1}
        found = here.ask("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
        assert [one["bytes"] for one in found] == [[0xC3], [0xA9], [0x62]]
        assert [one["logprob"] for one in found] == [-0.5] * 3
        assert found[2]["top_logprobs"] == [{"token": "b", "logprob": -0.5, "bytes": [0x62]}]
        chunks = events(here.ask("/v1/chat/completions", body | {"stream": True}).text)
        told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [one for some in told if some for one in some["content"]] == found


@pytest.mark.parametrize(
    ("ends_with", "status", "code"),
    [
        ("error", 500, "engine_error"),
        ("cancelled", 503, "cancelled"),
        ("deadline", 504, "deadline"),
    ],
)
def test_an_engine_that_fails_is_told_of(ends_with, status, code):
    with site(lambda: FakeEngine(ends_with=ends_with)) as here:
        error = error_of(here.ask("/v1/completions", COMPLETION), status)
        assert error["code"] == code and error["type"] == "server_error"
        answer = here.ask("/v1/completions", COMPLETION | {"stream": True})
        last = answer.text.split("\n\n")[-2]
        assert answer.status_code == 200 and f'"code":"{code}"' in last
        assert "[DONE]" not in answer.text
        assert here.api.doors.inside == 0


@pytest.mark.parametrize(
    ("problem", "status", "code"),
    [
        (InputError("prompt: 9 tokens never fit; give fewer"), 400, None),
        (EngineFull(), 429, "queue_full"),
        (EngineDown(), 503, "engine_down"),
    ],
)
def test_what_an_engine_refuses_is_refused(problem, status, code):
    with site(lambda: FakeEngine(embeds=True)) as here:
        here.engine.refuses = problem
        for stream in (False, True):
            answer = here.ask("/v1/completions", COMPLETION | {"stream": stream})
            assert error_of(answer, status)["code"] == code
            assert status == 400 or int(answer.headers["retry-after"]) >= 1
        error_of(here.ask("/v1/embeddings", {"model": "toy", "input": "a"}), status)
        assert here.api.doors.inside == 0


@pytest.mark.catches("failure-shows-its-trace")
def test_a_fault_of_ours_is_told_without_details(caplog):
    with site(FakeEngine) as here:
        here.engine.refuses = RuntimeError("secret")
        error = error_of(here.ask("/v1/completions", COMPLETION), 500)
        assert error["code"] == "internal_error" and "secret" not in error["message"]
        assert "secret" in caplog.text
        assert here.api.doors.inside == 0


def test_a_hundred_requests_at_a_time_are_answered_as_each_alone():
    """Some are given up; what the others get does not change, and nobody stays inside."""

    async def asked(here, i):
        body = COMPLETION | {"seed": i, "prompt": [i % 256 + 1], "stream": i % 3 == 0}
        answer = asyncio.create_task(here.asked("/v1/completions", body))
        if i % 10 == 7:
            await asyncio.sleep(0.001 * (i % 4))
            answer.cancel()
        return body, await asyncio.gather(answer, return_exceptions=True)

    async def all_of(here):
        return await asyncio.gather(*(asked(here, i) for i in range(100)))

    with site(lambda: FakeEngine(step_s=0.001)) as here:
        found = here.run(all_of(here))
        requests = {request.sampling.seed: request for request in here.engine.asked}
        for body, (answer,) in found:
            if isinstance(answer, asyncio.CancelledError):
                continue
            assert answer.status_code == 200
            if body["stream"]:
                told = joined(events(answer.text), 0)
            else:
                choice = answer.json()["choices"][0]
                told = choice["text"], choice["finish_reason"]
            assert told == truth(requests[body["seed"]])
        assert here.engine.running == 0 and here.api.doors.inside == 0
        assert here.engine.most_running > 50


def test_models_are_listed():
    with site(FakeEngine) as here:
        told = here.ask("/v1/models").json()
        assert [one["id"] for one in told["data"]] == ["toy", "tuned"]
        assert told["object"] == "list"
        assert here.ask("/v1/models/tuned").json() == told["data"][1]


def test_embeddings():
    with site(lambda: FakeEngine(embeds=True)) as here:
        body = {"model": "toy", "input": ["a", "bc"]}
        told = here.ask("/v1/embeddings", body).json()
        assert [one["index"] for one in told["data"]] == [0, 1]
        assert told["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        packed = here.ask("/v1/embeddings", body | {"encoding_format": "base64"}).json()
        for plain, one in zip(told["data"], packed["data"], strict=True):
            assert len(plain["embedding"]) == 4
            data = base64.b64decode(one["embedding"])
            assert list(struct.unpack("<4f", data)) == plain["embedding"]
        error = error_of(here.ask("/v1/embeddings", body | {"encoding_format": "x"}), 400)
        assert error["param"] == "encoding_format"
        first = here.ask("/v1/embeddings", body | {"dimensions": 2}).json()["data"][0]
        assert first["embedding"] == told["data"][0]["embedding"][:2]
        error = error_of(here.ask("/v1/embeddings", body | {"dimensions": 5}), 400)
        assert error["param"] == "dimensions" and "give at most 4" in error["message"]
        ids = here.ask(
            "/v1/embeddings", body | {"input": [TOKENIZER.encode("a"), TOKENIZER.encode("bc")]}
        ).json()
        assert ids["data"] == told["data"]
        error_of(here.ask("/v1/embeddings", body | {"model": "tuned"}), 400)


@pytest.mark.catches("shortened-not-normalised")
def test_shortened_vectors_are_of_length_one_again():
    with site(lambda: FakeEngine(embeds=True, unit=True)) as here:
        body = {"model": "toy", "input": "a", "dimensions": 3}
        whole = here.ask("/v1/embeddings", {"model": "toy", "input": "a"}).json()
        kept = np.asarray(whole["data"][0]["embedding"])[:3]
        found = here.ask("/v1/embeddings", body).json()["data"][0]["embedding"]
        np.testing.assert_allclose(found, kept / np.linalg.norm(kept), rtol=1e-12)


def test_a_model_that_tells_embeddings_alone_continues_nothing():
    with site(lambda: FakeEngine(embeds=True, speaks=False)) as here:
        for path, body in [
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ]:
            error = error_of(here.ask(f"/v1/{path}", {"model": "toy", **body}), 400)
            assert "tells embeddings and continues no text; ask /v1/embeddings" in error["message"]
        longest = {"model": "toy", "input": [[1] * 512]}
        assert here.ask("/v1/embeddings", longest).status_code == 200


def test_more_texts_than_may_be_inside():
    with site(lambda: FakeEngine(embeds=True)) as here:
        error = error_of(here.ask("/v1/embeddings", {"model": "toy", "input": ["a"] * 261}), 400)
        assert error["param"] == "input" and "give at most 260" in error["message"]


def test_a_text_that_gives_no_numbers():
    with site(lambda: FakeEngine(embeds=True)) as here:
        here.engine.refuses = EngineFailed("the model gave numbers that are none")
        error = error_of(here.ask("/v1/embeddings", {"model": "toy", "input": "a"}), 500)
        assert error["code"] == "engine_error"


def test_a_model_without_embeddings_says_so():
    with site(FakeEngine) as here:
        error = error_of(here.ask("/v1/embeddings", {"model": "toy", "input": "a"}), 400)
        assert "tells no embeddings" in error["message"]


def test_tokens_of_a_text():
    with site(FakeEngine) as here:
        told = here.ask("/tokenize", {"prompt": "h\u00e9<|im_end|>"}).json()
        tokens = TOKENIZER.encode("h\u00e9<|im_end|>")
        assert told == {"tokens": tokens, "count": 13, "max_model_len": 512}
        assert here.ask("/tokenize", {"prompt": ""}).json()["tokens"] == []
        error_of(here.ask("/tokenize", {}), 400)
        error_of(here.ask("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}), 400)


@pytest.mark.catches("ready-before-it-is")
def test_ready_and_health():
    with site(FakeEngine, ServeOptions(health_s=5.0)) as here:
        assert here.ask("/ready").status_code == here.ask("/health").status_code == 200
        here.engine.is_ready = False
        for path, body in (("/ready", None), ("/v1/completions", COMPLETION)):
            assert error_of(here.ask(path, body), 503)["code"] == "not_ready"
        for idle, since_s, status in ((True, 99, 200), (False, 4, 200), (False, 6, 503)):
            here.engine.now = type(here.engine.now)(idle=idle, since_step_s=float(since_s))
            assert here.ask("/health").status_code == status
        assert error_of(here.ask("/health"), 503)["code"] == "unhealthy"
        here.engine.now = type(here.engine.now)(failed="the engine ended 5 times")
        assert error_of(here.ask("/health"), 503)["message"] == "the engine ended 5 times"


COUNTED = "seats_used waiting pages_free pages_used pages_cached prefix_hit_tokens preemptions"
COUNTED += " drafted accepted pages_host host_bytes pages_out pages_back"
REPLICA = dict.fromkeys(COUNTED.split(), 0)


@pytest.mark.catches("replicas-are-not-told")
@pytest.mark.catches("tokens-of-one-name")
def test_metrics_count():
    with site(lambda: FakeEngine(TOKENIZER.encode("abc"))) as here:
        here.ask("/v1/completions", COMPLETION)
        here.ask("/v1/completions", COMPLETION | {"model": "tuned"})
        here.ask("/v1/completions", COMPLETION | {"stream": True})
        here.ask("/v1/completions", COMPLETION | {"n": 0})
        here.ask("/where/ever")
        here.engine.now = type(here.engine.now)(
            seats_used=3,
            waiting=2,
            pages_free=5,
            pages_host=6,
            host_bytes=600,
            pages_out=8,
            pages_back=2,
            prefix_hit_tokens=32,
            preemptions=1,
            drafted=9,
            accepted=7,
            replicas=[REPLICA | {"pages_free": 4}, REPLICA | {"preemptions": 7, "drafted": 5}],
        )
        lines = here.ask("/metrics").text.splitlines()
        for line in (
            'colossax_requests_total{endpoint="/v1/completions",status="200"} 3.0',
            'colossax_requests_total{endpoint="/v1/completions",status="400"} 1.0',
            'colossax_requests_total{endpoint="other",status="404"} 1.0',
            "colossax_prompt_tokens_total 15.0",
            "colossax_tokens_total 12.0",
            'colossax_model_tokens_total{model="toy"} 8.0',
            'colossax_model_tokens_total{model="tuned"} 4.0',
            "colossax_first_token_seconds_count 3.0",
            "colossax_between_tokens_seconds_count 9.0",
            "colossax_seats_used 3.0",
            "colossax_seats 4.0",
            "colossax_waiting 2.0",
            "colossax_pages_free 5.0",
            "colossax_pages_host 6.0",
            "colossax_host_bytes 600.0",
            "colossax_pages_out_total 8.0",
            "colossax_pages_back_total 2.0",
            'colossax_replica_pages_host{replica="0"} 0.0',
            'colossax_replica_pages_free{replica="0"} 4.0',
            'colossax_replica_pages_free{replica="1"} 0.0',
            'colossax_replica_preemptions_total{replica="1"} 7.0',
            'colossax_replica_drafted_tokens_total{replica="1"} 5.0',
            "colossax_prefix_hit_tokens_total 32.0",
            "colossax_preemptions_total 1.0",
            "colossax_drafted_tokens_total 9.0",
            "colossax_accepted_tokens_total 7.0",
            "colossax_inside 0.0",
        ):
            assert line in lines, line


def test_longest_prompts_are_a_limit_of_the_server():
    options = ServeOptions(limits=Limits(prompt_tokens=3))
    with site(lambda: FakeEngine(chat_template=CHATML), options) as here:
        assert here.ask("/v1/completions", COMPLETION | {"prompt": "abc"}).status_code == 200
        error = error_of(here.ask("/v1/completions", COMPLETION | {"prompt": "abcd"}), 400)
        assert error["message"] == "prompt: has 4 tokens; at most 3 are read"
        assert error["code"] == "context_length_exceeded"
        error = error_of(here.ask("/v1/chat/completions", CHAT), 400)
        assert error["param"] == "messages"
