"""Attention under a plan: a region manual over the whole mesh, its scheme chosen by the plan."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from colossax.config import RING_AXES, BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.pallas.attention import Mask, Operands, Scoring, attend
from colossax.pallas.padding import pad_to_multiple
from colossax.sharding.context import current
from colossax.sharding.order import current_order
from colossax.sharding.rules import check_heads, resolve, seq_axes
from colossax.sharding.sequence import (
    Order,
    RingAxes,
    Settings,
    balanced_from_contiguous_local,
    contiguous_from_balanced_local,
    gather_attention_local,
    ring_attention_local,
    ring_self_attention_local,
    ulysses_local,
)


def attention(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    biases: Sequence[Array] = (),
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " n"] | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact softmax attention; batch, heads and sequence split as the plan in force says.

    Arguments and result are those of `colossax.pallas.attention.attention`. Where there are fewer
    kv heads than devices on the heads' axes, every device holds them all and reads its own.

    Along `ulysses` the devices exchange sequence for heads before and after; along the ring axes
    keys and values travel as `plan.attention.scheme` says. Rows whose length the devices do not
    divide are filled up by tokens of segment -1. Outside of a step, where rows lie in their
    natural order, causal attention brings them into a balanced order and back.

    Cost: without a split sequence no communication forward; backward sums the gradient of
    replicated kv heads. With one, see `colossax.sharding.sequence`.

    Raises:
        PlanError: Heads or batch are not a multiple of their axes, or the scheme or kernel asked
            for cannot serve this call.
        ValueError: Shapes contradict one another.
    """
    bound = current()
    kernel = "auto" if bound is None else bound.plan.attention.kernel
    call = _Call(return_lse=return_lse, kernel=kernel)
    operands = Operands(q=q, k=k, v=v, mask=mask)
    scoring = Scoring.of(
        q, scale=scale, soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, biases=biases
    )
    if bound is None or bound.single:
        return _local(call, operands, scoring)
    split = _split(bound, operands, scoring)
    operands, scoring = _filled_up(operands, scoring, split)
    specs, of_scoring = _specs(bound, operands, scoring, split)
    out_spec: Any = specs.q
    if return_lse:
        out_spec = (out_spec, PartitionSpec(specs.q[0], specs.q[2], specs.q[1]))

    def island_local(local: Operands, scoring: Scoring) -> Any:
        heads = specs.q[2]
        if heads is not None and specs.k[2] is None:
            local = _own_kv_heads_local(bound, heads, q.shape[2], local)
        return _scheme_local(split, call, local, scoring)

    # Unchecked, gradients of operands that are whole on several devices are summed over those, and
    # the island can stand under `vmap` over devices, where the check fails on what it batches.
    mapped = jax.shard_map(
        island_local,
        mesh=bound.mesh,
        in_specs=(specs, of_scoring),
        out_specs=out_spec,
        check_vma=False,
    )
    found = mapped(operands, scoring)
    length = q.shape[1]
    if operands.lengths[0] == length:
        return found
    if return_lse:
        return found[0][:, :length], found[1][:, :, :length]
    return found[:, :length]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What is wanted of one call: also the log-partition, and the kernel of the plan."""

    return_lse: bool
    kernel: str


def _local(call: _Call, operands: Operands, scoring: Scoring) -> Any:
    with _told_by_plan():
        return attend(operands, scoring, return_lse=call.return_lse, implementation=call.kernel)


@contextlib.contextmanager
def _told_by_plan() -> Iterator[None]:
    """Blames the plan for a kernel that declines."""
    try:
        yield
    except NotImplementedError as reason:
        raise PlanError(f"plan.attention.kernel: {reason}; use 'auto'") from reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
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


def _split(bound: BoundPlan, operands: Operands, scoring: Scoring) -> _Split:
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
    return _Split(
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
    whole = bound.plan.attention.scheme == "self_attention"  # it computes its own scores
    if kernel not in ("auto", "xla") and (kernel != "mosaic" or whole):
        raise PlanError(
            f"plan.attention.kernel: '{kernel}' cannot compute a row in parts, which a ring of"
            f" devices needs; use 'auto', or split the sequence over 'ulysses'"
        )
    if scoring.biases:
        raise PlanError(
            "attention: biases of all pairs of tokens cannot travel around a ring of devices;"
            " split the sequence over 'ulysses', or give alibi_slopes"
        )


def _filled_up(operands: Operands, scoring: Scoring, split: _Split) -> tuple[Operands, Scoring]:
    """Rows as long as the devices divide, the tokens added marked by segment -1."""
    s, t = operands.lengths
    if s % split.multiple == t % split.multiple == 0:
        return operands, scoring
    mask = operands.masked
    if mask.q_segments is None:
        one, other = (jnp.zeros((1, length), jnp.int32) for length in (s, t))
        mask = dataclasses.replace(mask, q_segments=one, kv_segments=other)
    fields = {
        name: _padded(getattr(mask, name), [1], split.multiple, **how)
        for name, how in _FILLED.items()
    }
    filled = {
        name: _padded(getattr(operands, name), [1], split.multiple) for name in ("q", "k", "v")
    }
    biases = tuple(_padded(x, [2, 3], split.multiple) for x in scoring.biases)
    mask = dataclasses.replace(mask, ascending=operands.masked.ascends, **fields)
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


def _specs(
    bound: BoundPlan, operands: Operands, scoring: Scoring, split: _Split
) -> tuple[Operands, Scoring]:
    """How each array of the two values lies on the mesh."""
    q_dims = ("batch:inner", "seq", "heads", None)
    kv_dims = ("batch:inner", "seq", "kv_heads", None)
    spec_of = {
        name: resolve(bound, "activations", dims, x.shape, name=f"attention {name}")
        for name, dims, x in (
            ("q", q_dims, operands.q),
            ("k", kv_dims, operands.k),
            ("v", kv_dims, operands.v),
        )
    }
    batch, heads = spec_of["q"][0], spec_of["q"][2]
    check_heads(bound, operands.q.shape[2], name="attention q")
    ring = None if split.ring is None else split.ring.circle.names

    def of_mask(x: Any) -> PartitionSpec:
        # Whole along ulysses, where every device comes to see all of the ring rank's tokens.
        rows = None if x.shape[0] == 1 else batch
        return PartitionSpec(rows, *[ring] * (x.ndim - 1))

    def of_bias(x: Any) -> PartitionSpec:
        by_dim = [batch, (*_names(heads), *split.axes) or None, None, None]
        return PartitionSpec(*[None if n == 1 else s for n, s in zip(x.shape, by_dim, strict=True)])

    of_heads = functools.partial(jax.tree.map, lambda _: PartitionSpec(heads))
    return (
        Operands(**spec_of, mask=jax.tree.map(of_mask, operands.mask)),
        scoring.replace(
            biases=jax.tree.map(of_bias, scoring.biases),
            alibi_slopes=of_heads(scoring.alibi_slopes),
            sinks=of_heads(scoring.sinks),
        ),
    )


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _scheme_local(split: _Split, call: _Call, operands: Operands, scoring: Scoring) -> Any:
    """What one device does: exchange heads, then turn the ring, or either, or neither."""
    if not split.axes:
        return _local(call, operands, scoring)
    inner_local = _whole_local if split.ring is None else _ring_local
    out, lse = ulysses_local(
        functools.partial(inner_local, split, call),
        operands,
        scoring,
        axis=MeshAxis.ULYSSES.value,
        size=split.ulysses,
    )
    return (out, lse) if call.return_lse else out


def _whole_local(
    _split: _Split, call: _Call, operands: Operands, scoring: Scoring
) -> tuple[Array, Array]:
    """Attention of whole rows; where the log-partition is not asked for, zeros stand for it."""
    found, q = _local(call, operands, scoring), operands.q
    if call.return_lse:
        return found
    return found, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)


_SCHEMES: dict[str, Callable[[Operands, Scoring, Settings], tuple[Array, Array]]] = {
    "zigzag": ring_attention_local,
    "ring": ring_attention_local,
    "all_gather": gather_attention_local,
    "self_attention": ring_self_attention_local,
}


def _ring_local(
    split: _Split, call: _Call, operands: Operands, scoring: Scoring
) -> tuple[Array, Array]:
    """Attention of rows that are split over a ring."""
    assert split.ring is not None and not scoring.biases
    ring = split.ring
    if split.turned:
        turn = functools.partial(balanced_from_contiguous_local, axes=ring)
        operands = jax.tree.map(turn, operands)
    order = Order.ZIGZAG if split.zigzag else Order.CONTIGUOUS
    settings = Settings(axes=ring, order=str(order), implementation=call.kernel)
    with _told_by_plan():
        out, lse = _SCHEMES[split.scheme](operands, scoring, settings)
    if not split.turned:
        return out, lse
    back = functools.partial(contiguous_from_balanced_local, axes=ring)
    return back(out), back(lse, dim=2)


def _own_kv_heads_local(
    bound: BoundPlan, heads_axes: str | tuple[str, ...], heads: int, local: Operands
) -> Operands:
    """Of replicated kv heads, those that this device's query heads read."""
    axes = (heads_axes,) if isinstance(heads_axes, str) else heads_axes
    here = heads // bound.size(axes)
    kv_heads = local.k.shape[2]
    group = heads // kv_heads
    first = jax.lax.axis_index(axes) * here
    aligned = here % group == 0 or group % here == 0

    def own(x: Array) -> Array:
        if aligned:
            return jax.lax.dynamic_slice_in_dim(x, first // group, max(1, here // group), axis=2)
        # The groups of query heads do not line up with the devices: one kv head per query head.
        return jnp.take(x, (first + jnp.arange(here)) // group, axis=2)

    return local.replace(k=own(local.k), v=own(local.v))
