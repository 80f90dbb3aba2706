"""Functions that a model may call: what a chat may say of them, and the grammar of a call."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from colossax.documents import parse_json
from colossax.serve.http.errors import bad
from colossax.serve.http.reading import (
    Reader,
    any_text,
    anything,
    flag,
    json_text,
    kind_of,
    members,
    text,
)

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
        several: Whether a model that says may make more than one.
    """

    given: tuple[dict[str, Any], ...] = ()
    names: tuple[str, ...] = ()
    enforced: str | None = None
    several: bool = True


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
        for field in ("tool_choice", "parallel_tool_calls"):
            if field in found:
                raise bad(f"{field}: needs 'tools'; give them too", field)
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
        return Tools(given=given, names=names, several=found.get("parallel_tool_calls", True))
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
    named: dict[str, Any] = {}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": one["name"]},
                "arguments": _moved(one.get("parameters") or NO_PARAMETERS, one["name"], named),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for one in functions
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return json.dumps({**schema, "$defs": named} if named else schema, ensure_ascii=False)


_DEFINED = ("$defs", "definitions")
_POINTER = re.compile(r"#/(?:\$defs|definitions)/")


def _moved(schema: Mapping[str, Any], function: str, named: dict[str, Any]) -> Any:
    """A function's schema as a part of another: what it defines goes there, by a name of its own.

    Args:
        schema: Of its parameters.
        function: Its name.
        named: What all functions define, to which this one's are added.
    """

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(one) for one in value]
        if not isinstance(value, dict):
            return value
        pointer = value.get("$ref")
        moved = {name: renamed(one) for name, one in value.items()}
        if isinstance(pointer, str):
            moved["$ref"] = _POINTER.sub(f"#/$defs/{function}.", pointer, count=1)
        return moved

    for key in _DEFINED:
        if isinstance(own := schema.get(key), dict):
            named |= {f"{function}.{name}": renamed(one) for name, one in own.items()}
    return renamed({key: one for key, one in schema.items() if key not in _DEFINED})


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
    given = {**readers, "index": anything}  # of a stream's last message in official clients
    calls = [
        members(one, f"{name}[{i}]", given, ("id", "type", "function"))
        for i, one in enumerate(found)
    ]
    return [{key: one[key] for key in readers} for one in calls]


def _called(value: Any, name: str) -> dict[str, Any]:
    readers: dict[str, Reader] = {
        "name": function_name,
        "arguments": _arguments,
        "parsed_arguments": anything,
    }
    found = members(value, name, readers, ("name", "arguments"))
    found.pop("parsed_arguments", None)  # official clients add it to what they give back
    return found


def _arguments(value: Any, name: str) -> dict[str, Any]:
    found = kind_of(value, str, name, "an object in JSON, as text") or "{}"
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
        "description": any_text,
        "parameters": _parameters,
        "strict": flag,
    }
    return members(value, name, readers, ("name",))


def _parameters(value: Any, name: str) -> dict[str, Any]:
    found = kind_of(value, dict, name, "a JSON schema")
    if found.get("type") != "object":
        raise bad(f"{name}: is no schema of an object; give 'type': 'object'", name)
    json_text(found, name)
    return found
