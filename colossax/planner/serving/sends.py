"""What a device sends in a step of an engine, by formula.

Weights stay where they are at rest, and tokens, which are few, go to them: what splits a matrix's
inputs sums its products, what splits its outputs over `embed` gathers them. In a ring of n devices
each sends `(n - 1) / n` of what is gathered, and twice that of what is summed for all.
"""

import math
from collections.abc import Iterator

from colossax.config import RING_AXES
from colossax.planner.searching.parts import Parts
from colossax.planner.searching.sent import Sent
from colossax.planner.serving.served import ServedProfile
from colossax.typing import ParamInfo

_WIDE = ("embed", "expert_embed")
_INSIDE = (*_WIDE, "q_latent", "kv_latent")
_CODES = ("codes", "values")
_GATHERS = 2
"""Of what comes out of a matrix in parts of `embed`: for what is added to it, and for the norm."""

_FEW = 6
"""Collectives of a few numbers, by which devices that share a vocabulary agree on a token."""


def is_matrix(info: ParamInfo) -> bool:
    """Whether tokens are multiplied by a parameter: no vector, and of codes not what scales them.

    A table that is nothing but looked up is none.
    """
    plain = [str(dim).split(":")[0] for dim in info.dims if dim not in ("layers", "experts")]
    coded = info.quantised is None or info.quantised.name in _CODES
    return coded and len(plain) > 1 and bool(set(plain) & set(_INSIDE)) and not is_table(info)


def is_table(info: ParamInfo) -> bool:
    """Whether rows of it are looked up and nothing is multiplied by it."""
    return info.dims[-1:] == ("embed:table",) or info.dims[:1] == ("positions",)


def layers_sent(profile: ServedProfile, parts: Parts, tokens: int, itemsize: int) -> list[Sent]:
    """Of all layers.

    Args:
        profile: The model.
        parts: Of one stage of one replica.
        tokens: Of the step.
        itemsize: Bytes of a number in the compute dtype.
    """
    infos = [info for info in profile.infos if info.layer_count and is_matrix(info)]
    found = [one for info in infos for one in _of_matrix(profile, parts, info, tokens, itemsize)]
    ring = tuple(axis for axis in RING_AXES if parts.bound.mesh.shape[axis] > 1)
    heads = parts.axes("activations", ("heads",), (profile.config.heads,))
    seen = 4 * tokens * profile.config.heads * profile.config.head_dim / parts.size(heads)
    return found + _summed(parts, ring, seen, 2 * profile.config.layers)


def table_sent(parts: Parts, info: ParamInfo, tokens: int, itemsize: int) -> list[Sent]:
    """Of rows that are looked up in a table, `[vocab, embed]`."""
    rows = parts.axes("params", info.dims[:1], info.shape[:1])
    width = _others(parts, info, rows)
    size = float(tokens * info.shape[1] * itemsize)
    return _summed(parts, rows, size / parts.size(width), 1) + _gathered(parts, width, size, 1)


def head_sent(parts: Parts, info: ParamInfo, tokens: int, itemsize: int) -> list[Sent]:
    """Of logits, which each device has whole when the next token is chosen."""
    vocab = info.shape[info.dims.index("vocab")]
    split = parts.axes("params", ("vocab",), (vocab,))
    own = tokens * vocab * itemsize / parts.size(split)
    summed = _summed(parts, _others(parts, info, split), own, 1)
    few = [Sent("all-reduce", split, 0.0, _FEW, False)] if parts.size(split) > 1 else []
    return summed + _gathered(parts, split, 4.0 * tokens * vocab, _GATHERS) + few


def _of_matrix(
    profile: ServedProfile, parts: Parts, info: ParamInfo, tokens: int, itemsize: int
) -> Iterator[Sent]:
    """Of all layers that have it."""
    first, count = int(info.stacked), max(1, info.layer_count)
    dims, shape = info.dims[first:], info.shape[first:]
    apart = dims[0] == "experts"
    out = dims[-1] in _WIDE
    inputs = len(dims) - 1 if out else 1 + apart
    of_inputs = parts.axes("params", dims[:inputs], shape[:inputs])
    width = float(tokens * math.prod(shape[inputs:]) * itemsize)
    others = _others(parts, info, of_inputs)
    if apart and not out:  # each device has its own experts, and the tokens that chose them
        experts = parts.axes("params", dims[:1], shape[:1])
        of_inputs = tuple(axis for axis in of_inputs if axis not in experts)
        width *= profile.choices / parts.size(experts)
    yield from _summed(parts, of_inputs, width / parts.size(others), count)
    if out:
        yield from _gathered(parts, others, width, _GATHERS * count)


def _others(parts: Parts, info: ParamInfo, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes that split a parameter beside these."""
    every = parts.axes("params", info.dims, info.shape)
    return tuple(axis for axis in every if axis not in axes)


def _summed(parts: Parts, axes: tuple[str, ...], size: float, times: int) -> list[Sent]:
    n = parts.size(axes)
    return [Sent("all-reduce", axes, 2 * times * (n - 1) / n * size, times, False)] if n > 1 else []


def _gathered(parts: Parts, axes: tuple[str, ...], size: float, times: int) -> list[Sent]:
    n = parts.size(axes)
    return [Sent("all-gather", axes, times * (n - 1) / n * size, times, False)] if n > 1 else []
