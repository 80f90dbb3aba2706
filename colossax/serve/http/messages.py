"""Messages of a chat: who says what, and which functions were called."""

from typing import Any

from colossax.serve.http.errors import bad
from colossax.serve.http.reading import Reader, any_text, anything, kind_of, members, refused, text
from colossax.serve.http.tools import tool_calls

ROLES = ("system", "developer", "user", "assistant", "tool")


def messages(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Messages, as templates take them: content is text, arguments of calls are values.

    Raises:
        Refusal: 400, with the field at fault.
    """
    found = kind_of(value, list, name, "a list of messages")
    if not found:
        raise bad(f"{name}: is empty; give at least one message", name)
    return tuple(_message(item, f"{name}[{i}]") for i, item in enumerate(found))


def _message(value: Any, name: str) -> dict[str, Any]:
    found = members(value, name, _MESSAGE, ("role",))
    for key in ("annotations", "parsed"):
        found.pop(key, None)
    role = found["role"]
    if found.get("tool_calls") == []:
        del found["tool_calls"]
    for key, whose in {"tool_calls": "assistant", "tool_call_id": "tool"}.items():
        if key in found and role != whose:
            where = f"{name}.{key}"
            raise bad(f"{where}: is for messages of the role '{whose}'; leave it out", where)
    if "tool_calls" in found:
        found.setdefault("content", "")
    for key in ("content", "tool_call_id") if role == "tool" else ("content",):
        if key not in found:
            where = f"{name}.{key}"
            raise bad(f"{where}: is missing; give it", where, "missing_required_parameter")
    return found


def _role(value: Any, name: str) -> str:
    found = kind_of(value, str, name, f"one of {', '.join(ROLES)}")
    if found not in ROLES:
        raise bad(f"{name}: found '{found[:50]}'; give one of {', '.join(ROLES)}", name)
    return found


def _none(value: Any, name: str) -> None:
    if value != []:
        raise bad(f"{name}: are not supported; leave them out", name, "unsupported_parameter")


def _content(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    parts = kind_of(value, list, name, "a text or a list of parts")
    return "".join(_part(part, f"{name}[{i}]") for i, part in enumerate(parts))


def _part(value: Any, name: str) -> str:
    kind = kind_of(value, dict, name, "an object").get("type")
    if kind != "text":
        raise bad(f"{name}: is of type {shown(kind)}; only parts of type 'text' are read", name)
    return members(value, name, {"type": anything, "text": any_text}, ("text",))["text"]


def shown(value: Any) -> str:
    """A value that should have been a known text."""
    return f"'{value[:50]}'" if isinstance(value, str) else "no text"


_MESSAGE: dict[str, Reader] = {
    "role": _role,
    "content": _content,
    "name": text(256),
    "tool_calls": tool_calls,
    "tool_call_id": text(256),
    "function_call": refused("is of an older form; give 'tool_calls'"),
    # Null or empty in what clients give back of an answer, or made of it.
    **{name: refused("is not supported; leave it out") for name in ("refusal", "audio")},
    "annotations": _none,
    "parsed": anything,
}
