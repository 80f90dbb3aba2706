"""What kernels need of a mask, computed before the layers that share it, under a plan."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from colossax.config import BoundPlan
from colossax.pallas import attention as local
from colossax.pallas.attention import Mask, Operands, Scoring
from colossax.sharding.attention_layout import (
    Split,
    local_kv_heads,
    names_of,
    specs_of,
    split_of,
    told_by_plan,
)
from colossax.sharding.context import current


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpreadRanges:
    """Ranges of every device's rows of the batch, as `Mask.ranges` of the whole mask.

    Attributes:
        parts: Ranges, each array with the devices along `axes` as its first dim.
        axes: Those that split the batch.
    """

    parts: Any
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def specs(self) -> "SpreadRanges":
        """How they lie on the mesh."""
        spec = PartitionSpec(self.axes or None)
        return dataclasses.replace(self, parts=jax.tree.map(lambda _: spec, self.parts))


def with_ranges(operands: Operands, scoring: Scoring) -> Mask:
    """The mask of `operands`, carrying what `attention` of them would compute of it alone.

    A model calls it where it makes the mask that its layers share; see
    `colossax.pallas.attention.with_ranges`. Where a ring splits the sequence, and where rows must
    be filled up, a mask carries nothing: each step of a ring sees other keys.

    Args:
        operands: As a layer will give them, unsharded; q, k and v may be shapes.
        scoring: As a layer will give it; arrays may be shapes.

    Raises:
        PlanError: As `attention`.

    Cost: that of one layer's ranges, on every device for its rows of the batch; no communication
    but what the mask's arrays need to be gathered along `ulysses`, then no more in each layer.
    """
    bound = current()
    kernel = "auto" if bound is None else bound.plan.attention.kernel
    if bound is None or bound.single:
        with told_by_plan():
            return local.with_ranges(operands, scoring, implementation=kernel)
    split = split_of(bound, operands, scoring)
    if split.ring is not None or any(n % split.multiple for n in operands.lengths):
        return operands.masked
    specs, _ = specs_of(bound, operands, scoring, split)
    part, of_part = _of_one_device(bound, split, specs, operands, scoring)

    def island_local(mask: Mask) -> Any:
        here = part.replace(mask=mask)
        with told_by_plan():
            local_mask = local.with_ranges(here, of_part, implementation=kernel)
        return jax.tree.map(lambda x: x[None], local_mask.ranges)

    axes = names_of(specs.q[0])
    made = jax.shard_map(
        island_local,
        mesh=bound.mesh,
        in_specs=(specs.mask,),
        out_specs=PartitionSpec(axes or None),
        check_vma=False,
    )
    mask = operands.masked.changed()
    parts = made(mask)
    return mask if parts is None else mask.changed(ranges=SpreadRanges(parts=parts, axes=axes))


def device_ranges_local(mask: Mask) -> Mask:
    """The mask with this device's part of its ranges."""
    if mask.ranges is None:
        return mask
    return mask.changed(ranges=jax.tree.map(lambda x: jnp.squeeze(x, 0), mask.ranges.parts))


def usable_ranges(mask: Mask, split: Split, axes: tuple[str, ...]) -> Mask:
    """The mask, with its ranges if they are those of devices that split the batch as here."""
    ranges = mask.ranges
    fits = isinstance(ranges, SpreadRanges) and ranges.axes == axes and split.ring is None
    return mask if fits else mask.changed()


def _of_one_device(
    bound: BoundPlan, split: Split, specs: Operands, operands: Operands, scoring: Scoring
) -> tuple[Operands, Scoring]:
    """Shapes of what one device will attend, its sequence unsharded."""
    b, _, n, _ = operands.q.shape
    k = operands.k.shape[2]
    rows = b // bound.size(names_of(specs.q[0]))
    heads = n // bound.size(names_of(specs.q[2]))
    split_alike = bool(specs.k[2]) or not specs.q[2]
    kv_heads = k // bound.size(names_of(specs.k[2])) if split_alike else local_kv_heads(n, k, heads)
    heads, kv_heads = heads // split.ulysses, math.lcm(split.ulysses, kv_heads) // split.ulysses

    def shape(x: Any, count: int) -> Any:
        return jax.ShapeDtypeStruct((rows, x.shape[1], count, x.shape[3]), x.dtype)

    def of_heads(x: Any) -> Any:
        return None if x is None else jax.ShapeDtypeStruct((heads,), x.dtype)

    part = Operands(
        q=shape(operands.q, heads),
        k=shape(operands.k, kv_heads),
        v=shape(operands.v, kv_heads),
        mask=None,
    )
    slopes, sinks = of_heads(scoring.alibi_slopes), of_heads(scoring.sinks)
    return part, scoring.replace(alibi_slopes=slopes, sinks=sinks, biases=())
