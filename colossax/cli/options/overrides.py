"""`--plan.mesh fsdp=4,tensor=2`: values of a frozen configuration, set from text.

Types come from the dataclasses' hints. A mapping is written `key=value,key=value` and replaces
the old one; `none` clears what may be None; items of a tuple are addressed by number.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from colossax.config import FrozenDict, Plan, Rules, nearest, preset, user_path
from colossax.documents import read_json
from colossax.errors import InputError
from colossax.tasks import TrainConfig

Override = tuple[str, str]
"""Dotted name without dashes in front, and the text of its value."""

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


def apply_overrides(config: Any, overrides: Sequence[Override]) -> Any:
    """`config` with every override put over it, `init`, `plan` and `plan.preset` before all others.

    `plan` is the path of a file, and takes the place of the whole plan.

    A checkpoint's model and what is said beside it need only fit together, not the recipe.

    Raises:
        InputError: An unknown name (with the nearest), or a value that does not fit.
    """
    fields: dict[str, Any] = {}
    for name, text in overrides:
        if name == "init" and isinstance(config, TrainConfig):
            fields = _initial(text)
        if name == "plan":
            config = dataclasses.replace(config, plan=plan_from_file(text))
    for name, text in overrides:
        if name == "plan.preset":
            config = dataclasses.replace(config, plan=with_preset(config.plan, text))
    return _apply(
        config,
        [
            _Change(path=tuple(name.split(".")), text=text, name=name)
            for name, text in overrides
            if name not in ("init", "plan", "plan.preset")
        ],
        fields,
    )


def _initial(text: str) -> dict[str, Any]:
    """What `--init` says of a run on text: where it starts, and so its model and its adapter."""
    if text.lower() == "none":
        return {"init": None}
    from colossax.tasks import initial_adapter, initial_model  # they read checkpoints, with JAX

    path = str(user_path(text, "--init"))
    fields: dict[str, Any] = {"init": path, "model": initial_model(path)}
    adapter = initial_adapter(path)
    return fields if adapter is None else {**fields, "adapter": adapter}


def plan_from_file(text: str) -> Plan:
    """The plan in a file, as `colossax plan --out` and `Plan.to_json` write it.

    Raises:
        InputError: There is none that can be read.
    """
    path = user_path(text, "--plan")
    remedy = (
        "--plan: give a plan that colossax plan --out wrote, or a value of it by its name, as"
        " --plan.mesh fsdp=8"
    )
    return Plan.from_json(read_json(path, remedy=remedy))


def with_preset(plan: Plan, name: str) -> Plan:
    """The plan with mesh and rules of a preset; precision, remat and the like stay."""
    chosen = preset(name)
    batch = dataclasses.replace(plan.batch, reduce_once=chosen.batch.reduce_once)
    return plan.replace(mesh=chosen.mesh, rules=chosen.rules, batch=batch)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Change:
    """One override on its way down: what is left of its path, and its whole name for messages."""

    path: tuple[str, ...]
    text: str
    name: str

    @property
    def key(self) -> str:
        """Next step of the path."""
        return self.path[0].replace("-", "_")

    def below(self) -> "_Change":
        """The same change, one level down."""
        return dataclasses.replace(self, path=self.path[1:])


def _apply(owner: Any, changes: Sequence[_Change], fields: Mapping[str, Any] | None = None) -> Any:
    """A dataclass with all changes made at once, so that only the result has to be valid.

    Args:
        owner: The dataclass.
        changes: Of fields of it, or below.
        fields: Values that changes override.
    """
    new: dict[str, Any] = dict(fields or {})
    below: dict[str, list[_Change]] = {}
    texts: dict[str, Mapping[str, Any]] = {}
    for change in changes:
        if isinstance(owner, Plan) and change.path == ("remat",):
            remat = change.text
            new["segments"] = tuple(dataclasses.replace(s, remat=remat) for s in owner.segments)
        elif (base := _from_text(owner, change)) is not None:
            texts[change.key] = base
            below.setdefault(change.key, [])
        elif _is_leaf(owner, change):
            new[change.key] = parse(_hint(owner, change.key), change.text, f"--{change.name}")
        else:
            below.setdefault(change.key, []).append(change.below())
    for key, deeper in below.items():
        value = new.get(key, getattr(owner, key))
        base = texts.get(key)
        new[key] = _applier(value)(value, deeper) if base is None else _apply(value, deeper, base)
    return dataclasses.replace(owner, **new)


def _from_text(owner: Any, change: _Change) -> Mapping[str, Any] | None:
    """Fields of a nested configuration that has a text form of its own, else None."""
    value = getattr(owner, change.key, None)
    if len(change.path) != 1 or not hasattr(value, "fields_from_text"):
        return None
    return value.fields_from_text(change.text)


def _applier(value: Any) -> Callable[[Any, Sequence[_Change]], Any]:
    if isinstance(value, tuple):
        return _apply_items
    return _apply_rules if isinstance(value, Rules) else _apply


def _is_leaf(owner: Any, change: _Change) -> bool:
    """Whether a change ends at a field of `owner`; refuses what leads nowhere."""
    if change.key not in (f.name for f in dataclasses.fields(owner)):
        raise InputError(f"unknown override --{change.name}{_nearest(owner, change)}")
    nested, ends = _has_fields(getattr(owner, change.key)), len(change.path) == 1
    if not nested and not ends:
        raise InputError(
            f"unknown override --{change.name}; '{change.key}' has no fields of its own"
        )
    if nested and ends:
        raise InputError(
            f"--{change.name}: has fields of its own; set one of them, as in --{change.name}.FIELD"
        )
    return ends


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or (
        isinstance(value, tuple) and bool(value) and dataclasses.is_dataclass(value[0])
    )


def _hint(owner: Any, key: str) -> Any:
    if isinstance(owner, Plan) and key == "mesh":
        return Mapping[str, int]
    return typing.get_type_hints(type(owner))[key]


def _nearest(owner: Any, change: _Change) -> str:
    fields = [f.name for f in dataclasses.fields(owner)]
    fields += ["preset", "remat"] if isinstance(owner, Plan) else []
    before = change.name.removesuffix(".".join(change.path))
    return nearest(f"--{before}{change.path[0]}", [f"--{before}{field}" for field in fields])


def _apply_items(owner: tuple, changes: Sequence[_Change]) -> tuple:
    """A tuple with items changed; the number after the last adds a copy of the last."""
    items = list(owner)
    by_index: dict[str, list[_Change]] = {}
    for change in changes:
        by_index.setdefault(change.path[0], []).append(change)
    for index, item_changes in sorted(by_index.items()):
        if not index.isdigit() or int(index) > len(items) or len(item_changes[0].path) < 2:
            raise InputError(
                f"unknown override --{item_changes[0].name}; items are numbered 0 to {len(items)}"
                f" (the last adds one), as in --plan.segments.0.remat"
            )
        at = int(index)
        items += [items[-1]] if at == len(items) else []
        items[at] = _apply(items[at], [change.below() for change in item_changes])
    return tuple(items)


def _apply_rules(owner: Rules, changes: Sequence[_Change]) -> Rules:
    roles = [f.name for f in dataclasses.fields(owner)]
    updates: dict[str, dict[str, Any]] = {}
    for change in changes:
        role = change.path[0]
        if role not in roles:
            raise InputError(f"unknown override --{change.name}{nearest(role, roles)}")
        if len(change.path) != 2:
            raise InputError(
                f"--{change.name}: name a dim too, as in --plan.rules.{role}.embed fsdp"
            )
        updates.setdefault(role, {})[change.path[1]] = parse_rule(change.text)
    return owner.updated(**updates)


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
        inner = [a for a in args if a is not type(None)]
        one = len(inner) == 1 or all(map(dataclasses.is_dataclass, inner))
        return parse(inner[0], text, where) if one else parse_plain(text)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _parse_mapping(args[1] if len(args) == 2 else Any, text, where)
    if dataclasses.is_dataclass(hint):
        raise InputError(
            f"{where}: has fields of its own and cannot be set from here; use a recipe"
        )
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
            raise InputError(
                f"{where}: found '{item}'; write it as name=value,name=value, each with a number"
            )
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
