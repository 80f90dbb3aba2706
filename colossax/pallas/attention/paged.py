"""Attention of flat tokens to pages by the kernel, where `auto` takes it."""

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.paged_attention import Attended, Seen, choose, paged_attention, spec_of
from colossax.pallas.target import current_target

from .pages import Pages, Scores
from .trees import MOST_NODES, with_trees

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
    given = {"plain": plain, "implementation": implementation}
    chosen = chosen_for(q, cache, pages, scores, **given)
    if chosen is None:
        return None
    where = {"seat": seat, "position": position, "scores": scores}
    return attend_groups(q, cache, layer, pages, **where, implementation=chosen)[0]


def chosen_for(
    q: Float[Array, "t k r h"],
    cache: dict[str, Array],
    pages: Pages,
    scores: Scores,
    *,
    plain: bool,
    mass: bool = False,
    implementation: str = "auto",
) -> str | None:
    """Which implementation of `paged_attention` is to compute it, or None: `attend_pages` is.

    Args:
        q, cache, pages, scores: As of `attend_pages`.
        plain: Whether `read` gives the cache's `k` and `v` as they are.
        mass: Whether what is given to each slot is asked for.
        implementation: As of `attend_by_kernel`.

    Raises:
        NotImplementedError: The implementation named does not take this call, says why.
    """
    # Pages of rings, codes and seats that keep a window are attended to in the plain form.
    other = pages.ring or pages.rings or pages.kept is not None
    if not plain or other or cache.keys() != {"k", "v"}:
        return None
    nodes = 0 if pages.branches is None else pages.branches.depth.shape[-1]
    unknown = {
        "ALiBi": scores.slopes is not None,
        "a RelativeBias": scores.biases,
        f"a tree of {nodes} tokens, more than {MOST_NODES},": nodes > MOST_NODES,
    }
    spec = spec_of(
        q[jnp.clip(pages.groups, 0)],
        cache["k"],
        cache["v"],
        rows=pages.table,
        soft_cap=scores.soft_cap,
        mass=mass,
        more=tuple(name for name, yes in unknown.items() if yes),
    )
    spec = dataclasses.replace(spec, words=nodes > 0)
    chosen = choose(spec, current_target(), implementation)
    return None if chosen == "xla" and implementation == "auto" else chosen


def attend_groups(
    q: Float[Array, "t k r h"],
    cache: dict[str, Array],
    layer: int | Int[Array, ""],
    pages: Pages,
    *,
    seat: Int[Array, " t"],
    position: Int[Array, " t"],
    scores: Scores,
    implementation: str,
    mass: bool = False,
) -> tuple[Float[Array, "t k r hv"], Attended]:
    """What tokens see, 0 for those of no group, and what `paged_attention` told of the groups.

    Args:
        q, cache, layer, pages, seat, position, scores: As of `attend_pages`.
        implementation: Of `paged_attention`, as `chosen_for` says.
        mass: Whether what is given to each slot is asked for.

    Cost: that of `paged_attention`.
    """
    there = (pages.groups >= 0) & (seat[pages.groups] >= 0)
    own = jnp.max(jnp.where(there, seat[pages.groups], 0), axis=1)
    place = jnp.where(there, position[pages.groups], -1)
    seen = _seen(place, scores)
    if pages.branches is not None:
        trees = pages.branches.of_groups(jnp.clip(pages.groups, 0), jnp.clip(own, 0))
        seen = with_trees(seen, place, trees)
    found = paged_attention(
        q[jnp.clip(pages.groups, 0)],
        cache["k"],
        cache["v"],
        layer,
        rows=pages.table[jnp.clip(own, 0)],
        seen=seen,
        scale=scores.scale,
        soft_cap=scores.soft_cap,
        sinks=scores.sinks,
        mass=mass,
        implementation=implementation,
    )
    t, each = q.shape[0], there.size
    flat = found.out.reshape(each, *found.out.shape[2:])
    # Where in the groups each token stands.
    place = jnp.full((t,), each, jnp.int32)
    to = jnp.where(there, pages.groups, t).reshape(-1)
    place = place.at[to].set(jnp.arange(each, dtype=jnp.int32), mode="drop")
    return flat.at[place].get(mode="fill", fill_value=0), found


def _seen(place: Int[Array, "g w"], scores: Scores) -> Seen:
    """Of tokens at these positions; negative: none."""
    lo = jnp.zeros_like(place)
    if scores.left is not None:
        lo = jnp.maximum(lo, place - scores.left)
    if scores.chunk is not None:
        lo = jnp.maximum(lo, place - place % scores.chunk)
    return Seen(lo=lo, hi=place + 1)
