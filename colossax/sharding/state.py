"""Where an optimizer's state lies, of whatever sizes."""

import math
from collections.abc import Sequence

from jax.sharding import NamedSharding, PartitionSpec

from colossax.config import BoundPlan
from colossax.sharding.host import host_sharding
from colossax.sharding.rules import home, param_sharding
from colossax.typing import ParamInfo

_STAYS = 1024


def state_sharding(bound: BoundPlan, info: ParamInfo, shape: Sequence[int]) -> NamedSharding:
    """Sharding of an array that an optimizer keeps beside a parameter.

    One of the parameter's shape lies as the `optimizer` rules say. Of one with as many dims of
    other sizes (1, or a number for each block) each dim is split as the parameter's where that
    divides it; of any other nothing is. Less than a 1,024th of the parameter stays on the device.
    """
    like = param_sharding(bound, "optimizer", info)
    if tuple(shape) == info.shape:
        return like
    mesh = home(bound, info).mesh
    if len(shape) != len(info.shape):
        return NamedSharding(mesh, PartitionSpec())
    entries = [
        entry if size % math.prod(mesh.shape[axis] for axis in _names(entry)) == 0 else None
        for entry, size in zip(like.spec, shape, strict=True)
    ]
    spec = PartitionSpec(*entries)
    if like.memory_kind == "pinned_host" and math.prod(shape) * _STAYS >= math.prod(info.shape):
        return host_sharding(mesh, spec)
    return NamedSharding(mesh, spec)


def _names(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
