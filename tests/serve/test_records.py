"""What is kept of the last continuations: times and numbers, of at most so many."""

import asyncio

import httpx
import pytest

from colossax.scheduling import Emitted
from colossax.serve import Started
from colossax.serve.http.errors import Refusal
from colossax.serve.http.generating import Clock, parts
from colossax.serve.http.records import KEPT, Records
from tests.serve.fake import TOKENIZER, FakeEngine
from tests.serve.site import running, until


class Time:
    """A clock that is set."""

    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s


@pytest.mark.catches("second-seat-counts")
def test_times_are_of_the_first_seat_and_the_first_token():
    now = Time()
    records = Records(now)
    now.s = 102.0
    one = records.begin(101.0, 7)
    for step, event in enumerate((one.seated, one.token, one.token, one.seated, one.token)):
        now.s = 103.0 + step
        event()
    now.s = 110.0
    one.ended("stop")
    assert records.told() == {
        "up_s": 10.0,
        "requests": 1,
        "prompt_tokens": 7,
        "tokens": 3,
        "last": [
            {
                "number": 1,
                "prompt_tokens": 7,
                "tokens": 3,
                "asked_s": 1.0,
                "seated_s": 3.0,
                "first_s": 4.0,
                "ended_s": 10.0,
                "end": "stop",
            }
        ],
    }


@pytest.mark.catches("records-without-end")
def test_the_oldest_are_forgotten_and_counted():
    records = Records()
    for _ in range(KEPT + 5):
        records.begin(records.now(), 2)
    told = records.told()
    assert told["requests"] == KEPT + 5 and told["prompt_tokens"] == 2 * (KEPT + 5)
    assert [one["number"] for one in told["last"]] == list(range(6, KEPT + 6))


def followed(emitted, upto=None):
    """The record of a continuation that says this, and is given up after so many parts."""

    async def said():
        for one in emitted:
            yield one

    async def follow():
        records = Records()
        record = records.begin(records.now(), 1)
        clock = Clock(records.now(), record, lambda s: None, lambda s: None)
        started = Started(number=1, said=said())
        found = parts(FakeEngine(), started, TOKENIZER, (), clock=clock)
        count = 0
        try:
            async for _ in found:
                count += 1
                if count == upto:
                    break
        except Refusal:
            pass
        await found.aclose()
        return record

    return asyncio.run(follow())


A = TOKENIZER.encode("a")[0]


@pytest.mark.catches("whole-is-given-up")
@pytest.mark.parametrize(
    "last, upto, end",
    [
        (Emitted(1, token=A, ended="length"), None, "length"),
        (Emitted(1, token=TOKENIZER.eos, ended="stop"), None, "stop"),
        (Emitted(1, ended="error", message="no"), None, "error"),
        (Emitted(1, ended="deadline"), None, "error"),
        (Emitted(1, token=A), 1, "cancelled"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_how_a_continuation_ends(last, upto, end):
    seated = Emitted(1)
    record = followed([seated, Emitted(1, token=A), last], upto)
    assert (record.end, record.tokens) == (end, 2 if last.token is not None and not upto else 1)
    assert record.asked_s <= record.seated_s <= record.first_s <= record.ended_s


def test_one_whose_client_leaves_is_given_up():
    with running(FakeEngine(TOKENIZER.encode("on and on " * 50), step_s=0.01)) as server:
        body = {"model": "toy", "prompt": "a", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as told:
            pieces = told.iter_raw()
            next(pieces)
            (one,) = httpx.get(f"{server.url}/stats").json()["last"]
            assert one["end"] is None and one["ended_s"] is None and one["tokens"] > 0

        def last():
            (one,) = httpx.get(f"{server.url}/stats").json()["last"]
            return one

        until(lambda: last()["end"] == "cancelled")
        assert last()["tokens"] < 400
