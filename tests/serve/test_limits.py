"""How much one request, one caller and all together may take; who may ask."""

import asyncio
import time

import pytest

from colossax.errors import InputError
from colossax.serve import Grammars, ServeOptions
from colossax.serve.http.errors import Refusal
from colossax.serve.http.keys import Keys
from colossax.serve.http.limits import Buckets
from colossax.serve.options import Limits
from tests.serve.fake import FakeEngine
from tests.serve.site import error_of, site

COMPLETION = {"model": "toy", "prompt": "hello", "seed": 3, "max_tokens": 5}
GUARDED = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", {"model": "toy", "messages": []}),
    ("/v1/embeddings", {"model": "toy", "input": "a"}),
    ("/tokenize", {"prompt": "a"}),
    ("/v1/models", None),
    ("/v1/models/toy", None),
]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nfirst-key\n  second-key  \nschl\u00fcssel\n", "utf-8")
    return ServeOptions(api_key_file=str(file))


@pytest.mark.catches("key-not-asked-for")
def test_without_a_key_nothing_is_told(keys):
    with site(FakeEngine, keys) as here:
        for path, body in GUARDED:
            for headers in (
                {},
                bearer("first-ke"),
                bearer("# ours"),
                {"Authorization": "first-key"},
            ):
                answer = here.ask(path, body, headers=headers)
                error = error_of(answer, 401)
                assert error["code"] == "invalid_api_key" and "first-key" not in answer.text
                assert answer.headers["www-authenticate"] == "Bearer"
        assert not here.engine.asked
        for path in ("/health", "/ready", "/metrics"):
            assert here.ask(path).status_code == 200


@pytest.mark.catches("only-the-first-key")
def test_each_key_of_the_file_is_accepted(keys):
    with site(FakeEngine, keys) as here:
        for key in ("first-key", "second-key", "schl\u00fcssel"):
            for value in (f"Bearer {key}", f"bearer  {key} "):
                headers = {"Authorization": value.encode()}
                assert here.ask("/v1/completions", COMPLETION, headers=headers).status_code == 200


def test_without_a_file_any_key_is_accepted():
    with site(FakeEngine) as here:
        for headers in ({}, bearer("anything"), bearer("\u00e9")):
            headers = {name: value.encode() for name, value in headers.items()}
            assert here.ask("/v1/completions", COMPLETION, headers=headers).status_code == 200


@pytest.mark.catches("keys-compared-in-turn")
def test_all_keys_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "hmac.compare_digest", lambda a, b: compared.append((a, b)) or bytes(a) == bytes(b)
    )
    keys = Keys(("aa", "bb", "cc"))
    assert keys.check("Bearer aa")
    assert compared == [(b"aa", b"aa"), (b"aa", b"bb"), (b"aa", b"cc")]
    assert keys.check("Bearer aa") != keys.check("Bearer bb")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no key; write one a line"),
        (b"# only this\n", "holds no key; write one a line"),
        (b"\xff", "is not UTF-8; write one key a line"),
        (b"a" * ((1 << 20) + 1), "cannot be read"),
        (None, "cannot be read .No such file"),
    ],
)
def test_a_file_of_no_keys_is_refused(tmp_path, content, message):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=f"--api-key-file: .*{message}"):
        Keys.of_file(str(file))


@pytest.mark.catches("rate-not-kept")
def test_a_bucket_lets_through_a_burst_and_then_the_rate():
    now = [0.0]
    buckets = Buckets(2.0, 3, clock=lambda: now[0])

    def allowed(caller="a"):
        try:
            buckets.take(caller)
        except Refusal as refusal:
            return refusal.headers["Retry-After"]
        return True

    assert [allowed() for _ in range(5)] == [True] * 3 + ["1"] * 2
    assert allowed("b") is True
    now[0] = 0.5
    assert [allowed() for _ in range(2)] == [True, "1"]
    now[0] = 100.0
    assert [allowed() for _ in range(4)] == [True] * 3 + ["1"]


def test_callers_that_are_long_gone_are_forgotten():
    buckets = Buckets(1.0, 1)
    for i in range(10_500):
        buckets.take(str(i))
    assert len(buckets._callers) == 10_000


def test_the_rate_is_of_a_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    limits = Limits(rate=0.001, burst=2)
    with site(FakeEngine, ServeOptions(api_key_file=str(file), limits=limits)) as here:
        found = [
            here.ask("/v1/models", headers=bearer(key)).status_code
            for key in ("one", "one", "one", "two", "two", "two")
        ]
        assert found == [200, 200, 429] * 2
        answer = here.ask("/v1/completions", COMPLETION, headers=bearer("one"))
        assert error_of(answer, 429)["code"] == "rate_limit_exceeded"
        assert 900 < int(answer.headers["retry-after"]) <= 1000


def test_the_rate_is_of_an_address_where_there_are_no_keys():
    with site(FakeEngine, ServeOptions(limits=Limits(rate=0.001, burst=2))) as here:
        found = [here.ask("/v1/models", headers=bearer(f"k{i}")).status_code for i in range(3)]
        assert found == [200, 200, 429]


@pytest.mark.catches("body-unlimited")
def test_a_body_that_is_too_large_is_413():
    with site(FakeEngine, ServeOptions(limits=Limits(body_bytes=200))) as here:
        assert here.ask("/v1/completions", COMPLETION).status_code == 200

        async def pieces():
            for _ in range(30):
                yield b" " * 10

        for content in (b" " * 201, pieces()):
            answer = here.ask("/v1/completions", content=content, method="POST")
            error = error_of(answer, 413)
            assert error["message"] == "the body is too large; send at most 200 bytes"
        assert len(here.engine.asked) == 1


@pytest.mark.catches("queue-without-end")
def test_a_full_queue_is_429():
    options = ServeOptions(limits=Limits(queue=1))

    async def several(here):
        asked = [asyncio.create_task(here.asked("/v1/completions", COMPLETION)) for _ in range(6)]
        done = []
        async with asyncio.timeout(10):
            while here.engine.running < 5 or not done:
                await asyncio.sleep(0.01)
                done = [task for task in asked if task.done()]
        here.engine.go.set()
        return done, [await task for task in asked]

    with site(lambda: FakeEngine(hold=True), options) as here:
        (refused,), answers = here.run(several(here))
        answer = refused.result()
        assert error_of(answer, 429)["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"
        assert sorted(one.status_code for one in answers) == [200] * 5 + [429]
        error = error_of(here.ask("/v1/completions", COMPLETION | {"n": 6}), 400)
        assert error["message"].endswith("ask for at most 5 at a time")
        assert here.api.doors.inside == 0


@pytest.mark.catches("choices-taken-by-halves")
def test_choices_are_taken_all_or_none():
    with site(FakeEngine) as here:
        submit, count = here.engine.submit, [0]

        async def twice(request):
            count[0] += 1
            if count[0] == 3:
                raise InputError("prompt: too long; give less")
            return await submit(request)

        here.engine.submit = twice
        error_of(here.ask("/v1/completions", COMPLETION | {"n": 4}), 400)
        assert here.engine.cancelled == [1, 2] and here.api.doors.inside == 0


@pytest.mark.catches("draining-lets-in")
def test_a_server_that_ends_lets_nobody_in():
    with site(FakeEngine) as here:
        here.api.doors.draining = True
        for path, body in (*GUARDED, ("/ready", None)):
            answer = here.ask(path, body)
            assert error_of(answer, 503)["code"] == "draining"
        assert here.ask("/health").status_code == here.ask("/metrics").status_code == 200


def test_what_takes_too_long_when_it_ends_is_told_so():
    async def ended(here, stream):
        asked = asyncio.create_task(here.asked("/v1/completions", COMPLETION | {"stream": stream}))
        async with asyncio.timeout(10):
            while not here.engine.running:
                await asyncio.sleep(0.01)
        here.api.doors.over.set()
        return await asked

    for stream in (False, True):
        with site(lambda: FakeEngine(hold=True)) as here:
            answer = here.run(ended(here, stream))
            if not stream:
                assert error_of(answer, 503)["code"] == "draining"
            assert "the time to finish is over" in answer.text
            assert here.engine.cancelled == [1] and here.api.doors.inside == 0


@pytest.mark.parametrize(
    ("cors", "origin", "told"),
    [
        ((), "https://a.org", None),
        (("https://a.org",), "https://a.org", "https://a.org"),
        (("https://a.org",), "https://b.org", None),
        (("*",), "https://b.org", "*"),
    ],
)
def test_pages_of_other_origins_may_ask_where_they_are_named(cors, origin, told):
    with site(FakeEngine, ServeOptions(cors=cors)) as here:
        answer = here.ask("/v1/models", headers={"Origin": origin})
        assert answer.headers.get("access-control-allow-origin") == told


def test_an_origin_that_is_none_is_refused():
    with pytest.raises(InputError, match="--cors: found 'a.org'; give an origin as https"):
        ServeOptions(cors=("a.org",))


def test_limits_are_bounded():
    with pytest.raises(InputError, match="limits.queue: found -1; give 0 or more"):
        Limits(queue=-1)
    with pytest.raises(InputError, match="port: found 70000; give 0 to 65535"):
        ServeOptions(port=70000)


@pytest.mark.catches("schema-compiles-for-ever")
def test_a_schema_that_takes_too_long_is_refused_alone(monkeypatch):
    compiled = Grammars.compiled
    monkeypatch.setattr(Grammars, "compiled", lambda *args: time.sleep(0.5) or compiled(*args))
    options = ServeOptions(limits=Limits(grammar_s=0.05))

    async def both(here):
        body = COMPLETION | {"response_format": {"type": "json_object"}}
        slow = asyncio.create_task(here.asked("/v1/completions", body))
        return await here.asked("/v1/completions", COMPLETION), await slow

    with site(FakeEngine, options) as here:
        other, slow = here.run(both(here))
        assert other.status_code == 200
        error = error_of(slow, 400)
        assert error["param"] == "response_format"
        assert error["message"].startswith("response_format: its schema takes more than 0.05 s")
        assert len(here.engine.asked) == 1
