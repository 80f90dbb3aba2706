"""Immutable mappings and the JSON form of configuration dataclasses."""

import dataclasses
import numbers
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from colossax.config.bounds import field_hints, split_hint
from colossax.config.words import nearest
from colossax.errors import InputError

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(Mapping[K, V], Generic[K, V]):
    """A hashable mapping; keeps the order of insertion, compares without it."""

    def __init__(self, items: Mapping[K, V] | None = None):
        self._items = dict(items or {})
        self._hash: int | None = None

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __repr__(self) -> str:
        return repr(self._items)

    def updated(self, other: Mapping[K, V]) -> "FrozenDict[K, V]":
        """This mapping with `other`'s items added or replaced."""
        return FrozenDict({**self._items, **other})


def to_json(value: Any) -> Any:
    """A configuration value as plain JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(v) for v in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)  # NumPy's too, which JSON knows nothing of
    return value


def non_default_json(value: Any) -> dict[str, Any]:
    """Like `to_json`, without the fields that equal their defaults: stable as fields are added."""
    default = type(value)()
    out: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        field_value, default_value = getattr(value, field.name), getattr(default, field.name)
        if field_value == default_value:
            continue
        nested = dataclasses.is_dataclass(field_value) and type(field_value) is type(default_value)
        out[field.name] = non_default_json(field_value) if nested else to_json(field_value)
    return out


def from_json(cls: type, data: Any, *, where: str, error: type[InputError] = InputError) -> Any:
    """Build dataclass `cls` from parsed JSON: unknown fields are refused, missing ones default.

    Args:
        cls: A frozen dataclass; its `__post_init__` normalises and validates.
        data: What `json.loads` gave.
        where: Name of the value in messages, e.g. `"plan"`.
        error: Exception class to raise.
    """
    if not isinstance(data, Mapping):
        raise error(f"{where}: expected an object of fields, found {data!r}; write it as {{...}}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    kwargs = {}
    for key, value in data.items():
        if key not in fields:
            raise error(f"{where}: unknown field '{key}'{nearest(key, fields)}")
        kwargs[key] = _decode(hints[key], value, f"{where}.{key}", error)
    try:
        return cls(**kwargs)
    except TypeError as problem:
        raise error(f"{where}: {problem}; check the values given") from problem


def check_names(
    cls: type, names: Iterable[str], where: str, *, error: type[InputError] = InputError
) -> None:
    """Refuse names of fields that a dataclass has not.

    Raises:
        InputError: Or `error`, with the nearest name.
    """
    fields = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        if name not in fields:
            raise error(f"{where}: no field is called '{name}'{nearest(name, fields)}")


def check_types(value: Any, where: str, *, error: type[InputError] = InputError) -> None:
    """Refuse a dataclass whose scalars or nested dataclasses have other types or break bounds.

    Annotations that JSON cannot tell apart (mappings, `Any`) are left to the class itself.

    Args:
        value: The dataclass; its fields may have bounds, `Annotated[float, above(0)]`.
        where: Name of the value in messages; with none, fields stand there alone.
        error: Exception class to raise.

    Raises:
        InputError: `error`, with field, expected type or bound, and value.
    """
    hints = field_hints(type(value))
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        name = f"{where}.{field.name}" if where else field.name
        for hint, item, at in _parts(hints[field.name], given, name):
            plain, bound = split_hint(hint)
            if plain in (int, float, bool, str):
                number = _scalar(plain, item, at, error)
                if bound is not None:
                    bound.check(number, at, error=error)
            elif not isinstance(item, plain):
                raise error(
                    f"{at}: expected {plain.__name__}, found {item!r}; give {plain.__name__}(...)"
                )


def _parts(hint: Any, value: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """(class, value, name) of what an annotation asks for by class."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in args if a is not type(None)]
        if value is not None and len(inner) == 1:
            yield from _parts(inner[0], value, where)
        elif value is not None and all(map(dataclasses.is_dataclass, inner)):
            yield next((a for a in inner if isinstance(value, a)), inner[0]), value, where
    elif origin is tuple and args and dataclasses.is_dataclass(args[0]):
        if not isinstance(value, tuple):
            yield tuple, value, where
            return
        for i, item in enumerate(value):
            yield args[0], item, f"{where}[{i}]"
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        if split_hint(args[-1])[1] is not None:
            yield from ((args[-1], item, f"{where} of '{key}'") for key, item in value.items())
    elif dataclasses.is_dataclass(hint) or split_hint(hint)[0] in (int, float, bool, str):
        yield hint, value, where


def _decode(hint: Any, value: Any, where: str, error: type[InputError]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        if isinstance(value, Mapping) and all(map(dataclasses.is_dataclass, inner)):
            return _decode(_with_fields(inner, value, where, error), value, where, error)
        # Of several others the class itself says which it takes.
        return _decode(inner[0], value, where, error) if len(inner) == 1 else value
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where=where, error=error)
    if isinstance(origin, type) and issubclass(origin, Mapping) and not isinstance(value, Mapping):
        raise error(f"{where}: expected an object, found {value!r}; write it as {{...}}")
    if origin is tuple and args and dataclasses.is_dataclass(args[0]):
        if not isinstance(value, list | tuple):
            raise error(f"{where}: expected a list, found {value!r}; write it as [...]")
        return tuple(_decode(args[0], v, f"{where}[{i}]", error) for i, v in enumerate(value))
    if origin is tuple and args[:1] in ((float,), (int,)) and isinstance(value, list):
        return tuple(_scalar(args[0], v, f"{where}[{i}]", error) for i, v in enumerate(value))
    if hint in (int, float, bool, str):
        return _scalar(hint, value, where, error)
    return value


def _with_fields(
    classes: list[Any], value: Mapping[str, Any], where: str, error: type[InputError]
) -> Any:
    """The class that has these fields and no others, else the first that has them."""
    fields = {cls: {field.name for field in dataclasses.fields(cls)} for cls in classes}
    holding = [cls for cls in classes if fields[cls] >= value.keys()]
    if not holding:
        known = "; ".join(", ".join(sorted(names)) for names in fields.values())
        raise error(f"{where}: nothing has the fields {', '.join(value)}; give those of: {known}")
    return next((cls for cls in holding if fields[cls] == value.keys()), holding[0])


def _scalar(hint: type, value: Any, where: str, error: type[InputError]) -> Any:
    kind = {int: numbers.Integral, float: numbers.Real}.get(hint, hint)
    if not isinstance(value, kind) or (hint is not bool and isinstance(value, bool)):
        raise error(f"{where}: expected {hint.__name__}, found {value!r}; give {_NAMED[hint]}")
    try:
        return hint(value)
    except OverflowError:
        raise error(f"{where}: found {value}; give a number that a float holds") from None


_NAMED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
