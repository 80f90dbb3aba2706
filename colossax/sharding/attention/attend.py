"""Attention under a plan: a region manual over the whole mesh, its scheme chosen by the plan."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from colossax.config import MeshAxis
from colossax.pallas.attention import (
    Mask,
    Operands,
    PairDropout,
    RelativeBias,
    Scoring,
    attend,
)
from colossax.sharding.attention.layout import (
    Split,
    filled_up,
    names_of,
    q_spec,
    select_kv_heads_local,
    specs_of,
    split_of,
    told_by_plan,
)
from colossax.sharding.attention.ranges import device_ranges_local, usable_ranges
from colossax.sharding.context import current
from colossax.sharding.sequence import (
    Settings,
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
    biases: Sequence[Array | RelativeBias] = (),
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " n"] | None = None,
    dropout: PairDropout | None = None,
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
        q,
        scale=scale,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        biases=biases,
        dropout=dropout,
    )
    if bound is None or bound.single:
        return _local(call, operands, scoring)
    split = split_of(bound, operands, scoring)
    operands, scoring = filled_up(operands, scoring, split)
    axes = names_of(q_spec(bound, operands)[0]) + split.ring_names
    operands = operands.replace(mask=usable_ranges(operands.masked, axes))
    specs, of_scoring = specs_of(bound, operands, scoring, split)
    out_spec: Any = specs.q
    if return_lse:
        out_spec = (out_spec, PartitionSpec(specs.q[0], specs.q[2], specs.q[1]))

    def island_local(local: Operands, scoring: Scoring) -> Any:
        local, heads = local.replace(mask=device_ranges_local(local.masked)), specs.q[2]
        if heads is not None and specs.k[2] is None:
            select = select_kv_heads_local(bound, heads, q.shape[2], local.k.shape[2])
            local = local.replace(k=select(local.k), v=select(local.v))
        return _scheme_local(split, call, local, scoring)

    # Unchecked, gradients of operands replicated on several devices are summed over those, and
    # the island can stand under `vmap` over devices, where the check fails on what it batches.
    mapped = jax.shard_map(
        island_local,
        mesh=bound.mesh,
        in_specs=(specs, of_scoring),
        out_specs=out_spec,
        check_vma=False,
    )
    result = mapped(operands, scoring)
    length = q.shape[1]
    if operands.lengths[0] == length:
        return result
    if return_lse:
        return result[0][:, :length], result[1][:, :, :length]
    return result[:, :length]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What is wanted of one call: also the log-partition, and the kernel of the plan."""

    return_lse: bool
    kernel: str


def _local(call: _Call, operands: Operands, scoring: Scoring) -> Any:
    with told_by_plan():
        return attend(operands, scoring, return_lse=call.return_lse, implementation=call.kernel)


def _scheme_local(split: Split, call: _Call, operands: Operands, scoring: Scoring) -> Any:
    """What one device does: exchange heads, then turn the ring, or either, or neither."""
    if not split.axes:
        return _local(call, operands, scoring)
    inner_local = _full_rows_local if split.ring is None else _ring_local
    out, lse = ulysses_local(
        functools.partial(inner_local, split, call),
        operands,
        scoring,
        axis=MeshAxis.ULYSSES.value,
        size=split.ulysses,
    )
    return (out, lse) if call.return_lse else out


def _full_rows_local(
    _split: Split, call: _Call, operands: Operands, scoring: Scoring
) -> tuple[Array, Array]:
    """Attention of whole rows; where the log-partition is not asked for, zeros stand for it."""
    result, q = _local(call, operands, scoring), operands.q
    if call.return_lse:
        return result
    return result, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)


_SCHEMES: dict[str, Callable[[Operands, Scoring, Settings], tuple[Array, Array]]] = {
    "zigzag": ring_attention_local,
    "ring": ring_attention_local,
    "all_gather": gather_attention_local,
    "self_attention": ring_self_attention_local,
}


def _ring_local(
    split: Split, call: _Call, operands: Operands, scoring: Scoring
) -> tuple[Array, Array]:
    """Attention of rows that are split over a ring."""
    assert split.ring is not None and not scoring.arrays
    ranges = operands.masked.ranges  # of the order in which the ring turns
    turned = split.turned_local(operands.replace(mask=operands.masked.changed()))
    operands = turned.replace(mask=turned.masked.changed(ranges=ranges))
    settings = split.settings(call.kernel)
    with told_by_plan():
        out, lse = _SCHEMES[split.scheme](operands, scoring, settings)
    if not split.turned:
        return out, lse
    back = functools.partial(contiguous_from_balanced_local, axes=split.ring)
    return back(out), back(lse, dim=2)
