"""One attention to pages, several implementations: the call, its checks and the choice."""

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.choice import Choice
from colossax.pallas.target import current_target
from colossax.pallas.varying import varies

from . import interpret, xla
from .mass import Mass
from .mosaic_gpu import attend as mosaic
from .seen import WORDS, Seen
from .spec import PagedSpec

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "mosaic": mosaic,
    "xla": xla,
    "interpret": interpret,
}
"""Fastest first; `xla` takes everything, so `auto` never comes to the one behind it."""

UNPROVEN = "mosaic"
"""What `auto` takes only once it has proved itself on the device that is there."""

_CHOICE = Choice("paged_attention", IMPLEMENTATIONS, UNPROVEN)
choose, declined_by = _CHOICE.choose, _CHOICE.declined_by


class Attended(NamedTuple):
    """What tokens saw; float32.

    Attributes:
        out: `[g, w, k, r, hv]`; 0 where nothing is seen.
        lse: `[g, w, k, r]`: natural logarithm of the softmax's denominator, sink included; -inf
            where nothing is seen and there is no sink.
        mass: What each token gave to each slot of its sequence, see `Mass.of`; or None.
    """

    out: Any
    lse: Any
    mass: Mass | None


def paged_attention(
    q: Float[Array, "g w k r h"],
    keys: Float[Array, "l p c k h"],
    values: Float[Array, "l p c k hv"],
    layer: int | Int[Array, ""],
    *,
    rows: Int[Array, "g n"],
    seen: Seen,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "k r"] | None = None,
    mass: bool = False,
    implementation: str = "auto",
) -> Attended:
    """Exact softmax attention of groups of tokens to the pages of their sequences.

        logits = soft_cap * tanh(q . k * scale / soft_cap) over the slots that a token sees
        out    = softmax over these and the sink, times v

    Keys are cut at fixed positions, and parts merged by their log-partitions: what a token gets
    depends neither on who else is in the call nor on where its pages lie.

    Args:
        q: Queries by kv head: w tokens of one sequence, r query heads for each head of keys.
        keys: Of all layers, whole: a slice of a layer would be copied.
        values: Likewise.
        layer: Which; may be traced.
        rows: Pages of each group's sequence, in order of position; those behind what is seen are
            read nowhere, but must be int32 of any value.
        seen: Which slots each token sees; slot i is place `i % c` of page `i // c`.
        scale: Of the products.
        soft_cap: Bound of the logits.
        sinks: One more logit of each query head, in the denominator only.
        mass: Whether what was given to each slot is asked for too.
        implementation: `auto` takes the first that accepts, `mosaic` only once proved on the device
            that is there; or `mosaic`, `xla`, `interpret`.

    Raises:
        ValueError: Shapes contradict one another, or `implementation` is no name.
        NotImplementedError: The implementation named does not take this call, says why.

    Cost: `mosaic` reads `2 k h` items of each slot seen by a group once, and moves
    `8 r w k hv` bytes for each part of a sequence; `xla` gathers all pages that `rows` has. With
    `mass`, `4 r w k` bytes are held for each slot of `rows`, and written for those seen.
    """
    _check(q, keys, values, rows, seen, sinks)
    spec = spec_of(q, keys, values, rows=rows, soft_cap=soft_cap, seen=seen, mass=mass)
    chosen = choose(spec, current_target(), implementation)
    pages = keys.shape[1]
    flat_keys, flat_values = (x.reshape(-1, *x.shape[2:]) for x in (keys, values))
    out, lse, given = IMPLEMENTATIONS[chosen].attend(
        q,
        flat_keys,
        flat_values,
        rows=jnp.clip(rows, 0, pages - 1) + jnp.asarray(layer, jnp.int32) * pages,
        seen=seen,
        scale=scale,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        mass=mass,
    )
    return Attended(jnp.moveaxis(out, 1, 2), jnp.moveaxis(lse, 1, 2), given)


def spec_of(
    q: Any,
    keys: Any,
    values: Any,
    *,
    rows: Any,
    soft_cap: float | None = None,
    seen: Seen | None = None,
    mass: bool = False,
    more: tuple[str, ...] = (),
) -> PagedSpec:
    """Of operands as of `paged_attention`, arrays or shapes, and what else scores depend on."""
    groups, width, kv_heads, ratio, h = q.shape
    return PagedSpec(
        groups=groups,
        width=width,
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        head_dim=h,
        v_head_dim=values.shape[-1],
        page_slots=keys.shape[2],
        pages=rows.shape[-1],
        q_dtype=q.dtype,
        dtype=keys.dtype,
        soft_cap=soft_cap is not None,
        words=seen is not None and seen.words is not None,
        mass=mass,
        more=more,
        checked=varies((q, keys, values)),
    )


def _check(q: Any, keys: Any, values: Any, rows: Any, seen: Seen, sinks: Any) -> None:
    shapes = f"q {q.shape}, keys {keys.shape}, values {values.shape}, rows {rows.shape}"
    fit = q.ndim == keys.ndim == values.ndim == 5 and rows.ndim == 2
    fit = fit and keys.shape[:4] == values.shape[:4] and q.shape[4] == keys.shape[4]
    if not (fit and q.shape[2] == keys.shape[3] and rows.shape[0] == q.shape[0]):
        raise ValueError(
            f"paged_attention: {shapes} do not fit; they are [g, w, k, r, h], [l, p, c, k, h],"
            " [l, p, c, k, hv] and [g, n]"
        )
    if 0 in (*q.shape, *keys.shape, *values.shape, *rows.shape):
        raise ValueError(f"paged_attention: {shapes}: no dim may be 0")
    if keys.dtype != values.dtype:
        raise ValueError(
            f"paged_attention: keys of {keys.dtype}, values of {values.dtype}; cast one"
        )
    wanted = {"lo": q.shape[:2], "hi": q.shape[:2]}
    if (seen.base is None) != (seen.words is None):
        raise ValueError("paged_attention: seen has one of base and words; give both or none")
    if seen.words is not None:
        wanted |= {"base": q.shape[:1], "words": (*q.shape[:2], WORDS)}
    for name, shape in wanted.items():
        if getattr(seen, name).shape != shape:
            found = getattr(seen, name).shape
            raise ValueError(f"paged_attention: seen.{name} {found} is not {shape}; {shapes}")
    if sinks is not None and sinks.shape != q.shape[2:4]:
        raise ValueError(f"paged_attention: sinks {sinks.shape} are not {q.shape[2:4]}; {shapes}")
