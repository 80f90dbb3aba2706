"""How one call of attention lies on the mesh: what is split, and what each array's part is."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from colossax.config import RING_AXES, BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.pallas.attention import Operands, RelativeBias, Scoring
from colossax.pallas.padding import pad_to_multiple
from colossax.sharding.order import current_order
from colossax.sharding.rules import check_heads, resolve, seq_axes
from colossax.sharding.sequence import (
    Order,
    RingAxes,
    Settings,
    balanced_from_contiguous_local,
)


@contextlib.contextmanager
def told_by_plan() -> Iterator[None]:
    """Blames the plan for a kernel that declines."""
    try:
        yield
    except NotImplementedError as reason:
        raise PlanError(f"plan.attention.kernel: {reason}; use 'auto'") from reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How the sequence of one call is split, and who does what about it.

    Attributes:
        axes: All axes that split the sequence, outer first.
        ring: Those among them around which keys and values travel, with their sizes; or None.
        ulysses: Devices that exchange sequence for heads.
        scheme: One of the plan's, `auto` decided.
        zigzag: Whether rows lie in the balanced order while the ring turns.
        turned: Whether they must be brought into it and back.
    """

    axes: tuple[str, ...]
    ring: RingAxes | None
    ulysses: int
    scheme: str
    zigzag: bool
    turned: bool

    @property
    def multiple(self) -> int:
        """What the length of a row must be a multiple of."""
        ring = 1 if self.ring is None else self.ring.size
        return math.lcm((1 + self.zigzag) * ring, ring * self.ulysses)

    @property
    def ring_names(self) -> tuple[str, ...]:
        """Axes of the ring."""
        return () if self.ring is None else self.ring.circle.names

    def settings(self, kernel: str) -> Settings:
        """How the scheme runs, with this kernel; there is a ring."""
        assert self.ring is not None
        order = Order.ZIGZAG if self.zigzag else Order.CONTIGUOUS
        return Settings(axes=self.ring, order=str(order), implementation=kernel)

    def turned_local(self, tree: Any) -> Any:
        """Arrays `[b, s, ...]` of one device, in the order in which the ring turns."""
        if self.ring is None or not self.turned:
            return tree
        turn = functools.partial(balanced_from_contiguous_local, axes=self.ring)
        return jax.tree.map(turn, tree)


def split_of(bound: BoundPlan, operands: Operands, scoring: Scoring) -> Split:
    axes = seq_axes(bound)
    ring = _ring_axes(bound, [axis for axis in axes if axis in RING_AXES])
    ulysses = bound.mesh.shape[MeshAxis.ULYSSES] if MeshAxis.ULYSSES in axes else 1
    lies_zigzag = current_order().ranks > 1
    scheme = bound.plan.attention.scheme
    turned = False
    if ring is not None:
        _check_ring(bound, scoring)
        balanced = _balances(operands)
        if scheme == "zigzag" and not balanced:
            raise PlanError(
                "plan.attention.scheme: 'zigzag' balances causal attention of a row to itself, in"
                " the order of its tokens, and this call is not that; use 'auto' or 'ring'"
            )
        windowed = operands.masked.left is not None  # distant chunks then never meet
        wanted = scheme in ("zigzag", "all_gather") or (scheme == "auto" and not windowed)
        turned = wanted and balanced and not lies_zigzag
    if scheme == "auto":
        scheme = "zigzag" if lies_zigzag or turned else "ring"
    return Split(
        axes=axes,
        ring=ring,
        ulysses=ulysses,
        scheme=scheme,
        zigzag=ring is not None and (lies_zigzag or turned),
        turned=turned,
    )


def _ring_axes(bound: BoundPlan, used: Sequence[str]) -> RingAxes | None:
    if not used:
        return None
    *outer, inner = used
    return RingAxes(
        inner=inner,
        inner_size=bound.mesh.shape[inner],
        outer=outer[0] if outer else None,
        outer_size=bound.size(outer),
    )


def _balances(operands: Operands) -> bool:
    """Whether this is causal attention of rows to themselves by the order of their tokens."""
    mask, (s, t) = operands.masked, operands.lengths
    return mask.causal and mask.indexed and s == t


def _check_ring(bound: BoundPlan, scoring: Scoring) -> None:
    kernel = bound.plan.attention.kernel
    self_attention = bound.plan.attention.scheme == "self_attention"  # it computes its own scores
    if kernel not in ("auto", "xla") and (kernel != "mosaic" or self_attention):
        raise PlanError(
            f"plan.attention.kernel: '{kernel}' cannot compute a row in parts, which a ring of"
            f" devices needs; use 'auto', or split the sequence over 'ulysses'"
        )
    if scoring.arrays:
        raise PlanError(
            "attention: biases of all pairs of tokens cannot travel around a ring of devices;"
            " split the sequence over 'ulysses', or give alibi_slopes or a RelativeBias"
        )


def filled_up(operands: Operands, scoring: Scoring, split: Split) -> tuple[Operands, Scoring]:
    """Rows as long as the devices divide, the tokens added marked by segment -1."""
    s, t = operands.lengths
    if s % split.multiple == t % split.multiple == 0:
        return operands, scoring
    mask = operands.masked
    if mask.q_segments is None:
        one, other = (jnp.zeros((1, length), jnp.int32) for length in (s, t))
        mask = mask.changed(q_segments=one, kv_segments=other)
    fields = {
        name: _padded(getattr(mask, name), [1], split.multiple, **how)
        for name, how in _FILLED.items()
    }
    filled = {
        name: _padded(getattr(operands, name), [1], split.multiple) for name in ("q", "k", "v")
    }
    biases = tuple(
        x if isinstance(x, RelativeBias) else _padded(x, [2, 3], split.multiple)
        for x in scoring.biases
    )
    mask = mask.changed(ascending=operands.masked.ascends, **fields)
    return Operands(**filled, mask=mask), scoring.replace(biases=biases)


_FILLED: dict[str, dict[str, Any]] = {
    "q_positions": {"mode": "edge"},
    "kv_positions": {"mode": "edge"},
    "q_segments": {"constant_values": -1},
    "kv_segments": {"constant_values": -1},
    "kv_valid": {"constant_values": False},
}


def _padded(x: Any, axes: Sequence[int], multiple: int, **how: Any) -> Any:
    """An array that may not be there, its axes of more than 1 filled up."""
    if x is None:
        return None
    return pad_to_multiple(x, {axis: multiple for axis in axes if x.shape[axis] > 1}, **how)


def q_spec(bound: BoundPlan, operands: Operands) -> PartitionSpec:
    """How queries lie on the mesh: batch, sequence and heads."""
    dims = ("batch:inner", "seq", "heads", None)
    return resolve(bound, "activations", dims, operands.q.shape, name="attention q")


def specs_of(
    bound: BoundPlan, operands: Operands, scoring: Scoring, split: Split
) -> tuple[Operands, Scoring]:
    """How each array of the two values lies on the mesh."""
    kv_dims = ("batch:inner", "seq", "kv_heads", None)
    spec_of = {
        name: resolve(bound, "activations", kv_dims, x.shape, name=f"attention {name}")
        for name, x in (("k", operands.k), ("v", operands.v))
    }
    spec_of["q"] = q_spec(bound, operands)
    batch, heads = spec_of["q"][0], spec_of["q"][2]
    check_heads(bound, operands.q.shape[2], name="attention q")
    ring = split.ring_names or None

    def of_mask(x: Any) -> PartitionSpec:
        # Whole along ulysses, where every device comes to see all of the ring rank's tokens.
        rows = None if x.shape[0] == 1 else batch
        return PartitionSpec(rows, *[ring] * (x.ndim - 1))

    def of_bias(x: Any) -> Any:
        if isinstance(x, RelativeBias):
            return of_heads(x)
        by_dim = [batch, (*names_of(heads), *split.axes) or None, None, None]
        return PartitionSpec(*[None if n == 1 else s for n, s in zip(x.shape, by_dim, strict=True)])

    of_heads = functools.partial(jax.tree.map, lambda _: PartitionSpec(heads))
    of_dropout = scoring.dropout
    if of_dropout is not None:
        of_dropout = of_dropout.replace(words=PartitionSpec(batch), heads=PartitionSpec(heads))
    mask, ranges = operands.masked, operands.masked.ranges
    of_ranges = None if ranges is None else ranges.specs
    spec_of_mask = jax.tree.map(of_mask, mask.changed()).changed(ranges=of_ranges)
    return (
        Operands(**spec_of, mask=spec_of_mask),
        scoring.replace(
            biases=tuple(map(of_bias, scoring.biases)),
            alibi_slopes=of_heads(scoring.alibi_slopes),
            sinks=of_heads(scoring.sinks),
            dropout=of_dropout,
        ),
    )


def names_of(entry: Any) -> tuple[str, ...]:
    """Axes of one entry of a partition spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def local_kv_heads(heads: int, kv_heads: int, here: int) -> int:
    """Of replicated kv heads, how many serve a device with `here` of the query heads."""
    group = heads // kv_heads
    return max(1, here // group) if _aligned(group, here) else here


def _aligned(group: int, here: int) -> bool:
    """Whether the heads of a device are some whole groups, or part of one."""
    return here % group == 0 or group % here == 0


def select_kv_heads_local(
    bound: BoundPlan, heads_axes: str | tuple[str, ...], heads: int, kv_heads: int
) -> Callable[[Array], Array]:
    """Picks, of replicated kv heads `[..., k, h]`, those that this device's query heads read."""
    axes = names_of(heads_axes)
    here = heads // bound.size(axes)
    group = heads // kv_heads
    first = jax.lax.axis_index(axes) * here

    def select(x: Array) -> Array:
        dim = x.ndim - 2
        if _aligned(group, here):
            count = local_kv_heads(heads, kv_heads, here)
            return jax.lax.dynamic_slice_in_dim(x, first // group, count, axis=dim)
        # The groups of query heads do not line up with the devices: one kv head per query head.
        return jnp.take(x, (first + jnp.arange(here)) // group, axis=dim)

    return select
