"""Of a model's layers what may live in host memory, and its bytes on a mesh."""

import math

from colossax.optim import decays
from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.parts import Parts
from colossax.typing import ParamInfo


def moves(info: ParamInfo) -> bool:
    """Whether it may live in host memory: a layer's matrices may, its vectors do not."""
    return info.total_layers is not None and decays(info.named_dims)


def at_rest(profile: ModelProfile, parts: Parts, at: int) -> float:
    """Bytes of a device's part of a parameter, of all its layers."""
    info = profile.infos[at]
    wide = info.at_rest(parts.bound.plan.precision.params).itemsize
    return wide * _numbers(info) / parts.size(parts.axes("params", info.dims, info.shape))


def moments(profile: ModelProfile, parts: Parts, at: int) -> float:
    """Likewise of its optimizer state."""
    info = profile.infos[at]
    split = parts.axes("optimizer", info.dims, info.shape)
    return profile.moments[at] * _numbers(info) / parts.size(split)


def gradient(profile: ModelProfile, parts: Parts, at: int, wide: float) -> float:
    """Likewise of its gradient, of so many bytes a number; 0 where it does not learn."""
    info = profile.infos[at]
    own = parts.size(parts.axes("gradients", info.dims, info.shape))
    return profile.learns[at] * wide * _numbers(info) / own


def updated(profile: ModelProfile, parts: Parts, wide: float) -> float:
    """Bytes of all that is updated of the largest layer, with gradients of so many bytes a
    number."""

    def of(at: int) -> float:
        own = at_rest(profile, parts, at) + moments(profile, parts, at)
        return (own + gradient(profile, parts, at, wide)) / profile.infos[at].shape[0]

    return max((sum(map(of, kind.leaves)) for kind in profile.kinds), default=0.0)


def _numbers(info: ParamInfo) -> int:
    return math.prod(info.shape)
