"""What a Hugging Face config.json says, read with care: types, bounds, layers of several kinds."""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from colossax.config import Natural
from colossax.config.bounds import split_hint
from colossax.errors import InputError

FILE = "config.json: "
"""Refusals begin with it."""

FULL, LOCAL = "full_attention", "sliding_attention"
"""Values of `layer_types`."""


def checked(name: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the type and within its bounds, integers taken for floats too.

    Raises:
        InputError: It is of another type, or out of bounds.
    """
    unions = (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if typing.get_origin(hint) in unions else (hint,)
    wanted = dict(split_hint(part) for part in parts)
    if type(value) is int and int not in wanted and float in wanted:
        value = float(value)
    if type(value) not in wanted:
        kinds = " or ".join("null" if kind is type(None) else kind.__name__ for kind in wanted)
        raise InputError(f"config.json: '{name}' is {value!r}; it must be {kinds}")
    bound = wanted[type(value)]
    if bound is not None:
        bound.check(value, f"config.json: '{name}'")
    return value


def first_eos(settings: Mapping[str, Any]) -> dict[str, int | None]:
    """Our `eos`: of several tokens that end a text, the first."""
    value = settings.get("eos_token_id")
    if isinstance(value, list):
        value = value[0] if value else None
    return {"eos": checked("eos_token_id", value, Natural | None)}


def every_full(name: str, full: list[bool], remedy: str, does: str = "see all keys") -> int:
    """Our `full_every`: of which so many-th layers those are that see all keys; 0: none does.

    Args:
        name: Of the setting that says so.
        full: Of each layer.
        remedy: What is supported.
        does: What they do.

    Raises:
        InputError: They are no each so many-th.
    """
    if not any(full):
        return 0
    every = full.index(True) + 1
    if full != [(at + 1) % every == 0 for at in range(len(full))]:
        first = [at for at, one in enumerate(full) if one][:5]
        raise InputError(
            f"config.json: {name} with layers {', '.join(map(str, first))} that {does} are"
            f" not supported; only {remedy} is"
        )
    return every


def per_layer(settings: Mapping[str, Any], name: str, known: tuple[Any, ...]) -> list | None:
    """A setting that has a value for each layer, or None where it is missing.

    Raises:
        InputError: It is no list of as many as layers, or holds another value than those known.
    """
    found = checked(name, settings.get(name), list | None)
    if not found:
        return None
    layers = settings.get("num_hidden_layers")
    if len(found) != layers:
        raise InputError(
            f"config.json: {name} has {len(found)} entries for {layers} layers; give one for each"
        )
    for value in found:
        if value not in known:
            raise InputError(
                f"config.json: {name} with {value!r} is not supported; only"
                f" {' or '.join(map(repr, known))} is"
            )
    return found


def write_kinds(full: Sequence[bool], other: str = LOCAL) -> list[str]:
    """The setting `layer_types` of layers of which some see all keys."""
    return [FULL if one else other for one in full]


def unsupported_window(settings: Mapping[str, Any]) -> None:
    """Refuse Qwen models that slide a window in some of their layers.

    Raises:
        InputError: They do.
    """
    kinds = checked("layer_types", settings.get("layer_types"), list | None)
    sliding = LOCAL in (kinds or ())
    if settings.get("use_sliding_window") or sliding:
        raise InputError(
            "config.json: a sliding window in some layers is not supported; only"
            " use_sliding_window = false with full attention in all layers is"
        )


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Their names and ours, the one that is written first."""


def read_activation(settings: Mapping[str, Any], name: str, default: str) -> str:
    """Our name of a family's activation.

    Raises:
        InputError: It is another.
    """
    found = checked(name, settings.get(name, default), str)
    if found not in _ACTIVATIONS:
        raise InputError(
            f"config.json: {name} = {found!r} is not supported; only"
            f" {' or '.join(map(repr, _ACTIVATIONS))} is"
        )
    return _ACTIVATIONS[found]


def write_activation(ours: str, usual: str = "") -> str:
    """Theirs of our name, the usual one where that is it."""
    if _ACTIVATIONS.get(usual) == ours:
        return usual
    return next(theirs for theirs, name in _ACTIVATIONS.items() if name == ours)
