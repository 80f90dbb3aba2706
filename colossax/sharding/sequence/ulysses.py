"""Ulysses: an exchange that splits heads instead of the sequence, around any local attention."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.errors import PlanError
from colossax.pallas.attention import Operands, RelativeBias, Scoring

from .axes import Packing


def ulysses_local(
    inner: Callable[[Operands, Scoring], tuple[Array, Array]],
    operands: Operands,
    scoring: Scoring,
    *,
    axis: str,
    size: int,
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """`inner` on all tokens along one axis of `size` = u devices, and 1 / u of the heads.

    Around `ring_attention_local` this is USP: the ranks of the ring hold what the devices of the
    Ulysses axis hold together. Kv heads that u does not divide are repeated first, to the least
    common multiple.

    Args:
        inner: Called with operands and scoring of some heads, gives output and log-partition.
        operands: Of 1 / u of the tokens, all heads of this tensor shard; but the mask is that of
            all tokens along this axis.
        scoring: Slopes, sinks, relative biases and dropout of the heads of q; other biases of those
            heads that this device will have.
        axis: Mesh axis.
        size: Devices along it.

    Raises:
        PlanError: u does not divide the query heads.

    Cost, per device: sends (u - 1) / u of q, k, v, with kv heads as repeated, and of the output
    and its log-partition, where that is used; backward as much.
    Reference: Jacobs et al. 2023, DeepSpeed Ulysses; Fang and Zhao 2024, USP.
    """
    if size == 1:
        return inner(operands, scoring)
    q, k, v = operands.q, operands.k, operands.v
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % size:
        raise PlanError(
            f"attention: {heads} query heads of a device are not a multiple of the {size} devices"
            f" of mesh axis '{axis}', which splits them; choose a size that divides {heads}"
        )
    # Both numbers divide the query heads, so their least common multiple does. Repeated here, the
    # gradients of the copies are summed by autodiff after they are back.
    k, v = (jnp.repeat(x, math.lcm(size, kv_heads) // kv_heads, axis=2) for x in (k, v))
    packing = Packing.of((q, k, v))
    exchanged = (
        jax.lax.all_to_all(x, axis, split_axis=x.ndim - 2, concat_axis=x.ndim - 3, tiled=True)
        for x in packing.pack((q, k, v))
    )
    first_head = jax.lax.axis_index(axis) * (heads // size)

    def of_heads(x: Any) -> Any:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, first_head, heads // size)

    q, k, v = packing.unpack(tuple(exchanged))
    dropout = scoring.dropout
    if dropout is not None:
        dropout = dropout.replace(heads=of_heads(dropout.heads))
    scoring = scoring.replace(
        alibi_slopes=of_heads(scoring.alibi_slopes),
        sinks=of_heads(scoring.sinks),
        biases=tuple(
            jax.tree.map(of_heads, x) if isinstance(x, RelativeBias) else x for x in scoring.biases
        ),
        dropout=dropout,
    )
    out, lse = inner(operands.replace(q=q, k=k, v=v), scoring)
    return (
        jax.lax.all_to_all(out, axis, split_axis=1, concat_axis=2, tiled=True),
        jax.lax.all_to_all(lse, axis, split_axis=2, concat_axis=1, tiled=True),
    )
