"""Weights of stages whose positions do not follow one another around the stages."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.sharding import param_sharding
from colossax.typing import ParamInfo

_STAGE = MeshAxis.STAGE.value


def in_order(order: np.ndarray) -> bool:
    """Whether each stage has the part that its number says; see `Routes.order`."""
    return bool((order == np.arange(order.shape[1])).all())


def to_their_stages(
    bound: BoundPlan, role: str, rows: tuple[Any, ...], infos: tuple[Any, ...], order: np.ndarray
) -> tuple[Any, ...]:
    """Weights or gradients from where the plan has them to the stages that use them, or back.

    Args:
        bound: Plan and devices.
        role: As which they lie.
        rows: Of each chunk, `[stages, layers of a stage, ...]`.
        infos: Likewise.
        order: Of each chunk, the part that a stage is to get.

    Cost: what a device has of a chunk is sent once, where any stage of it is to get another part.
    """

    def sent(chunk: int, x: Array, info: ParamInfo) -> Array:
        pairs = [(int(at), stage) for stage, at in enumerate(order[chunk])]
        spec = param_sharding(bound, role, info).spec
        spec = PartitionSpec(_STAGE, None, *tuple(spec)[1:])

        def local(x: Array) -> Array:
            return jax.lax.ppermute(x, _STAGE, pairs)

        return jax.shard_map(
            local, mesh=bound.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(x)

    def of_chunk(chunk: int) -> Any:
        if in_order(order[chunk : chunk + 1]):
            return rows[chunk]
        return jax.tree.map(lambda x, info: sent(chunk, x, info), rows[chunk], infos[chunk])

    return tuple(map(of_chunk, range(len(rows))))
