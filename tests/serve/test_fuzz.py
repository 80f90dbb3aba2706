"""Bodies that nobody would send: each is answered, or refused in the documented form."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from colossax.serve import ServeOptions
from colossax.serve.http.fields import CHAT, COMPLETION, EMBEDDINGS, TOKENIZE
from colossax.serve.options import Limits
from tests.serve.fake import VOCAB, FakeEngine
from tests.serve.site import error_of, events, site

TABLES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": EMBEDDINGS,
    "/tokenize": TOKENIZE,
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.integers(),
    st.floats(),
    TEXT,
    st.sampled_from(["toy", "tuned", "user", "text", "json_object", "json_schema", "<|im_end|>"]),
)
KEYS = st.one_of(
    TEXT,
    st.sampled_from(
        ["type", "json_schema", "schema", "name", "strict", "role", "content", "text"]
        + ["include_usage", "enum", "$ref", "properties", "pattern", "7"]
    ),
)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)
PART = st.fixed_dictionaries({"type": st.just("text"), "text": st.one_of(TEXT, SCALAR)})
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant"]),
        "content": st.one_of(TEXT, st.lists(st.one_of(VALUE, PART), max_size=2)),
    },
    optional={"name": TEXT},
)
TOKEN = st.integers(0, VOCAB)
LIKELY = {
    "model": st.sampled_from(["toy", "tuned"]),
    "prompt": st.one_of(TEXT, st.lists(TEXT, max_size=3), st.lists(TOKEN, max_size=5)),
    "input": st.one_of(TEXT, st.lists(st.lists(TOKEN, max_size=3), max_size=3)),
    "messages": st.lists(MESSAGE, min_size=1, max_size=2),
    "max_tokens": st.integers(1, 20),
    "max_completion_tokens": st.integers(1, 20),
    "n": st.integers(1, 3),
    "echo": st.booleans(),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 5)),
    "top_logprobs": st.integers(0, 5),
    "user": st.just("me"),
    "encoding_format": st.sampled_from(["float", "base64"]),
    "min_p": st.floats(0, 1),
    "top_k": st.integers(0, 9),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "stop": st.one_of(TEXT, st.lists(TEXT, max_size=5)),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "logit_bias": st.dictionaries(TOKEN.map(str), st.floats(-100, 100), max_size=3),
    "response_format": st.one_of(
        st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
        st.fixed_dictionaries(
            {
                "type": st.just("json_schema"),
                "json_schema": st.fixed_dictionaries({"name": TEXT, "schema": VALUE}),
            }
        ),
    ),
    "seed": st.integers(0, 5),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
}


NEEDED = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/tokenize": "prompt"}


@st.composite
def bodies(draw):
    """A path, and a body of fields most of which are likely."""
    path = draw(st.sampled_from(sorted(TABLES)))
    names = draw(st.lists(st.sampled_from(sorted(TABLES[path])), unique=True, max_size=3))
    body = {"model": "toy", NEEDED.get(path, "input"): "a"}
    for name in [NEEDED.get(path, "input"), *names]:
        rare = name not in LIKELY or draw(st.integers(0, 9)) == 0
        body[name] = draw(st.one_of(SCALAR, VALUE) if rare else LIKELY[name])
    if draw(st.integers(0, 9)) == 0:
        body[draw(KEYS)] = draw(VALUE)
    return path, body


@pytest.fixture(scope="module")
def here():
    limits = Limits(body_bytes=100_000, grammar_s=2.0)
    with site(lambda: FakeEngine(embeds=True, slots=200), ServeOptions(limits=limits)) as found:
        yield found


def check(here, path, content):
    """The answer is whole, or a refusal; afterwards the engine is idle."""
    answer = here.ask(path, content=content, method="POST")
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert events(answer.text)
        else:
            assert answer.json()
    else:
        error = error_of(answer, answer.status_code)
        assert answer.status_code in (400, 404, 413)
        assert len(error["message"]) < 1200 and "\n" not in error["message"]
    assert here.engine.running == 0 and here.api.doors.inside == 0
    return answer.status_code


def check_body(here, path, body):
    asked = len(here.engine.asked)
    status = check(here, path, json.dumps(body).encode())
    assert status == 200 or len(here.engine.asked) == asked


@hypothesis.settings(
    max_examples=300, suppress_health_check=list(hypothesis.HealthCheck), deadline=None
)
@hypothesis.given(bodies())
def test_any_body_is_answered_or_refused(here, drawn):
    check_body(here, *drawn)


@pytest.mark.sweep
@hypothesis.settings(
    max_examples=5000, suppress_health_check=list(hypothesis.HealthCheck), deadline=None
)
@hypothesis.given(bodies())
def test_thousands_of_bodies_are_answered_or_refused(here, drawn):
    check_body(here, *drawn)


@hypothesis.settings(
    max_examples=100, suppress_health_check=list(hypothesis.HealthCheck), deadline=None
)
@hypothesis.given(
    st.sampled_from(sorted(TABLES)),
    st.one_of(
        st.binary(max_size=200),
        VALUE.map(lambda value: json.dumps(value).encode()),
        st.text(max_size=50).map(lambda text: text.encode("utf-8", "surrogatepass")),
    ),
)
def test_any_bytes_are_refused(here, path, content):
    check(here, path, content)


@hypothesis.settings(
    max_examples=100, suppress_health_check=list(hypothesis.HealthCheck), deadline=None
)
@hypothesis.given(st.text("/v1compltinsade.%0aF2-_", max_size=30))
def test_any_path_is_answered_or_refused(here, path):
    answer = here.ask("/" + path.replace("%", "%25"))
    if answer.status_code != 200:
        assert error_of(answer, answer.status_code) and answer.status_code in (404, 405)
