"""What the Mosaic kernel of attention to pages is tried on before `auto` takes it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.pallas.attention.counted import attend_counted
from colossax.pallas.attention.paged import attend_by_kernel
from colossax.pallas.attention.pages import Branches, Pages, Scores, attend_pages, scores_of
from colossax.pallas.bench import tolerance
from colossax.pallas.proof.trial import Trial

from .api import paged_attention
from .seen import WORD_BITS, WORDS, Seen
from .spec import PagedVariant

PAGE = 16
SOFT_CAP = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the cases: lengths of sequences, tokens of each, and heads of queries and keys.

    `nodes` are those of a tree in each sequence of the larger one.
    """

    small: tuple[int, ...] = (1, 700, 65, 1300, 512)
    small_width: int = 5
    small_heads: tuple[int, int] = (6, 2)
    large: tuple[int, ...] = (2048,) * 24 + (4096,) * 8
    large_heads: tuple[int, int] = (32, 8)
    nodes: int = 8


def trials(
    variant: PagedVariant, *, kernel: str = "mosaic", sizes: Sizes = Sizes()
) -> Iterator[Trial]:
    """A small case of uneven sequences under a window, and a larger one that is timed."""
    small = (sizes.small, sizes.small_width, sizes.small_heads, 300)
    yield _trial(variant, kernel, "uneven sequences", *small)
    larger = _trial(variant, kernel, "many sequences", sizes.large, 1, sizes.large_heads, None)
    if variant.words and not variant.mass:
        yield _of_trees(variant, kernel, sizes)
    elif variant.words:
        yield larger
    elif variant.mass:
        given = functools.partial(_counted, variant)
        yield dataclasses.replace(
            larger,
            kernel=functools.partial(given, kernel),
            truth=functools.partial(given, "xla"),
            peers={"xla": functools.partial(given, None)},
        )
    else:
        yield dataclasses.replace(larger, peers={"xla": functools.partial(_parted, variant)})


def paged(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    h: int,
    width: int,
    dtype: Any,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Queries, keys and values of one layer, and pages of each sequence, in any order."""
    counts = [-(-length // PAGE) for length in lengths]
    rows = np.zeros((len(lengths), max(counts)), np.int32)
    order, at = np.random.default_rng(0).permutation(sum(counts)), 0
    for row, count in zip(rows, counts, strict=True):
        row[:count] = order[at : at + count]
        at += count
    keys = jax.random.split(jax.random.key(seed), 3)
    of_pages = (1, at, PAGE, heads[1], h)
    shapes = ((len(lengths), width, heads[1], heads[0] // heads[1], h), of_pages, of_pages)
    arrays = (jax.random.normal(r, x, dtype) for r, x in zip(keys, shapes, strict=True))
    return *arrays, jnp.asarray(rows)


def _trial(
    variant: PagedVariant,
    kernel: str,
    name: str,
    lengths: tuple[int, ...],
    width: int,
    heads: tuple[int, int],
    window: int | None,
) -> Trial:
    last = np.asarray(lengths)[:, None]
    hi = np.maximum(last - width + 1 + np.arange(width), 0)
    base, words = None, None
    if variant.words:
        # The last tokens see of what is behind `base` each its own bits.
        base = np.maximum(np.asarray(lengths) - WORD_BITS * WORDS, 0)
        hi = np.minimum(hi, base[:, None])
        words = np.random.default_rng(1).integers(0, 2**32, (*hi.shape, WORDS), np.uint32)
        words = np.where((last - base[:, None] == WORD_BITS * WORDS)[..., None], words, 0)
    lo = np.zeros_like(hi) if window is None else np.maximum(hi - window, 0)
    run = functools.partial(_call, variant)
    return Trial(
        name=name,
        inputs=(
            *paged(lengths, heads, variant.head_dim, width, variant.dtype),
            *(jnp.asarray(x, jnp.int32) for x in (lo, hi)),
            *(() if words is None else (jnp.asarray(base, jnp.int32), jnp.asarray(words))),
        ),
        kernel=functools.partial(run, kernel),
        truth=functools.partial(run, "xla"),
        tolerance=tolerance(variant.dtype),
    )


def _of_trees(variant: PagedVariant, kernel: str, sizes: Sizes) -> Trial:
    """Sequences that each end in a tree."""
    given = sizes.large, sizes.large_heads, variant.head_dim, sizes.nodes, variant.dtype
    *arrays, rows = paged(*given)
    begin = jnp.asarray(sizes.large, jnp.int32) - sizes.nodes
    run = functools.partial(_treed, variant)
    return Trial(
        name="trees of many sequences",
        inputs=(*arrays, rows, begin),
        kernel=functools.partial(run, kernel),
        truth=functools.partial(run, "xla"),
        peers={"xla": functools.partial(run, None)},
        tolerance=tolerance(variant.dtype),
    )


def _call(
    variant: PagedVariant, name: str, q: Any, k: Any, v: Any, rows: Any, *seen: Any
) -> dict[str, Any]:
    found = paged_attention(
        q,
        k,
        v,
        0,
        rows=rows,
        seen=Seen(**dict(zip(("lo", "hi", "base", "words"), seen, strict=False))),
        scale=variant.head_dim**-0.5,
        soft_cap=SOFT_CAP if variant.soft_cap else None,
        mass=variant.mass,
        implementation=name,
    )
    there = ~jnp.isneginf(found.lse)
    lse = {"lse": jnp.where(there, found.lse, 0.0), "seen": there.astype(jnp.float32)}
    slots = rows.shape[1] * k.shape[2]
    given = {} if found.mass is None else {"mass": found.mass.of(0, slots)}
    return {"out": found.out, **lse, **given}


def _parted(
    variant: PagedVariant, q: Any, k: Any, v: Any, rows: Any, lo: Any, hi: Any
) -> dict[str, Any]:
    """What is computed where the kernel is not taken."""
    return {"out": parted(q, k, v, rows, hi, SOFT_CAP if variant.soft_cap else None)}


def _treed(
    variant: PagedVariant, name: str | None, q: Any, k: Any, v: Any, rows: Any, begin: Any
) -> dict[str, Any]:
    return {"out": treed(name, q, k, v, rows, begin, SOFT_CAP if variant.soft_cap else None)}


def _counted(
    variant: PagedVariant, name: str | None, q: Any, k: Any, v: Any, rows: Any, lo: Any, hi: Any
) -> dict[str, Any]:
    out, mass = counted(name, q, k, v, rows, hi, SOFT_CAP if variant.soft_cap else None)
    return {"out": out, "mass": mass}


def counted(
    name: str | None, q: Any, k: Any, v: Any, rows: Any, hi: Any, soft_cap: float | None = None
) -> tuple[Any, Any]:
    """`attend_counted` of sequences of one token each, and masses that were 0.

    Args:
        name: Of an implementation; None: as where the kernel is not taken.
        q, k, v, rows: As of `paged`.
        hi: `[g, 1]`, one behind the last slot of each.
        soft_cap: Bound of the logits.
    """
    groups = jnp.arange(q.shape[0], dtype=jnp.int32)
    return attend_counted(
        q[:, 0],
        {"k": k, "v": v},
        jnp.zeros(k.shape[:-1], jnp.float32),
        0,
        Pages(table=rows, groups=groups[:, None]),
        seat=groups,
        position=hi[:, 0] - 1,
        scores=_scores(q, soft_cap),
        read=lambda held: (held["k"], held["v"]),
        plain=name is not None,
        implementation=name or "auto",
    )


def treed(
    name: str | None, q: Any, k: Any, v: Any, rows: Any, begin: Any, soft_cap: float | None = None
) -> Any:
    """What sees the nodes of trees, two behind each but the last ones, `[g w, k, r, hv]`.

    Args:
        name: Of an implementation; None: as where the kernel is not taken.
        q, k, v, rows: As of `paged`; a token for each node.
        begin: `[g]`, the slot of each sequence's root.
        soft_cap: Bound of the logits.
    """
    groups, nodes = q.shape[:2]
    tokens = np.arange(groups * nodes).reshape(groups, nodes)
    line = np.zeros((nodes, -(-nodes // WORD_BITS)), np.uint32)
    for node in range(nodes):
        line[node] = line[(node - 1) // 2] if node else 0
        line[node, node // WORD_BITS] |= np.uint32(1 << node % WORD_BITS)
    depth = jnp.asarray([node.bit_length() - 1 for node in range(1, nodes + 1)], jnp.int32)
    branches = Branches(
        begin=begin,
        depth=jnp.broadcast_to(depth, (groups, nodes)),
        line=jnp.tile(jnp.asarray(line), (groups, 1)),
    )
    given = (
        q.reshape(-1, *q.shape[2:]),
        {"k": k, "v": v},
        0,
        Pages(table=rows, groups=jnp.asarray(tokens, jnp.int32), branches=branches),
    )
    where = {
        "seat": jnp.repeat(jnp.arange(groups, dtype=jnp.int32), nodes),
        "position": (begin[:, None] + depth).reshape(-1),
        "scores": _scores(q, soft_cap),
        "read": lambda held: (held["k"], held["v"]),
    }
    if name is None:
        slot = begin[:, None] + jnp.arange(nodes, dtype=jnp.int32)
        return attend_pages(*given, **where, slot=slot.reshape(-1))
    return attend_by_kernel(*given, **where, plain=True, implementation=name)


def parted(q: Any, k: Any, v: Any, rows: Any, hi: Any, soft_cap: float | None = None) -> Any:
    """`attend_pages` of sequences of one token each, `[g, k, r, hv]`."""
    groups = jnp.arange(q.shape[0], dtype=jnp.int32)
    return attend_pages(
        q[:, 0],
        {"k": k, "v": v},
        0,
        Pages(table=rows, groups=groups[:, None]),
        seat=groups,
        position=hi[:, 0] - 1,
        scores=_scores(q, soft_cap),
        read=lambda held: (held["k"], held["v"]),
    )


def _scores(q: Any, soft_cap: float | None) -> Scores:
    return scores_of(
        scale=q.shape[-1] ** -0.5,
        window=None,
        chunk=None,
        soft_cap=soft_cap,
        slopes=None,
        sinks=None,
        biases=(),
    )
