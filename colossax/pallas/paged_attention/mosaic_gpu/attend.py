"""Attention to pages by a Mosaic GPU kernel: which calls it takes, and what stands around it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.mosaic import WARPGROUP_ROWS, why_not_hardware
from colossax.pallas.mosaic import why_slow as why_slow
from colossax.pallas.paged_attention.mass import Mass
from colossax.pallas.paged_attention.seen import Seen
from colossax.pallas.paged_attention.spec import HEAD_SIZES, PagedSpec
from colossax.pallas.target import Target

from .kernel import Ranges, run
from .parts import Parts, part_slots
from .shapes import tile_for


def why_not(spec: PagedSpec, target: Target) -> str | None:
    """The first thing about this call that the kernel cannot do."""
    return why_not_hardware(target) or why_not_call(spec)


def why_not_call(spec: PagedSpec) -> str | None:
    """The same, the hardware aside."""
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel takes keys and values of bfloat16 and float16, found {spec.dtype}"
    if spec.more:
        return f"{spec.more[0]} is not available in the kernel"
    if spec.head_dim != spec.v_head_dim or spec.head_dim not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        return f"heads of {spec.head_dim}/{spec.v_head_dim}; there are {known}"
    if spec.heads // spec.kv_heads > WARPGROUP_ROWS:
        ratio = spec.heads // spec.kv_heads
        return f"{ratio} query heads share one of keys; the kernel takes {WARPGROUP_ROWS}"
    slots, keys = spec.page_slots, tile_for(spec.head_dim).keys
    if slots % 8 or (keys % slots and slots % keys):
        return f"pages of {slots} slots; the kernel takes 8, 16 and multiples of {keys}"
    if spec.checked:
        return "JAX's kernels know no shard_map that checks its values; give check_vma=False"
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
    interpret: bool = False,
    blocks: int | None = None,
    part: int | None = None,
) -> tuple[Float[Array, "g k w r hv"], Float[Array, "g k w r"], Any]:
    """Output, log-partition and, where it is asked for, what was given to slots; float32.

    Args:
        q: Queries of groups. Those of a group and a kv head are rows of one tile of 64; where there
            are more, the group is several groups.
        keys: Of pages.
        values: Likewise.
        rows: Pages of each group's sequence; any number within the pages behind what is seen.
        seen: Which slots a token sees.
        scale: Of the products.
        soft_cap: Bound of the logits.
        sinks: One more logit of each query head.
        mass: Whether that is asked for.
        interpret: Whether to run it on the CPU.
        blocks: That run at one time; None: one on each multiprocessor.
        part: Slots of a part; None: those of `part_slots`.

    Cost: 2 · 64 (h + hv) FLOPs for each slot that a group sees and kv head, rounded up to tiles;
    keys and values are read once. Outputs of parts are written and read, `8 w r k hv` bytes each.
    The mass costs `8 w r k` bytes a slot, half of them where it is asked.
    """
    g, w, k, r, h = q.shape
    width = min(w, max(1, WARPGROUP_ROWS // r))
    q, seen, rows = _narrower(q, seen, rows, width)
    tile = tile_for(h)
    length = rows.shape[1] * keys.shape[1]
    parts = Parts.of(seen.bounds(), length, part or part_slots(length))
    packed = jnp.moveaxis(q, 2, 1).reshape(q.shape[0], k, width * r, h).astype(keys.dtype)
    out, lse, logits = run(
        packed,
        keys,
        values,
        rows=rows,
        ranges=_ranges(seen, r),
        parts=parts,
        tile=tile,
        scale=scale,
        soft_cap=soft_cap,
        keep=mass,
        interpret=interpret,
        blocks=blocks,
    )
    out, lse = parts.merged(out, lse[..., : width * r])
    if sinks is not None:
        # It only scales: exp(lse) / (exp(lse) + exp(sink)).
        of_rows = jnp.tile(sinks, (1, width))
        out, lse = out * jax.nn.sigmoid(lse - of_rows)[..., None], jnp.logaddexp(lse, of_rows)
    given = None if logits is None else Mass(logits=logits, lse=lse, seen=seen, tokens=w)
    return _wider(out, g, w, r), _wider(lse, g, w, r), given


def _narrower(q: Array, seen: Seen, rows: Array, width: int) -> tuple[Array, Seen, Array]:
    """Groups of `width` tokens or fewer, several in place of one that has more."""
    g, w = q.shape[:2]
    several = math.ceil(w / width)
    if several == 1:
        return q, seen, rows

    def cut(x: Array) -> Array:
        more = [(0, 0), (0, several * width - w)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, more).reshape(g * several, width, *x.shape[2:])

    base = None if seen.base is None else jnp.repeat(seen.base, several)
    words = None if seen.words is None else cut(seen.words)
    narrow = Seen(lo=cut(seen.lo), hi=cut(seen.hi), base=base, words=words)
    return cut(q), narrow, jnp.repeat(rows, several, axis=0)


def _wider(x: Array, groups: int, width: int, heads: int) -> Array:
    """`[g, k, w, r, ...]` of what is `[sub-groups, k, rows, ...]`."""
    x = x.reshape(groups, -1, x.shape[1], x.shape[2] // heads, heads, *x.shape[3:])
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(groups, x.shape[1], -1, heads, *x.shape[5:])[:, :, :width]


def _ranges(seen: Seen, heads: int) -> Ranges:
    """By row of a tile: tokens one behind the other, query heads of each."""

    def of_rows(x: Array) -> Array:
        each = jnp.repeat(x.astype(jnp.int32), heads, axis=1)
        return jnp.pad(each, ((0, 0), (0, WARPGROUP_ROWS - each.shape[1])))

    words = None
    if seen.words is not None:
        bits = jax.lax.bitcast_convert_type(seen.words, jnp.int32)
        words = (of_rows(bits[..., 0]), of_rows(bits[..., 1]))
    return Ranges(lo=of_rows(seen.lo), hi=of_rows(seen.hi), base=seen.base, words=words)
