"""What a body may hold: every field is understood or refused by its name, none is passed over."""

import dataclasses
from typing import Any

from colossax.config import Bound, at_least, within
from colossax.documents import parse_json
from colossax.errors import InputError
from colossax.scheduling import Keep, SamplingConfig
from colossax.scheduling.request import MOST_BIASED, MOST_LOGPROBS
from colossax.serve.http.errors import bad
from colossax.serve.http.messages import messages, shown
from colossax.serve.http.reading import (
    Reader,
    any_text,
    anything,
    flag,
    json_text,
    kind_of,
    members,
    number,
    refused,
    text,
    texts,
)
from colossax.serve.http.tools import NO_TOOLS, Tools, choice, chosen, tools

STOPS, STOP_CHARS = 4, 256
DEFAULT_TOKENS = 16
"""`max_tokens` of a completion that says none, as OpenAI has it; chats go on to the end."""

JSON_OBJECT = '{"type":"object"}'
_ONLY_CHATS = "is for /v1/chat/completions; leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """What a completion or a chat was asked for, before any of it became tokens.

    Attributes:
        model: Name of the model, or of an adapter.
        prompts: Texts or token ids; of a chat none.
        messages: Of a chat.
        tools: Functions that may be called.
        max_tokens: Most tokens to say; None: as many as there is room for. 0: the prompt alone.
        n: Continuations of each prompt.
        seed: None: a new one each time.
        sampling: Without the seed.
        stop: Texts that end a continuation, not said themselves.
        stream: Whether pieces are sent as they come.
        usage: Whether a stream ends with counts of tokens.
        echo: Whether the prompt stands before its continuation.
        schema: JSON schema, as text, of what is to be said; None: anything.
        keep: What each continuation keeps of its tokens; None: all.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: Tools = NO_TOOLS
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    sampling: SamplingConfig
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    echo: bool = False
    schema: str | None = None
    keep: Keep | None = None


def json_of(body: bytes) -> Any:
    """The object of a body.

    Raises:
        Refusal: 400, it is no JSON object.
    """
    try:
        return parse_json(body, unique=True)
    except ValueError as problem:
        raise bad(f"the body cannot be read: {problem}; send one JSON object in UTF-8") from None


def prompts(value: Any, name: str) -> tuple[str | tuple[int, ...], ...]:
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        return (_prompt(value, name),)
    wanted = "a text, texts, token ids or lists of them"
    found = kind_of(value, list, name, wanted)
    if not found:
        raise bad(f"{name}: is empty; give {wanted}", name)
    kinds = {type(item) for item in found}
    if kinds == {int}:
        return (_prompt(found, name),)
    if kinds not in ({str}, {list}):
        raise bad(f"{name}: has items of several or other kinds; give {wanted}", name)
    return tuple(_prompt(item, f"{name}[{i}]") for i, item in enumerate(found))


def _prompt(value: str | list[Any], name: str) -> str | tuple[int, ...]:
    if not value:
        raise bad(f"{name}: is empty; give at least one token", name)
    if isinstance(value, list) and any(type(item) is not int for item in value):
        raise bad(f"{name}: has an item that is no token id; give integers", name)
    return value if isinstance(value, str) else tuple(value)


def _biases(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    found = kind_of(value, dict, name, "an object of token ids and numbers")
    if len(found) > MOST_BIASED:
        raise bad(f"{name}: has {len(found)} tokens; give at most {MOST_BIASED}", name)
    read = number(within(-100, 100))
    for key in found:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
            raise bad(f"{name}: '{key[:50]}' is no token id; give integers as texts", name)
    return tuple((int(key), read(item, f"{name}.{key}")) for key, item in found.items())


def _format(value: Any, name: str) -> str | None:
    kind = kind_of(value, dict, name, "an object").get("type")
    if kind == "json_schema":
        found = members(value, name, {"type": anything, "json_schema": _schema}, ("json_schema",))
        return found["json_schema"]
    if kind not in ("text", "json_object"):
        known = "text, json_object or json_schema"
        raise bad(f"{name}: is of type {shown(kind)}; give {known}", name)
    members(value, name, {"type": anything})
    return JSON_OBJECT if kind == "json_object" else None


def _schema(value: Any, name: str) -> str:
    readers: dict[str, Reader] = {
        "name": text(64),
        "description": any_text,
        "strict": flag,
        "schema": lambda found, where: kind_of(found, dict, where, "a JSON schema"),
    }
    found = members(value, name, readers, ("schema",))
    return json_text(found["schema"], f"{name}.schema")


def _keep(value: Any, name: str) -> Keep:
    readers: dict[str, Reader] = {
        "sinks": number(at_least(0), whole=True),
        "heavy": number(at_least(1), whole=True),
        "window": number(at_least(1), whole=True),
    }
    keep = Keep(**members(value, name, readers, ("window",)))
    try:
        keep.check()
    except InputError as problem:
        raise bad(str(problem), name) from None
    return keep


def _stream_options(value: Any, name: str) -> bool:
    return members(value, name, {"include_usage": flag}).get("include_usage", False)


_TOP_P = Bound(low=0, high=1, above=True, told="a number above 0, at most 1")
_PENALTY = number(within(-2, 2))

_SHARED: dict[str, Reader] = {
    "model": text(1024),
    "max_tokens": number(at_least(1), whole=True),
    "max_completion_tokens": number(at_least(1), whole=True),
    "temperature": number(within(0, 2)),
    "top_p": number(_TOP_P),
    "top_k": number(Bound(low=0, told="0 (all) or more"), whole=True),
    "min_p": number(within(0, 1)),
    "n": number(at_least(1), whole=True),
    "seed": number(within(0, 2**32 - 1), whole=True),
    "stop": texts(STOPS, STOP_CHARS),
    "stream": flag,
    "stream_options": _stream_options,
    "logit_bias": _biases,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "response_format": _format,
    "keep": _keep,
    "user": text(512),
}
_TOKENS = Bound(low=0, told="1 or more, or 0 with 'echo': true")
_TOP = number(within(0, MOST_LOGPROBS), whole=True)

COMPLETION: dict[str, Reader] = {
    **_SHARED,
    "prompt": prompts,
    "max_tokens": number(_TOKENS, whole=True),
    "logprobs": _TOP,
    "echo": flag,
    "top_logprobs": refused("is for chats; give 'logprobs' a number"),
    "messages": refused("is for /v1/chat/completions; give 'prompt'"),
    "tools": refused(_ONLY_CHATS),
    "tool_choice": refused(_ONLY_CHATS),
    "parallel_tool_calls": refused(_ONLY_CHATS),
}
CHAT: dict[str, Reader] = {
    **_SHARED,
    "messages": messages,
    "tools": tools,
    "tool_choice": choice,
    "parallel_tool_calls": flag,
    "logprobs": flag,
    "top_logprobs": _TOP,
    "echo": refused("is for /v1/completions; leave it out"),
    "prompt": refused("is for /v1/completions; give 'messages'"),
}
EMBEDDINGS: dict[str, Reader] = {
    "model": text(1024),
    "input": prompts,
    "dimensions": number(at_least(1), whole=True),
    "encoding_format": text(16),
    "user": text(512),
}
TOKENIZE: dict[str, Reader] = {
    "model": text(1024),
    "prompt": lambda value, name: kind_of(value, str, name, "a text"),
    "messages": messages,
    "tools": tools,
}

_DRAWN = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")


def completion(body: bytes) -> Ask:
    """What /v1/completions is asked for.

    Raises:
        Refusal: 400, with the field at fault.
    """
    found = members(json_of(body), "", COMPLETION, ("model", "prompt"))
    if found.get("max_tokens") == 0 and not found.get("echo"):
        raise bad(f"max_tokens: found 0; give {_TOKENS}", "max_tokens")
    return _ask(found, found.get("logprobs"), default_tokens=DEFAULT_TOKENS)


def chat(body: bytes) -> Ask:
    """What /v1/chat/completions is asked for.

    Raises:
        Refusal: 400, with the field at fault.
    """
    found = members(json_of(body), "", CHAT, ("model", "messages"))
    if "top_logprobs" in found and not found.get("logprobs"):
        raise bad("top_logprobs: needs 'logprobs': true; give it too", "top_logprobs")
    told = found.get("top_logprobs", 0) if found.get("logprobs") else None
    return _ask(found, told, default_tokens=None)


def _ask(found: dict[str, Any], told: int | None, *, default_tokens: int | None) -> Ask:
    if "max_tokens" in found and "max_completion_tokens" in found:
        raise bad("max_tokens: stands beside max_completion_tokens; give one of them", "max_tokens")
    if "stream_options" in found and not found.get("stream"):
        raise bad("stream_options: needs 'stream': true; give it too", "stream_options")
    given = found.get("max_tokens", found.get("max_completion_tokens"))
    drawn = {key: found[key] for key in _DRAWN if key in found}
    return Ask(
        model=found["model"],
        prompts=found.get("prompt", ()),
        messages=found.get("messages", ()),
        tools=chosen(found),
        max_tokens=default_tokens if given is None else given,
        n=found.get("n", 1),
        seed=found.get("seed"),
        sampling=SamplingConfig(temperature=found.get("temperature", 1.0), logprobs=told, **drawn),
        stop=found.get("stop", ()),
        stream=found.get("stream", False),
        usage=found.get("stream_options", False),
        echo=found.get("echo", False),
        schema=found.get("response_format"),
        keep=found.get("keep"),
    )
