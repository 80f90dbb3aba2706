"""Attention to pages as it is written down: all that a group's sequence may hold, at once."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.target import Target

from .mass import LOG2_E, Mass
from .seen import Seen
from .spec import PagedSpec


def why_not(spec: PagedSpec, target: Target) -> str | None:
    """It takes everything everywhere."""
    return None


def attend(
    q: Float[Array, "g w k r h"],
    keys: Float[Array, "p c k h"],
    values: Float[Array, "p c k hv"],
    *,
    rows: Int[Array, "g n"],
    seen: Seen,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, "k r"] | None,
    mass: bool,
) -> tuple[Float[Array, "g k w r hv"], Float[Array, "g k w r"], Any]:
    """Output, log-partition and, where it is asked for, what was given to slots; float32.

    Args:
        q: Queries of groups.
        keys: Of pages.
        values: Likewise.
        rows: Pages of each group's sequence, in order of position.
        seen: Which slots a token sees.
        scale: Of the products.
        soft_cap: Bound of the logits.
        sinks: One more logit of each query head.
        mass: Whether that is asked for.

    Cost: 2 g n c w k r (h + hv) FLOPs; keys, values and logits of all pages of a group at once.
    """
    groups, n = rows.shape
    slots = jnp.arange(n * keys.shape[1], dtype=jnp.int32)
    chosen = jnp.clip(rows, 0, keys.shape[0] - 1)
    held = (x[chosen].reshape(groups, slots.size, *x.shape[2:]) for x in (keys, values))
    of_keys, of_values = held
    logits = scale * jnp.einsum(
        "gwkrh,gckh->gkwrc", q.astype(keys.dtype), of_keys, preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    there = seen.of(slots)
    # What another left behind may be no number, and nothing times that is none either.
    of_values = jnp.where(jnp.any(there, axis=1)[..., None, None], of_values, 0)
    there = there[:, None, :, None]
    top = jnp.max(logits, axis=-1, where=there, initial=-jnp.inf)
    if sinks is not None:
        top = jnp.maximum(top, sinks[:, None])
    safe = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.where(there, jnp.exp(logits - safe[..., None]), 0.0)
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks[:, None] - safe)
    shares = weights / jnp.where(total == 0, 1.0, total)[..., None]
    out = jnp.einsum(
        "gkwrc,gckh->gkwrh",
        shares.astype(values.dtype),
        of_values,
        preferred_element_type=jnp.float32,
    )
    lse = jnp.where(total == 0, -jnp.inf, safe + jnp.log(total))
    if not mass:
        return out, lse, None
    of_rows = groups, q.shape[2], q.shape[1] * q.shape[3]
    by_row = (logits * LOG2_E).reshape(*of_rows, -1)
    given = Mass(logits=by_row, lse=lse.reshape(of_rows), seen=seen, tokens=q.shape[1])
    return out, lse, given
