"""What a Hugging Face config.json says, read with care: types, bounds, rotary embeddings."""

import types
import typing
from collections.abc import Mapping
from typing import Any

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.config.bounds import split_hint
from colossax.errors import InputError
from colossax.nn import Llama3Scaling, YarnScaling

FILE = "config.json: "
"""Refusals begin with it."""

_ORIGINAL = "original_max_position_embeddings"


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


def rope_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings, `rope_type` and `rope_theta` among them, from either form of config.json.

    Newer files hold one `rope_parameters`, older ones `rope_theta` and `rope_scaling`.

    Raises:
        InputError: One of them is no object, or they name two scalings.
    """
    newer, older = (_rope_object(settings, name) for name in ("rope_parameters", "rope_scaling"))
    if newer and older and _rope_type(newer) != _rope_type(older):
        raise InputError(
            f"config.json: rope_parameters name the scaling {_rope_type(newer)!r} and rope_scaling"
            f" {_rope_type(older)!r}; keep the one the model was trained with"
        )
    rope = newer or older
    theta = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    checked_theta = checked("rope_theta", theta, Positive)
    return {**rope, "rope_type": _rope_type(rope), "rope_theta": checked_theta}


def _rope_object(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return checked(name, settings.get(name), dict | None) or {}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def plain_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our `rope_theta` of a family without scaling.

    Raises:
        InputError: The settings scale.
    """
    rope = rope_settings(settings)
    _allow_rope(rope, ("default",))
    return {"rope_theta": rope["rope_theta"]}


def llama_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our `rope_theta` and `rope_scaling` of Llama.

    Raises:
        InputError: Another scaling than Llama 3's.
    """
    rope = rope_settings(settings)
    _allow_rope(rope, ("default", "llama3"))
    if rope["rope_type"] == "default":
        return {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    longest = settings.get("max_position_embeddings")
    original = rope.get(_ORIGINAL, longest)
    names = ("factor", "low_freq_factor", "high_freq_factor")
    missing = [name for name in names if name not in rope]
    if missing:
        raise InputError(f"config.json: rope scaling llama3 lacks '{missing[0]}'; add it")
    scaling = Llama3Scaling(
        **{name: checked(name, rope[name], Positive) for name in names},
        original_max_positions=checked(_ORIGINAL, original, Count),
    )
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


_YARN = {
    "beta_fast": Positive,
    "beta_slow": Positive,
    "truncate": bool,
    "mscale": NotNegative,
    "mscale_all_dim": NotNegative,
    "attention_factor": Positive,
}


def yarn_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our `rope_theta` and `rope_scaling` of a family that may have YaRN's.

    Raises:
        InputError: Another scaling.
    """
    rope = rope_settings(settings)
    _allow_rope(rope, ("default", "yarn"))
    if rope["rope_type"] == "default":
        return {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if rope.get("factor") is None:
        raise InputError("config.json: rope scaling yarn lacks 'factor'; add it")
    original = rope.get(_ORIGINAL, settings.get("max_position_embeddings"))
    scaling = YarnScaling(
        factor=checked("factor", rope["factor"], Positive),
        original_max_positions=checked(_ORIGINAL, original, Count),
        **{
            name: checked(name, rope[name], hint)
            for name, hint in _YARN.items()
            if rope.get(name) is not None
        },
    )
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def _yarn_settings(scaling: YarnScaling) -> dict[str, Any]:
    said = {name: getattr(scaling, name) for name in _YARN}
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        _ORIGINAL: scaling.original_max_positions,
        **{name: value for name, value in said.items() if value is False or value},
    }


def every_full(name: str, full: list[bool], remedy: str) -> int:
    """Our `full_every`: of which so many-th layers those are that see all keys; 0: none does.

    Args:
        name: Of the setting that says so.
        full: Of each layer.
        remedy: What is supported.

    Raises:
        InputError: They are no each so many-th.
    """
    if not any(full):
        return 0
    every = full.index(True) + 1
    if full != [(at + 1) % every == 0 for at in range(len(full))]:
        first = [at for at, one in enumerate(full) if one][:5]
        raise InputError(
            f"config.json: {name} with layers {', '.join(map(str, first))} that see all keys are"
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


def _allow_rope(rope: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    if rope["rope_type"] not in allowed:
        raise InputError(
            f"config.json: rope scaling '{rope['rope_type']}' is not supported;"
            f" only {' or '.join(map(repr, allowed))} is"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            "config.json: a partial_rotary_factor other than 1.0 is not supported;"
            " only models that rotate whole heads are"
        )


def rope_to_settings(
    theta: float, scaling: Llama3Scaling | YarnScaling | None = None
) -> dict[str, Any]:
    """Rope settings in both forms, for readers of any age."""
    if scaling is None:
        rope: dict[str, Any] = {"rope_type": "default"}
    elif isinstance(scaling, YarnScaling):
        rope = _yarn_settings(scaling)
    else:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            _ORIGINAL: scaling.original_max_positions,
        }
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": theta},
    }


def unsupported_window(settings: Mapping[str, Any]) -> None:
    """Refuse Qwen models that slide a window in some of their layers.

    Raises:
        InputError: They do.
    """
    kinds = checked("layer_types", settings.get("layer_types"), list | None)
    sliding = "sliding_attention" in (kinds or ())
    if settings.get("use_sliding_window") or sliding:
        raise InputError(
            "config.json: a sliding window in some layers is not supported; only"
            " use_sliding_window = false with full attention in all layers is"
        )
