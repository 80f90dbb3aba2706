"""Every field is understood or refused by its name."""

import pytest

from colossax.scheduling import SamplingConfig
from tests.serve.fake import TOKENIZER, FakeEngine
from tests.serve.site import error_of, site

COMPLETION = {"model": "toy", "prompt": "hello"}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hello"}]}

TOKENS = "1 or more, or 0 with 'echo': true"
ONLY_CHATS = "is for /v1/chat/completions; leave it out"

BAD_OF_BOTH = [
    ({"temperature": 3}, "temperature", "temperature: found 3.0; give 0 to 2"),
    (
        {"temperature": "1"},
        "temperature",
        "temperature is a text, not a number; give 0 to 2",
    ),
    (
        {"temperature": True},
        "temperature",
        "temperature is true or false, not a number; give 0 to 2",
    ),
    ({"top_p": 0}, "top_p", "top_p: found 0.0; give a number above 0, at most 1"),
    ({"top_p": 1.5}, "top_p", "top_p: found 1.5; give a number above 0, at most 1"),
    ({"top_k": -1}, "top_k", "top_k: found -1; give 0 (all) or more"),
    ({"top_k": 1.0}, "top_k", "top_k is a number, not an integer; give 0 (all) or more"),
    ({"min_p": -0.1}, "min_p", "min_p: found -0.1; give 0 to 1"),
    ({"n": 0}, "n", "n: found 0; give 1 or more"),
    ({"n": 129}, "n", "n: asks for 129 continuations in all; ask for at most 128 at a time"),
    ({"seed": -1}, "seed", "seed: found -1; give 0 to 4294967295"),
    ({"keep": {"sinks": 1}}, "keep.window", "keep.window: is missing; give it"),
    ({"keep": {"window": 0}}, "keep.window", "keep.window: found 0; give 1 or more"),
    (
        {"keep": {"window": 8}},
        "keep",
        "keep: this server keeps all tokens of each request; leave it out, or ask one that was"
        " started with --keeps first",
    ),
    ({"keep": {"heavy": 0, "window": 8}}, "keep.heavy", "keep.heavy: found 0; give 1 or more"),
    (
        {"keep": {"heavy": 8, "sinks": 4, "window": 8}},
        "keep",
        "keep: found sinks 4 and heavy 8; give one of them, as what is kept beside a window is the"
        " first tokens or those looked at most",
    ),
    (
        {"max_completion_tokens": 0},
        "max_completion_tokens",
        "max_completion_tokens: found 0; give 1 or more",
    ),
    (
        {"max_tokens": 4, "max_completion_tokens": 4},
        "max_tokens",
        "max_tokens: stands beside max_completion_tokens; give one of them",
    ),
    ({"stop": []}, "stop", "stop: has 0 texts; give 1 to 4"),
    ({"stop": ["a"] * 5}, "stop", "stop: has 5 texts; give 1 to 4"),
    ({"stop": ["a", ""]}, "stop[1]", "stop[1]: has 0 characters; give 1 to 256"),
    ({"stop": 3}, "stop", "stop is an integer, not a list; give a text or a list of at most 4"),
    ({"stream": 1}, "stream", "stream is an integer, not true or false; give true or false"),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "stream_options: needs 'stream': true; give it too",
    ),
    (
        {"stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
        "stream_options.usage: is not supported here; known: include_usage",
    ),
    (
        {"logit_bias": {"x": 1}},
        "logit_bias",
        "logit_bias: 'x' is no token id; give integers as texts",
    ),
    (
        {"logit_bias": {"7": 101}},
        "logit_bias.7",
        "logit_bias.7: found 101.0; give -100 to 100",
    ),
    (
        {"logit_bias": {"272": 1}},
        "logit_bias",
        "logit_bias: has token 272; give ids from 0 to 271",
    ),
    (
        {"logit_bias": {str(i): 1 for i in range(301)}},
        "logit_bias",
        "logit_bias: has 301 tokens; give at most 300",
    ),
    (
        {"presence_penalty": 2.5},
        "presence_penalty",
        "presence_penalty: found 2.5; give -2 to 2",
    ),
    (
        {"frequency_penalty": -3},
        "frequency_penalty",
        "frequency_penalty: found -3.0; give -2 to 2",
    ),
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        "response_format: is of type 'xml'; give text, json_object or json_schema",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "response_format.json_schema: is missing; give it",
    ),
    (
        {"response_format": {"type": "json_object", "strict": True}},
        "response_format.strict",
        "response_format.strict: is not supported here; known: type",
    ),
    ({"user": 3}, "user", "user is an integer, not a text; give a text"),
    (
        {"temprature": 1},
        "temprature",
        "temprature: is not supported here; did you mean 'temperature'?",
    ),
    ({"model": ""}, "model", "model: has 0 characters; give 1 to 1024"),
    ({"model": None}, "model", "model: is missing; give it"),
]
BAD_COMPLETIONS = [
    *BAD_OF_BOTH,
    ({"prompt": ""}, "prompt", "prompt: is empty; give at least one token"),
    ({"prompt": []}, "prompt", "prompt: is empty; give a text, texts, token ids or lists of them"),
    ({"prompt": ["a", ""]}, "prompt[1]", "prompt[1]: is empty; give at least one token"),
    (
        {"prompt": ["a", 1]},
        "prompt",
        "prompt: has items of several or other kinds; give a text, texts, token ids or lists of"
        " them",
    ),
    (
        {"prompt": [True]},
        "prompt",
        "prompt: has items of several or other kinds; give a text, texts, token ids or lists of"
        " them",
    ),
    (
        {"prompt": [[1, "a"]]},
        "prompt[0]",
        "prompt[0]: has an item that is no token id; give integers",
    ),
    ({"prompt": [[1], []]}, "prompt[1]", "prompt[1]: is empty; give at least one token"),
    ({"prompt": [272]}, "prompt", "prompt: has token 272; give ids from 0 to 271"),
    ({"prompt": [[1], [-1]]}, "prompt[1]", "prompt[1]: has token -1; give ids from 0 to 271"),
    ({"prompt": "a" * 512}, "prompt", "prompt: has 512 tokens; at most 511 are read"),
    (
        {"max_tokens": 508},
        "max_tokens",
        "max_tokens: 508 beside a prompt of 5 are more than the 512 tokens there is room for; give"
        " at most 507",
    ),
    ({"logprobs": 21}, "logprobs", "logprobs: found 21; give 0 to 20"),
    (
        {"logprobs": True},
        "logprobs",
        "logprobs is true or false, not an integer; give 0 to 20",
    ),
    ({"max_tokens": 0}, "max_tokens", f"max_tokens: found 0; give {TOKENS}"),
    (
        {"max_tokens": -1, "echo": True},
        "max_tokens",
        f"max_tokens: found -1; give {TOKENS}",
    ),
    ({"max_tokens": 1e3}, "max_tokens", f"max_tokens is a number, not an integer; give {TOKENS}"),
    (
        {"top_logprobs": 1},
        "top_logprobs",
        "top_logprobs: is for chats; give 'logprobs' a number",
    ),
    ({"messages": []}, "messages", "messages: is for /v1/chat/completions; give 'prompt'"),
    ({"tools": [{"type": "function"}]}, "tools", f"tools: {ONLY_CHATS}"),
    ({"tools": []}, "tools", f"tools: {ONLY_CHATS}"),
    ({"tool_choice": "auto"}, "tool_choice", f"tool_choice: {ONLY_CHATS}"),
    ({"best_of": 2}, "best_of", None),
    ({"suffix": "x"}, "suffix", None),
    ({"n": 65, "prompt": ["a", "b"]}, "n", None),
]
BAD_CHATS = [
    *BAD_OF_BOTH,
    ({"messages": []}, "messages", "messages: is empty; give at least one message"),
    ({"messages": "hi"}, "messages", "messages is a text, not a list; give a list of messages"),
    (
        {"messages": ["hi"]},
        "messages[0]",
        "messages[0] is a text, not an object; give an object",
    ),
    (
        {"messages": [{"role": "user"}]},
        "messages[0].content",
        "messages[0].content: is missing; give it",
    ),
    (
        {"messages": [{"role": "function", "content": "x"}]},
        "messages[0].role",
        "messages[0].role: found 'function'; give one of system, developer, user, assistant, tool",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "messages[0].content[0]: is of type 'image_url'; only parts of type 'text' are read",
    ),
    (
        {"messages": [{"role": "user", "content": ["hi"]}]},
        "messages[0].content[0]",
        "messages[0].content[0] is a text, not an object; give an object",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].id",
        "messages[0].tool_calls[0].id: is missing; give it",
    ),
    ({"logprobs": 1}, "logprobs", "logprobs is an integer, not true or false; give true or false"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: needs 'logprobs': true; give it too"),
    (
        {"logprobs": False, "top_logprobs": 2},
        "top_logprobs",
        "top_logprobs: needs 'logprobs': true; give it too",
    ),
    ({"echo": True}, "echo", "echo: is for /v1/completions; leave it out"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: found 0; give 1 or more"),
    ({"prompt": "x"}, "prompt", "prompt: is for /v1/completions; give 'messages'"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", None),
]
CASES = [
    *(("/v1/completions", COMPLETION | change, *rest) for change, *rest in BAD_COMPLETIONS),
    *(("/v1/chat/completions", CHAT | change, *rest) for change, *rest in BAD_CHATS),
]


@pytest.fixture(scope="module")
def here():
    with site(FakeEngine) as found:
        yield found


@pytest.mark.catches("member-of-any-kind")
@pytest.mark.catches("unknown-field-passed-over")
@pytest.mark.catches("tools-passed-over")
@pytest.mark.catches("bias-unbounded")
@pytest.mark.catches("nothing-to-say-is-asked-for")
def test_what_cannot_be_honoured_is_refused_by_its_name(here):
    wrong = []
    for path, body, param, message in CASES:
        error = error_of(here.ask(path, body), 400)
        expected = message or error["message"]
        if (error["param"], error["message"], error["type"]) != (
            param,
            expected,
            "invalid_request_error",
        ):
            wrong.append((body, error))
    assert not wrong
    assert not here.engine.asked


BODIES = [
    (b"", "the body cannot be read: it is no JSON: Expecting value: line 1 column 1 (char 0)"),
    (b"[1]", "the body cannot be read: it is a list, not an object"),
    (b"\xff", "the body cannot be read: it is not UTF-8 at byte 0"),
    (b'{"model": "\\ud800"}', "the body cannot be read: it has half a character"),
    (b'{"n": ' + b"9" * 5000 + b"}", "the body cannot be read: it has an integer of 5000 digits"),
    (b'{"a":' * 100 + b"1" + b"}" * 100, "the body cannot be read: it is nested deeper than 64"),
    (b'{"n":1,"a":{},"n":2}', "the body cannot be read: it has 'n' twice in an object"),
    (b'{"a":[{"b":1,"b":1}]}', "the body cannot be read: it has 'b' twice in an object"),
    (b"[" * 200_000, "the body cannot be read: it is nested deeper than 64"),
    (b'{"model":"toy","prompt":"a","temperature":NaN}', "temperature: found nan, which is not"),
    (b'{"model":"toy","prompt":"a","temperature":1e999}', "temperature: found inf, which is not"),
]


@pytest.mark.catches("the-last-of-two-counts")
@pytest.mark.parametrize(("body", "message"), BODIES, ids=range(len(BODIES)))
def test_what_is_no_object_in_json_is_refused(here, body, message):
    error = error_of(here.ask("/v1/completions", content=body), 400)
    assert error["message"].startswith(message)


GOOD = [
    ({}, {}, {}),
    ({"temperature": None, "stop": None, "tools": None}, {}, {}),
    ({"temperature": 0}, {"temperature": 0.0}, {}),
    ({"top_p": 1, "top_k": 3, "min_p": 0.25}, {"top_p": 1.0, "top_k": 3, "min_p": 0.25}, {}),
    (
        {"presence_penalty": -1, "frequency_penalty": 2},
        {"presence_penalty": -1.0, "frequency_penalty": 2.0},
        {},
    ),
    (
        {"logit_bias": {"7": -100, "8": 0.5}},
        {"logit_bias": ((7, -100.0), (8, 0.5))},
        {},
    ),
    ({"max_tokens": 3}, {}, {"max_tokens": 3}),
    ({"max_completion_tokens": 3}, {}, {"max_tokens": 3}),
    ({"model": "tuned"}, {}, {"adapter": "tuned"}),
    ({"response_format": {"type": "text"}}, {}, {}),
    ({"response_format": {"type": "json_object"}}, {}, {"waits": True}),
    ({"user": "me"}, {}, {}),
]


@pytest.mark.catches("sampling-lost")
@pytest.mark.parametrize(("change", "sampling", "request_"), GOOD)
def test_what_is_honoured_comes_to_the_engine(here, change, sampling, request_):
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        assert here.ask(path, body | {"seed": 7} | change).status_code == 200
        found = here.engine.asked[-1]
        assert found.sampling == SamplingConfig(**({"temperature": 1.0, "seed": 7} | sampling))
        expected = {"waits": False, "adapter": None, "ends": (0,)} | request_
        assert {name: getattr(found, name) for name in expected} == expected
        if "max_tokens" not in request_:
            assert found.max_tokens == (16 if "prompt" in body else 512 - len(found.prompt))


def test_log_probabilities_are_asked_for_as_each_endpoint_says(here):
    for path, body, told in (
        ("/v1/completions", COMPLETION | {"logprobs": 0}, 0),
        ("/v1/completions", COMPLETION | {"logprobs": 5}, 5),
        ("/v1/chat/completions", CHAT | {"logprobs": True}, 0),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}, 2),
        ("/v1/chat/completions", CHAT | {"logprobs": False}, None),
    ):
        assert here.ask(path, body).status_code == 200
        assert here.engine.asked[-1].sampling.logprobs == told


@pytest.mark.parametrize("prompt", ["ab", ["ab", "a"], "<|im_end|>"])
def test_texts_are_encoded_as_text(here, prompt):
    here.engine.asked.clear()
    assert here.ask("/v1/completions", COMPLETION | {"prompt": prompt}).status_code == 200
    given = [prompt] if isinstance(prompt, str) else prompt
    assert [one.prompt for one in here.engine.asked] == [
        tuple(TOKENIZER.encode(text)) for text in given
    ]


@pytest.mark.parametrize("prompt", [[66, 67], [[66, 67], [1]]])
def test_token_ids_are_taken_as_they_are(here, prompt):
    here.engine.asked.clear()
    assert here.ask("/v1/completions", COMPLETION | {"prompt": prompt}).status_code == 200
    given = [prompt] if isinstance(prompt[0], int) else prompt
    assert [one.prompt for one in here.engine.asked] == [tuple(ids) for ids in given]


@pytest.mark.catches("choices-share-a-seed")
def test_each_choice_has_a_seed_of_its_own(here):
    here.engine.asked.clear()
    body = COMPLETION | {"prompt": ["a", "b"], "n": 2, "seed": 2**32 - 1}
    assert here.ask("/v1/completions", body).status_code == 200
    assert [one.sampling.seed for one in here.engine.asked] == [2**32 - 1, 0] * 2
    here.engine.asked.clear()
    assert here.ask("/v1/completions", COMPLETION | {"n": 4}).status_code == 200
    assert len({one.sampling.seed for one in here.engine.asked}) == 4


def test_models_that_are_not_served_are_404(here):
    for path, body in (
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "a"}),
    ):
        error = error_of(here.ask(path, body | {"model": "gpt-4"}), 404)
        assert error["message"] == "model: 'gpt-4' is not served here; ask for toy or tuned"
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(here.ask("/v1/models/gpt-4"), 404)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/completions", "GET", 405),
        ("/v1/models", "POST", 405),
        ("/v1/chat/completions", "DELETE", 405),
        ("/", "POST", 405),
        ("/v1/completions/", "POST", 404),
        ("/docs", "GET", 404),
        ("/openapi.json", "GET", 404),
        ("/v1/../../etc/passwd", "GET", 404),
        ("/..%2f..%2fetc%2fpasswd", "GET", 404),
        ("/v1/models/..%2f..%2fetc%2fpasswd", "GET", 404),
        ("/%00", "GET", 404),
        ("/v1/" + "a" * 5000, "GET", 404),
    ],
)
def test_other_paths_and_methods_are_refused_in_the_same_form(here, path, method, status):
    answer = here.ask(path, method=method)
    error_of(answer, status)
    assert len(answer.text) < 1000
    assert status == 404 or answer.headers["allow"]
