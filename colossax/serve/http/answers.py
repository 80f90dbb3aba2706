"""Answers in OpenAI's forms, whole and in pieces."""

import base64
import dataclasses
import json
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

from colossax.data import Tokenizer
from colossax.scheduling import Keep
from colossax.serve.http.calling import CallPart
from colossax.serve.http.generating import Part
from colossax.serve.text import Entry

LEAST_LOGPROB = -9999.0
"""Stands for what JSON cannot say: a token that could not come."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + dumped(value) + b"\n\n"


def dumped(value: Any) -> bytes:
    """JSON in UTF-8, without spaces."""
    return _ENCODER.encode(value).encode()


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB


@dataclasses.dataclass(kw_only=True)
class Told:
    """A continuation as it has come so far.

    Attributes:
        tokens: That the engine said for it.
        finish: `stop`, `length` or `tool_calls` once it has ended.
        calls: Of functions, in OpenAI's form.
    """

    text: str = ""
    entries: list[Entry] = dataclasses.field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, part: Part) -> None:
        """Take a part."""
        self.text += part.text
        self.entries += part.entries
        self.tokens, self.finish = max(self.tokens, part.tokens), part.finish
        for call in part.calls:
            if call.id is not None:
                function = {"name": call.name, "arguments": ""}
                self.calls.append({"id": call.id, "type": "function", "function": function})
            self.calls[call.index]["function"]["arguments"] += call.arguments


class Form:
    """The form of completions.

    Args:
        model: As it was asked for.
        tokenizer: Tells the text of tokens.
        logprobs: How many of the likeliest are told beside each token; None: nothing is.
        keep: What of the tokens was kept, which the answer names; None: all, and it does not.
    """

    kind, chunk_kind, mark = "text_completion", "text_completion", "cmpl"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        logprobs: int | None,
        keep: Keep | None = None,
    ) -> None:
        self.model, self._tokenizer, self._logprobs = model, tokenizer, logprobs
        self._kept = {} if keep is None else {"keep": keep.named}
        self.name, self.created = f"{self.mark}-{secrets.token_hex(12)}", int(time.time())

    def whole(self, told: Sequence[Told], prompt_tokens: int) -> dict[str, Any]:
        """The answer at once."""
        choices = [self._choice(i, one) for i, one in enumerate(told)]
        return self._head(self.kind) | {
            "choices": choices,
            "usage": usage(prompt_tokens, sum(one.tokens for one in told)),
        }

    def chunk(self, index: int, part: Part, *, with_usage: bool) -> dict[str, Any]:
        """A piece of the answer."""
        head = self._head(self.chunk_kind) | {"choices": [self._piece(index, part)]}
        return head | ({"usage": None} if with_usage else {})

    def last(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """The piece that counts tokens."""
        return self._head(self.chunk_kind) | {"choices": [], "usage": usage(prompt_tokens, tokens)}

    def opening(self, count: int, *, with_usage: bool) -> list[dict[str, Any]]:
        """Pieces before all text."""
        return []

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.name, "object": kind, "created": self.created, "model": self.model}
        return head | self._kept

    def _choice(self, index: int, told: Told) -> dict[str, Any]:
        return {
            "text": told.text,
            "index": index,
            "logprobs": self._probabilities(told.entries),
            "finish_reason": told.finish,
        }

    def _piece(self, index: int, part: Part) -> dict[str, Any]:
        return {
            "text": part.text,
            "index": index,
            "logprobs": self._probabilities(part.entries),
            "finish_reason": part.finish,
        }

    def _probabilities(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        top = [self._likeliest(entry) for entry in entries] if self._logprobs else None
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": top,
            "text_offset": [entry.offset for entry in entries],
        }

    def _likeliest(self, entry: Entry) -> dict[str, float | None] | None:
        if entry.logprob is None:
            return None
        found: dict[str, float | None] = {}
        for token, logprob in entry.top:  # of tokens with the same text the likeliest
            found.setdefault(self._text(token), _finite(logprob))
        return found

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])


class ChatForm(Form):
    """The form of chats."""

    kind, chunk_kind, mark = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, count: int, *, with_usage: bool) -> list[dict[str, Any]]:
        """Says for each choice who speaks."""
        delta = {"role": "assistant", "content": ""}
        usage = {"usage": None} if with_usage else {}
        return [
            self._head(self.chunk_kind) | {"choices": [self._delta(i, delta, None, None)]} | usage
            for i in range(count)
        ]

    def _choice(self, index: int, told: Told) -> dict[str, Any]:
        message = {"role": "assistant", "content": told.text, "refusal": None}
        if told.calls:
            message |= {"content": told.text or None, "tool_calls": told.calls}
        return {
            "index": index,
            "message": message,
            "logprobs": self._probabilities(told.entries),
            "finish_reason": told.finish,
        }

    def _piece(self, index: int, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": part.text} if part.text else {}
        if part.calls:
            delta["tool_calls"] = [_call_delta(one) for one in part.calls]
        told = self._probabilities(part.entries) if part.entries else None
        return self._delta(index, delta, told, part.finish)

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _probabilities(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return {
            "content": [
                self._one(entry.token, entry.logprob)
                | {"top_logprobs": [self._one(token, value) for token, value in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        known = self._tokenizer.is_byte_level
        said = self._tokenizer.token_bytes(token) if known else text.encode()
        return {"token": text, "logprob": _finite(logprob), "bytes": list(said)}


def _call_delta(part: CallPart) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.id is None:
        return {"index": part.index, "function": function}
    function = {"name": part.name, **function}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """Counts of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    """One model of the list."""
    return {"id": name, "object": "model", "created": created, "owned_by": "colossax"}


def embeddings(
    name: str, vectors: Sequence[Sequence[float]], prompt_tokens: int, *, packed: bool
) -> dict[str, Any]:
    """Vectors, as numbers or as float32 in base64."""
    data = [
        {"object": "embedding", "index": i, "embedding": _packed(one) if packed else list(one)}
        for i, one in enumerate(vectors)
    ]
    counts = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": name, "usage": counts}


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
