"""Rotary embeddings in a Hugging Face config.json: both ages of their settings, every scaling."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from colossax.config import Count, NotNegative, Positive
from colossax.errors import InputError
from colossax.models.settings import checked
from colossax.nn import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeScaling,
    YarnScaling,
)

_ORIGINAL = "original_max_position_embeddings"
_LONGEST = "max_position_embeddings"

ANY_SCALING = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Values of `rope_type` that can be read."""


def read_rope(
    settings: Mapping[str, Any],
    *,
    theta: float = 10_000.0,
    allowed: tuple[str, ...] = ANY_SCALING,
    partial: bool = False,
) -> dict[str, Any]:
    """Our `rope_theta` and `rope_scaling`, and `max_seq` where the scaling says it.

    Args:
        settings: Of config.json.
        theta: Where they name none.
        allowed: Values of `rope_type`.
        partial: Whether a part of a head may turn; `read_rope_dims` reads which.

    Raises:
        InputError: Another scaling, one that lacks a number, or part of a head turns.
    """
    rope = rope_settings(settings, theta=theta)
    kind = rope["rope_type"]
    if kind not in allowed:
        raise InputError(
            f"config.json: rope scaling '{kind}' is not supported;"
            f" only {' or '.join(map(repr, allowed))} is"
        )
    if not partial and _share(settings, rope, 1.0) != 1.0:
        raise InputError(
            "config.json: a partial_rotary_factor other than 1.0 is not supported;"
            " only models that rotate whole heads are"
        )
    scaling = None if kind == "default" else _READERS[kind](rope, settings)
    found = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    if isinstance(scaling, DynamicScaling):
        found["max_seq"] = int(scaling.factor * scaling.original_max_positions)
    return found


def plain_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our `rope_theta` of a family without scaling.

    Raises:
        InputError: The settings scale.
    """
    return {"rope_theta": read_rope(settings, allowed=("default",))["rope_theta"]}


def rope_settings(settings: Mapping[str, Any], *, theta: float = 10_000.0) -> dict[str, Any]:
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
    given = rope.get("rope_theta", settings.get("rope_theta", theta))
    checked_theta = checked("rope_theta", given, Positive)
    return {**rope, "rope_type": _rope_type(rope), "rope_theta": checked_theta}


def read_rope_dims(settings: Mapping[str, Any], head_dim: int, *, default: float = 1.0) -> int:
    """How many of a head's dims turn.

    Args:
        settings: Of config.json.
        head_dim: Dims of a head.
        default: Share of them, where the settings say none.

    Raises:
        InputError: The share is none.
    """
    share = _share(settings, rope_settings(settings), default)
    dims = int(head_dim * share)
    if not 0 < dims <= head_dim:
        raise InputError(
            f"config.json: 'partial_rotary_factor' is {share}, by which {dims} of {head_dim} dims"
            " turn; give a share above 0, at most 1"
        )
    return dims


def rope_share(dims: int, head_dim: int) -> float:
    """The share of a head's dims that `read_rope_dims` reads as so many."""
    share = dims / head_dim
    return share if int(head_dim * share) == dims else math.nextafter(share, math.inf)


def write_rope(
    theta: float, scaling: RopeScaling | None = None, *, share: float | None = None
) -> dict[str, Any]:
    """Rope settings in both forms, for readers of any age.

    Args:
        theta: Base of the frequencies.
        scaling: Or none.
        share: Of a head's dims that turn; None where the family has no place for one.
    """
    rope = {"rope_type": "default"} if scaling is None else _written(scaling)
    whole: dict[str, Any] = {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": theta},
    }
    if share is not None:
        whole["partial_rotary_factor"] = share
        whole["rope_parameters"]["partial_rotary_factor"] = share
    if isinstance(scaling, DynamicScaling):
        whole[_LONGEST] = scaling.original_max_positions
    if isinstance(scaling, LongScaling):
        whole[_ORIGINAL] = scaling.original_max_positions
    return whole


def _rope_object(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return checked(name, settings.get(name), dict | None) or {}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _share(settings: Mapping[str, Any], rope: Mapping[str, Any], default: float) -> float:
    said = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", default))
    return checked("partial_rotary_factor", said, Positive)


def _numbers(rope: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Those of a scaling that must be there."""
    missing = [name for name in names if rope.get(name) is None]
    if missing:
        raise InputError(
            f"config.json: rope scaling {rope['rope_type']} lacks '{missing[0]}'; add it"
        )
    return {name: checked(name, rope[name], Positive) for name in names}


def _original(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    said = settings.get(_ORIGINAL, rope.get(_ORIGINAL, settings.get(_LONGEST)))
    return checked(_ORIGINAL, said, Count)


def _read_linear(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> LinearScaling:
    return LinearScaling(**_numbers(rope, "factor"))


def _read_dynamic(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> DynamicScaling:
    longest = checked(_LONGEST, settings.get(_LONGEST), Count)
    return DynamicScaling(**_numbers(rope, "factor"), original_max_positions=longest)


def _read_llama3(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> Llama3Scaling:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    return Llama3Scaling(**_numbers(rope, *names), original_max_positions=_original(rope, settings))


_YARN = {
    "beta_fast": Positive,
    "beta_slow": Positive,
    "truncate": bool,
    "mscale": NotNegative,
    "mscale_all_dim": NotNegative,
    "attention_factor": Positive,
}


def _read_yarn(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> YarnScaling:
    return YarnScaling(
        factor=_numbers(rope, "factor")["factor"],
        original_max_positions=_original(rope, settings),
        **{
            name: checked(name, rope[name], hint)
            for name, hint in _YARN.items()
            if rope.get(name) is not None
        },
    )


def _read_long(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> LongScaling:
    lists = {}
    for name in ("short_factor", "long_factor"):
        found = checked(name, rope.get(name), list)
        lists[name.removesuffix("_factor")] = tuple(checked(name, x, Positive) for x in found)
    original = _original(rope, settings)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        longest = checked(_LONGEST, settings.get(_LONGEST), Count)
        factor = checked("factor", rope.get("factor") or longest / original, Positive)
        grown = math.log(factor) / math.log(original) if factor > 1 else 0.0
        magnitude = math.sqrt(1 + grown)
    magnitude = checked("attention_factor", magnitude, Positive)
    return LongScaling(**lists, original_max_positions=original, magnitude=magnitude)


_READERS: dict[str, Callable[..., RopeScaling]] = {
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_long,
}


def _written(scaling: RopeScaling) -> dict[str, Any]:
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, DynamicScaling):
        return {"rope_type": "dynamic", "factor": scaling.factor}
    if isinstance(scaling, YarnScaling):
        said = {name: getattr(scaling, name) for name in _YARN}
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            _ORIGINAL: scaling.original_max_positions,
            **{name: value for name, value in said.items() if value is False or value},
        }
    if isinstance(scaling, LongScaling):
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            "attention_factor": scaling.magnitude,
            _ORIGINAL: scaling.original_max_positions,
        }
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        _ORIGINAL: scaling.original_max_positions,
    }
