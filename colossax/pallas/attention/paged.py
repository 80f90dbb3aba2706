"""Attention of flat tokens to pages by the kernel, where `auto` takes it."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.paged_attention import Seen, choose, paged_attention, spec_of
from colossax.pallas.target import current_target

from .pages import Pages, Scores

if TYPE_CHECKING:
    from .cache import ReadSlots


def attend_by_kernel(
    q: Float[Array, "t k r h"],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    pages: Pages,
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    scores: Scores,
    read: "ReadSlots",
    plain: bool,
    implementation: str = "auto",
) -> Array | None:
    """What `attend_pages` gives, or None where that is to compute it.

    Args:
        q: As of `attend_pages`, and so are all others.
        cache: See there.
        layer: See there.
        pages: See there.
        seat: See there.
        position: See there.
        scores: See there.
        read: See there; not called.
        plain: Whether `read` gives the cache's `k` and `v` as they are.
        implementation: Of `paged_attention`; `auto`: its kernel or, in its place, None.

    Raises:
        NotImplementedError: The implementation named does not take this call, says why.

    Cost: that of `paged_attention`.
    """
    # Trees, pages of rings, codes and seats that keep a window are attended to in the plain form.
    other = pages.branches is not None or pages.ring or pages.rings or pages.kept is not None
    if not plain or other or cache.keys() != {"k", "v"}:
        return None
    there = (pages.groups >= 0) & (seat[pages.groups] >= 0)
    asked = q[jnp.clip(pages.groups, 0)]
    keys, values = cache["k"], cache["v"]
    unknown = {"ALiBi": scores.slopes is not None, "a RelativeBias": scores.biases}
    spec = spec_of(
        asked,
        keys,
        values,
        rows=pages.table,
        soft_cap=scores.soft_cap,
        more=tuple(name for name, yes in unknown.items() if yes),
    )
    chosen = choose(spec, current_target(), implementation)
    if chosen == "xla" and implementation == "auto":
        return None
    own = jnp.max(jnp.where(there, seat[pages.groups], 0), axis=1)
    found = paged_attention(
        asked,
        keys,
        values,
        layer,
        rows=pages.table[jnp.clip(own, 0)],
        seen=_seen(jnp.where(there, position[pages.groups], -1), scores),
        scale=scores.scale,
        soft_cap=scores.soft_cap,
        sinks=scores.sinks,
        implementation=chosen,
    )
    t, each = q.shape[0], there.size
    flat = found.out.reshape(each, *found.out.shape[2:])
    # Where in the groups each token stands.
    place = jnp.full((t,), each, jnp.int32)
    to = jnp.where(there, pages.groups, t).reshape(-1)
    place = place.at[to].set(jnp.arange(each, dtype=jnp.int32), mode="drop")
    return flat.at[place].get(mode="fill", fill_value=0)


def _seen(place: Int[Array, "g w"], scores: Scores) -> Seen:
    """Of tokens at these positions; negative: none."""
    lo = jnp.zeros_like(place)
    if scores.left is not None:
        lo = jnp.maximum(lo, place - scores.left)
    if scores.chunk is not None:
        lo = jnp.maximum(lo, place - place % scores.chunk)
    return Seen(lo=lo, hi=place + 1)
