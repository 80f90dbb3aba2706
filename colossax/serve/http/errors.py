"""Refusals as OpenAI's clients read them: one plain sentence, its kind, the field, a code."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

INVALID = "invalid_request_error"


class Refusal(Exception):  # noqa: N818 (an answer, no fault)
    """An answer that is not what was asked for.

    Attributes:
        status: Of HTTP.
        kind: `type` of the error.
        param: The field at fault; None where none is.
        code: What programs tell it by; may be None.
        headers: Of the answer, beside those that each has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # What a client sent may be in it: one line, whatever that was.
        self.message = "".join(c if c.isprintable() else " " for c in message)
        super().__init__(self.message)
        self.status, self.kind = status, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON value of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def bad(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """400: what the client sent cannot be honoured."""
    return Refusal(400, message, param=param, code=code)


def no_key(message: str) -> Refusal:
    """401."""
    headers = {"WWW-Authenticate": "Bearer"}
    return Refusal(401, message, code="invalid_api_key", headers=headers)


def no_model(name: str, known: tuple[str, ...]) -> Refusal:
    """404: a model that is not served."""
    message = f"model: '{name[:200]}' is not served here; ask for {' or '.join(known)}"
    return Refusal(404, message, param="model", code="model_not_found")


def too_large(what: str) -> Refusal:
    """413."""
    return Refusal(413, what, code="request_too_large", headers={"Connection": "close"})


def later(message: str, after_s: float, code: str) -> Refusal:
    """429: the same request will do later."""
    headers = {"Retry-After": str(max(1, -int(-after_s // 1)))}
    return Refusal(429, message, kind="rate_limit_error", code=code, headers=headers)


def unavailable(message: str, code: str) -> Refusal:
    """503: not now, or not by this server."""
    return Refusal(503, message, kind="server_error", code=code, headers={"Retry-After": "5"})


def internal() -> Refusal:
    """500: our own mistake, of which the log has more."""
    message = "the server made a mistake; its log has the details"
    return Refusal(500, message, kind="server_error", code="internal_error")
