"""`--plan.mesh fsdp=4,tensor=2`: values of a frozen configuration, set from text.

Types come from the dataclasses' hints. A mapping is written `key=value,key=value` and replaces
the old one; `none` clears what may be None; items of a tuple are addressed by number.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colossax.config import MESH_AXES, FrozenDict, Plan, Rules, nearest, preset
from colossax.errors import InputError

Override = tuple[str, str]
"""Dotted name without dashes in front, and the text of its value."""

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


def apply_overrides(config: Any, overrides: Sequence[Override]) -> Any:
    """`config` with every override put over it, a `plan.preset` before all others.

    Raises:
        InputError: An unknown name (with the nearest), or a value that does not fit.
    """
    first = [o for o in overrides if o[0] == "plan.preset"]
    rest = [o for o in overrides if o[0] != "plan.preset"]
    for name, text in first:
        config = config.replace(plan=with_preset(config.plan, text))
    for name, text in rest:
        config = _set(config, name.split("."), text, name)
    return config


def with_preset(plan: Plan, name: str) -> Plan:
    """The plan with mesh and rules of a preset; precision, remat and the like stay."""
    chosen = preset(name)
    return plan.replace(mesh=chosen.mesh, rules=chosen.rules)


def override_names(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every name that can be overridden, with its value as it stands."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            yield from override_names(value[0], f"{prefix}{field.name}.0.")
        elif dataclasses.is_dataclass(value):
            yield from override_names(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _set(owner: Any, path: list[str], text: str, name: str) -> Any:
    """`owner` with what `path` leads to replaced; `name` is the whole path, for messages."""
    if isinstance(owner, tuple):
        return _set_item(owner, path, text, name)
    if isinstance(owner, Rules):
        return _set_rule(owner, path, text, name)
    key, rest = path[0].replace("-", "_"), path[1:]
    if isinstance(owner, Plan) and path == ["remat"]:
        segments = tuple(dataclasses.replace(s, remat=text) for s in owner.segments)
        return owner.replace(segments=segments)
    if key not in (f.name for f in dataclasses.fields(owner)):
        raise InputError(f"unknown override --{name}{_nearest(owner, path, name)}")
    value = getattr(owner, key)
    nested = _has_fields(value)
    if rest and not nested:
        raise InputError(f"unknown override --{name}; '{key}' has no fields of its own")
    if nested and not rest:
        raise InputError(f"--{name}: has fields of its own; set one of them, as in --{name}.FIELD")
    hint = typing.get_type_hints(type(owner))[key]
    new = _set(value, rest, text, name) if rest else parse(hint, text, f"--{name}")
    return dataclasses.replace(owner, **{key: new})


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or (
        isinstance(value, tuple) and bool(value) and dataclasses.is_dataclass(value[0])
    )


def _nearest(owner: Any, path: list[str], name: str) -> str:
    fields = [f.name for f in dataclasses.fields(owner)]
    fields += ["preset", "remat"] if isinstance(owner, Plan) else []
    before = name.removesuffix(".".join(path))
    return nearest(f"--{before}{path[0]}", [f"--{before}{field}" for field in fields])


def _set_item(owner: tuple, path: list[str], text: str, name: str) -> tuple:
    index, rest = path[0], path[1:]
    if not index.isdigit() or int(index) > len(owner) or not rest:
        raise InputError(
            f"unknown override --{name}; items are numbered 0 to {len(owner)}"
            f" (the last adds one), as in --plan.segments.0.remat"
        )
    at = int(index)
    # A new item begins as a copy of the last: `count` is what usually differs.
    items = list(owner) if at < len(owner) else [*owner, owner[-1]]
    items[at] = _set(items[at], rest, text, name)
    return tuple(items)


def _set_rule(owner: Rules, path: list[str], text: str, name: str) -> Rules:
    roles = [f.name for f in dataclasses.fields(owner)]
    if path[0] not in roles:
        raise InputError(f"unknown override --{name}{nearest(path[0], roles)}")
    if len(path) != 2:
        raise InputError(f"--{name}: name a dim too, as in --plan.rules.{path[0]}.embed fsdp")
    return owner.updated(**{path[0]: {path[1]: parse_rule(text)}})


def parse_rule(text: str) -> tuple[tuple[str, ...], ...] | None:
    """Choices split by `,`, the axes of one joined by `+`; `none` replicates."""
    if text.lower() == "none":
        return None
    return tuple(tuple(choice.split("+")) for choice in text.split(","))


def parse(hint: Any, text: str, where: str) -> Any:
    """A value of type `hint` from its text.

    Raises:
        InputError: The text is no such value.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if type(None) in args and text.lower() == "none":
            return None
        return parse(next(a for a in args if a is not type(None)), text, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _parse_mapping(args[1] if len(args) == 2 else Any, text, where)
    if dataclasses.is_dataclass(hint):
        raise InputError(f"{where}: has fields of its own and cannot be set from here; use a recipe")
    if hint is bool:
        return _parse_bool(text, where)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise InputError(
                f"{where}: expected {hint.__name__}, found '{text}'; give a number"
            ) from None
    return text if hint is str else parse_plain(text)


def _parse_bool(text: str, where: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise InputError(f"{where}: expected true or false, found '{text}'")
    return text.lower() in _TRUE


def _parse_mapping(hint: Any, text: str, where: str) -> FrozenDict:
    items = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            example = f"{MESH_AXES[2]}=4,{MESH_AXES[-1]}=2"
            raise InputError(f"{where}: found '{item}'; write it as key=value, e.g. {example}")
        if key in items:
            raise InputError(f"{where}: '{key}' is given twice; give it once")
        items[key] = parse_plain(value) if hint is Any else parse(hint, value, f"{where} {key}")
    return FrozenDict(items)


def parse_plain(text: str) -> Any:
    """A number, true, false or none where the text reads as one, else the text."""
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
