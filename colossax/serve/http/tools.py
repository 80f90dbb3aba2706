"""Functions that a model may call: what a chat may say of them, and the grammar of a call."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from colossax.documents import parse_json
from colossax.serve.http.errors import bad
from colossax.serve.http.reading import Reader, flag, kind_of, members, text

MOST = 128
"""Functions of one request, as OpenAI has it."""

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that says none."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHOICES = "'none', 'auto', 'required' or a function of 'tools'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What a chat says of functions.

    Attributes:
        given: As the client sent them, for the template; none where none may be called.
        names: Of all of them.
        enforced: The schema, as text, of the call that has to come; None: the model says.
    """

    given: tuple[dict[str, Any], ...] = ()
    names: tuple[str, ...] = ()
    enforced: str | None = None


NO_TOOLS = Tools()


def tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """The functions of a chat.

    Raises:
        Refusal: 400, with the field at fault.
    """
    found = kind_of(value, list, name, "a list of tools")
    if not 0 < len(found) <= MOST:
        raise bad(f"{name}: has {len(found)} tools; give 1 to {MOST}, or leave it out", name)
    for i, one in enumerate(found):
        where = f"{name}[{i}]"
        members(one, where, {"type": _function, "function": _described}, ("type", "function"))
    names = [one["function"]["name"] for one in found]
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice is not None:
        raise bad(f"{name}: has the function '{twice}' twice; give each a name of its own", name)
    return tuple(found)


def choice(value: Any, name: str) -> str | dict[str, str]:
    """Which functions may be called: a word, or the only one."""
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise bad(f"{name}: found '{value[:50]}'; give {_CHOICES}", name)
        return value
    kind_of(value, dict, name, _CHOICES)
    found = members(value, name, {"type": _function, "function": _only}, ("type", "function"))
    return found["function"]


def _only(value: Any, name: str) -> dict[str, str]:
    return members(value, name, {"name": function_name}, ("name",))


def chosen(found: Mapping[str, Any]) -> Tools:
    """What a chat's fields say together.

    Args:
        found: The fields that were read.

    Raises:
        Refusal: 400, they do not go together.
    """
    given, asked = found.get("tools"), found.get("tool_choice", "auto")
    if given is None:
        if "tool_choice" in found:
            raise bad("tool_choice: needs 'tools'; give them too", "tool_choice")
        return NO_TOOLS
    if asked == "none":
        return NO_TOOLS
    if found.get("response_format") is not None:
        raise bad(
            "response_format: says what the text is, and 'tools' may be called in its place; leave"
            " one out, or give 'tool_choice': 'none'",
            "response_format",
        )
    names = tuple(one["function"]["name"] for one in given)
    if asked == "auto":
        strict = next((i for i, one in enumerate(given) if one["function"].get("strict")), None)
        if strict is not None:
            where = f"tools[{strict}].function.strict"
            raise bad(
                f"{where}: is honoured where 'tool_choice' is 'required' or a function; give that,"
                " or leave it out",
                where,
            )
        return Tools(given=given, names=names)
    if isinstance(asked, dict) and asked["name"] not in names:
        raise bad(
            f"tool_choice.function.name: found '{asked['name']}'; give one of {', '.join(names)}",
            "tool_choice.function.name",
        )
    may = [
        one["function"]
        for one in given
        if asked == "required" or one["function"]["name"] == asked["name"]
    ]
    return Tools(given=given, names=names, enforced=_schema(may))


def _schema(functions: Sequence[Mapping[str, Any]]) -> str:
    """Of one call: the function's name, then its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": one["name"]},
                "arguments": one.get("parameters") or NO_PARAMETERS,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for one in functions
    ]
    return json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls}, ensure_ascii=False)


def function_name(value: Any, name: str) -> str:
    """Of a function."""
    found = kind_of(value, str, name, "the name of a function")
    if not _NAME.fullmatch(found):
        raise bad(f"{name}: found '{found[:70]}'; give 1 to 64 letters, digits, _ or -", name)
    return found


def tool_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Calls that an assistant made, with their arguments as values: templates write them."""
    found = kind_of(value, list, name, "a list of calls")
    readers: dict[str, Reader] = {"id": text(256), "type": _function, "function": _called}
    return [
        members(one, f"{name}[{i}]", readers, ("id", "type", "function"))
        for i, one in enumerate(found)
    ]


def _called(value: Any, name: str) -> dict[str, Any]:
    return members(
        value, name, {"name": function_name, "arguments": _arguments}, ("name", "arguments")
    )


def _arguments(value: Any, name: str) -> dict[str, Any]:
    found = kind_of(value, str, name, "an object in JSON, as text")
    try:
        return kind_of(parse_json(found.encode(), unique=True), dict, name, "an object")
    except ValueError as problem:
        raise bad(f"{name}: {problem}; give an object in JSON, as text", name) from None


def _function(value: Any, name: str) -> str:
    if value != "function":
        raise bad(f"{name}: only tools of type 'function' are known; give that", name)
    return value


def _described(value: Any, name: str) -> dict[str, Any]:
    readers: dict[str, Reader] = {
        "name": function_name,
        "description": lambda found, where: kind_of(found, str, where, "a text"),
        "parameters": _parameters,
        "strict": flag,
    }
    return members(value, name, readers, ("name",))


def _parameters(value: Any, name: str) -> dict[str, Any]:
    found = kind_of(value, dict, name, "a JSON schema")
    if found.get("type") != "object":
        raise bad(f"{name}: is no schema of an object; give 'type': 'object'", name)
    try:
        json.dumps(found, allow_nan=False)
    except ValueError:
        raise bad(f"{name}: has a number that is not finite; repair it", name) from None
    return found
