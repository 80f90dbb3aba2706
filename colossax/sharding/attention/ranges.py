"""What kernels need of a mask, computed before the layers that share it, under a plan."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from colossax.config import BoundPlan
from colossax.pallas import attention as local
from colossax.pallas.attention import Mask, Operands, PairDropout, Scoring
from colossax.sharding.attention.layout import (
    Split,
    local_kv_heads,
    names_of,
    specs_of,
    split_of,
    told_by_plan,
)
from colossax.sharding.context import current
from colossax.sharding.sequence import RingMasks, gathered_masks_local, ring_masks_local


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpreadRanges:
    """Ranges of every device's part of the batch and of a ring, as `Mask.ranges` of a whole mask.

    Attributes:
        parts: Ranges, each array with the devices along `axes` as its first dim.
        axes: Those that split the batch, then those of the ring.
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
    `colossax.pallas.attention.with_ranges`. Along a ring it carries the masks of all steps with
    their ranges (`RingMasks`), but under the scheme `self_attention`, which reads masks as they
    are, and beside a `RelativeBias`. Where rows must be filled up it carries nothing.

    Args:
        operands: As a layer will give them, unsharded; q, k and v may be shapes.
        scoring: As a layer will give it; arrays may be shapes.

    Raises:
        PlanError: As `attention`.

    Cost: that of one layer's ranges, on every device for its rows of the batch; no communication
    but what the mask's arrays need to be gathered along `ulysses` and a ring, then no more in each
    layer. A ring's masks of all steps take 16 to 50 bytes a token of a whole row.
    """
    bound = current()
    kernel = "auto" if bound is None else bound.plan.attention.kernel
    if bound is None or bound.single:
        with told_by_plan():
            return local.with_ranges(operands, scoring, implementation=kernel)
    operands = operands.replace(mask=operands.masked.changed())
    split = split_of(bound, operands, scoring)
    make = _maker(split, kernel)
    if split.ring is not None and scoring.relative:
        make = None
    if make is None or any(n % split.multiple for n in operands.lengths):
        return operands.masked
    specs, _ = specs_of(bound, operands, scoring, split)
    part, of_part = _of_one_device(bound, split, specs, operands, scoring)

    def island_local(mask: Mask) -> Any:
        with told_by_plan():
            return make(part.replace(mask=mask), of_part)

    axes = names_of(specs.q[0]) + split.ring_names
    made = jax.shard_map(
        island_local,
        mesh=bound.mesh,
        in_specs=(specs.mask,),
        out_specs=PartitionSpec(axes or None),
        check_vma=False,
    )
    mask = operands.masked
    parts = made(mask)
    return mask if parts is None else mask.changed(ranges=SpreadRanges(parts=parts, axes=axes))


_Maker = Callable[[Operands, Scoring], Any]

_OF_SCHEMES = {
    "zigzag": ring_masks_local,
    "ring": ring_masks_local,
    "all_gather": gathered_masks_local,
}


def _maker(split: Split, kernel: str) -> _Maker | None:
    """What makes the ranges of one device, with a dim of 1 in front; None where nothing does."""
    if split.ring is None:
        return functools.partial(_of_full_rows, kernel)
    of_scheme = _OF_SCHEMES.get(split.scheme)
    if of_scheme is None:
        return None

    def of_ring_local(part: Operands, scoring: Scoring) -> Any:
        turned = part.replace(mask=split.turned_local(part.masked))
        return of_scheme(split.settings(kernel), turned, scoring, ranges=True)

    return of_ring_local


def _of_full_rows(kernel: str, part: Operands, scoring: Scoring) -> Any:
    ranges = local.with_ranges(part, scoring, implementation=kernel).ranges
    return jax.tree.map(lambda x: x[None], ranges)


def device_ranges_local(mask: Mask) -> Mask:
    """The mask with this device's part of its ranges."""
    if mask.ranges is None:
        return mask
    parts = mask.ranges.parts
    if not isinstance(parts, RingMasks):  # of which each step takes its own
        parts = jax.tree.map(lambda x: jnp.squeeze(x, 0), parts)
    return mask.changed(ranges=parts)


def usable_ranges(mask: Mask, axes: tuple[str, ...]) -> Mask:
    """The mask, with its ranges if they are of devices along these axes."""
    ranges = mask.ranges
    fits = isinstance(ranges, SpreadRanges) and ranges.axes == axes
    return mask if fits else mask.changed()


def _of_one_device(
    bound: BoundPlan, split: Split, specs: Operands, operands: Operands, scoring: Scoring
) -> tuple[Operands, Scoring]:
    """Shapes of what one device will attend: all of a row, or a ring rank's part of it."""
    ranks = 1 if split.ring is None else split.ring.size
    b, _, n, _ = operands.q.shape
    k = operands.k.shape[2]
    rows = b // bound.size(names_of(specs.q[0]))
    heads = n // bound.size(names_of(specs.q[2]))
    split_alike = bool(specs.k[2]) or not specs.q[2]
    kv_heads = k // bound.size(names_of(specs.k[2])) if split_alike else local_kv_heads(n, k, heads)
    heads, kv_heads = heads // split.ulysses, math.lcm(split.ulysses, kv_heads) // split.ulysses

    def shape(x: Any, count: int) -> Any:
        return jax.ShapeDtypeStruct((rows, x.shape[1] // ranks, count, x.shape[3]), x.dtype)

    def of_heads(x: Any) -> Any:
        return None if x is None else jax.ShapeDtypeStruct((heads,), x.dtype)

    part = Operands(
        q=shape(operands.q, heads),
        k=shape(operands.k, kv_heads),
        v=shape(operands.v, kv_heads),
        mask=None,
    )
    slopes, sinks = of_heads(scoring.alibi_slopes), of_heads(scoring.sinks)
    dropout = scoring.dropout
    if dropout is not None:
        dropout = PairDropout.shaped(dropout.rate, (rows,), heads)
    return part, scoring.replace(alibi_slopes=slopes, sinks=sinks, biases=(), dropout=dropout)
