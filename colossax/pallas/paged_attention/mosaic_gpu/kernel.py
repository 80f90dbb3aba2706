"""The kernel: parts of sequences dealt out among workers, softmax over one part in registers.

A block has one or two workers of two warpgroups each. One copies the queries of a part, then the
pages of its tiles into a ring in shared memory, as the other, which computes, leaves them. Workers
wait for nobody else: while one's softmax runs, the other multiplies.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from colossax.pallas.mosaic import (
    SHARED_BYTES,
    WARPGROUP_ROWS,
    Ops,
    Stages,
    launch,
    matrix,
    multiprocessors,
    shared_bytes,
    spread,
    stage_barriers,
    tanh,
    vector,
)
from colossax.pallas.paged_attention.mass import LOG2_E
from colossax.pallas.paged_attention.seen import WORD_BITS, WORDS

from .parts import Parts
from .shapes import COLUMNS, Tile

_ROW_TILE = 8
"""Rows of queries are filled up to a multiple: tiles of shared memory have so many."""

COPY_REGISTERS, COMPUTE_REGISTERS = 32, 224
"""Of a thread where a block of two workers starts with 128: copiers of pages spill with 24."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranges:
    """`Seen` by row of a tile, `[g, 64]` int32 each; rows behind the last see nothing.

    `base` is `[g]`, and `words` two such arrays; both may be None.
    """

    lo: Any
    hi: Any
    base: Any
    words: Any


def run(
    q: Float[Array, "g k m h"],
    keys: Float[Array, "p c k h"],
    values: Float[Array, "p c k hv"],
    *,
    rows: Int[Array, "g n"],
    ranges: Ranges,
    parts: Parts,
    tile: Tile,
    scale: float,
    soft_cap: float | None,
    keep: bool,
    interpret: bool,
    blocks: int | None,
) -> tuple[Any, Any, Any]:
    """Output `[g, k, parts, m, hv]` and lse `[g, k, parts, 64]` of each part, and logits.

    Logits are `[g, k, m, slots rounded up to tiles]` in units of log 2, or None; what lies in no
    tile that a group sees, and outputs of parts that are not done, are whatever was in memory.
    """
    g, k, m, h = q.shape
    slots, hv = values.shape[1], values.shape[3]
    length = rows.shape[1] * slots
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -m % _ROW_TILE), (0, 0)))
    kernel = _Kernel(
        ops=Ops(interpret=interpret),
        tile=tile,
        part=parts.slots,
        rows=m,
        scale=scale,
        soft_cap=soft_cap,
        keep=keep,
        worded=ranges.words is not None,
    )
    out = (
        jax.ShapeDtypeStruct((g, k, parts.most, m, hv), jnp.float32),
        jax.ShapeDtypeStruct((g, k, parts.most, WARPGROUP_ROWS), jnp.float32),
    )
    if keep:
        wide = pl.cdiv(length, tile.keys) * tile.keys
        out = (*out, jax.ShapeDtypeStruct((g, k, m, wide), jnp.float32))
    scratch = kernel.scratch(q, values)
    assert shared_bytes(scratch) <= SHARED_BYTES, tile
    most = pl.cdiv(parts.group.shape[0] * k, tile.workers)
    launched = launch(
        kernel.body,
        out=out,
        scratch=scratch,
        grid={"block": min(blocks or multiprocessors(), most)},
        warpgroups=2 * tile.workers,
        interpret=interpret,
    )
    with jax.named_scope("paged_attention_kernel"):
        found = launched(
            q,
            keys,
            values,
            rows,
            ranges.lo,
            ranges.hi,
            parts.group,
            parts.number,
            parts.bounds,
            parts.count,
            *(() if ranges.words is None else (ranges.base, *ranges.words)),
        )
    return found if keep else (*found, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """One part for one head of keys, in the kernel.

    Attributes:
        group: Whose.
        head: Of keys.
        number: Of the part.
        tiles: The first tile, those from and up to which all rows see all, and one behind the last.
        begin: First slot that the group sees.
        end: One behind the last.
    """

    group: Any
    head: Any
    number: Any
    tiles: tuple[Any, Any, Any, Any]
    begin: Any
    end: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """What its code depends on."""

    ops: Ops
    tile: Tile
    part: int
    rows: int
    scale: float
    soft_cap: float | None
    keep: bool
    worded: bool

    def scratch(self, q: Array, values: Array) -> dict[str, Any]:
        """Shared memory of a block: the rings of its workers lie behind one another."""
        workers, slots, hv = self.tile.workers, values.shape[1], values.shape[3]
        stages = workers * self.tile.stages
        pages = max(1, self.tile.keys // slots)
        return {
            "q": matrix((workers, WARPGROUP_ROWS, q.shape[3]), q.dtype),
            "k": matrix((stages, self.tile.keys, q.shape[3]), q.dtype),
            "v": matrix((stages, self.tile.keys, hv), q.dtype, rows_summed=self.tile.keys),
            "leaving": vector((workers, WARPGROUP_ROWS, COLUMNS)),
            "of_queries": stage_barriers(workers, copies=1, readers=1),
            "of_tiles": stage_barriers(stages, copies=2 * pages, readers=1),
        }

    def body(self, q, keys, values, rows, lo, hi, group, number, bounds, count, *rest):
        *rest, shared = rest
        base, *words = rest[:3] if self.worded else (None,)
        out, lse, *logits = rest[3:] if self.worded else rest
        wg = jax.lax.axis_index("wg")
        worker = 0 if self.tile.workers == 1 else jax.lax.rem(wg, jnp.int32(self.tile.workers))
        block, blocks = jax.lax.axis_index("block"), jax.lax.axis_size("block")
        # Neighbours go to different blocks first: few parts then keep many multiprocessors busy.
        mine, workers = worker * blocks + block, self.tile.workers * blocks
        heads = keys.shape[2]
        total = jnp.maximum(0, jax.lax.div(count[0] * heads - mine + workers - 1, workers))

        def part(i):
            place = mine + i * workers
            which, head = jax.lax.div(place, heads), jax.lax.rem(place, heads)
            return self.part_of(group[which], head, number[which], bounds)

        queries = Stages(self.ops, shared, shared["of_queries"], 1, first=worker)
        first = worker * self.tile.stages
        tiles = Stages(self.ops, shared, shared["of_tiles"], self.tile.stages, first=first)

        @pl.when(wg < self.tile.workers)
        def _copy():
            if self.tile.workers > 1:
                plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            self.fetch(q, keys, values, rows, queries, tiles, part, total)

        @pl.when(wg >= self.tile.workers)
        def _compute():
            if self.tile.workers > 1:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            def one(i, done):
                this = part(i)
                of_rows = tuple(self.ops.vector(x.at[this.group]) for x in (lo, hi, *words))
                seen = functools.partial(
                    self.seen, of_rows, None if base is None else base[this.group]
                )
                kept = logits[0].at[this.group, this.head] if self.keep else None
                summed, total, done = self.attend(
                    shared, worker, queries, tiles, this, seen, kept, i, done
                )
                lse.at[this.group, this.head, this.number][...] = total
                for column in range(0, summed.shape[1], COLUMNS):
                    columns = pl.ds(column, COLUMNS)
                    there = out.at[this.group, this.head, this.number, :, columns]
                    self.store(shared, worker, summed[:, column : column + COLUMNS], there)
                return done

            jax.lax.fori_loop(0, total, one, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def part_of(self, group, head, number, bounds) -> _Part:
        """What a worker has to do."""
        begin, all_from, all_to, end = (bounds[group, i] for i in range(4))
        keys = self.tile.keys
        start = number * self.part
        first = jax.lax.div(jnp.maximum(begin, start), keys)
        last = jax.lax.div(jnp.minimum(end, start + self.part) + keys - 1, keys)
        inner = jnp.clip(jax.lax.div(all_from + keys - 1, keys), first, last)
        outer = jnp.clip(jax.lax.div(all_to, keys), inner, last)
        tiles = (first, inner, outer, last)
        return _Part(group=group, head=head, number=number, tiles=tiles, begin=begin, end=end)

    def fetch(self, q, keys, values, rows, queries, tiles, part, total):
        """What a copying warpgroup does: queries of each part, and its tiles page by page."""
        slots = keys.shape[1]
        size = min(slots, self.tile.keys)

        def one(i, done):
            this = part(i)
            first, _, _, last = this.tiles
            # Rows of the tile behind these are whatever is there, and so is what becomes of them.
            queries.fill(i, {"q": [q.at[this.group, this.head]]})
            # Behind the last page that is seen the table says nothing.
            most = jax.lax.div(this.end - 1, slots)

            def tile(j, done):
                sources: dict[str, Any] = {"k": [], "v": []}
                for start in range(0, self.tile.keys, size):
                    slot = j * self.tile.keys + start
                    page = rows[this.group, jnp.minimum(jax.lax.div(slot, slots), most)]
                    within = pl.ds(0 if size == slots else jax.lax.rem(slot, slots), size)
                    sources["k"].append(keys.at[page, within, this.head])
                    sources["v"].append(values.at[page, within, this.head])
                tiles.fill(done, sources)
                return done + 1

            return jax.lax.fori_loop(first, last, tile, done)

        done = jax.lax.fori_loop(0, total, one, jnp.int32(0))
        queries.drain(total)
        tiles.drain(done)

    def seen(self, of_rows, base, slot):
        """Which of a tile's slots each row sees."""
        lo, hi, *words = (spread(x, slot.shape) for x in of_rows)
        seen = (slot >= lo) & (slot < hi)
        if not words:
            return seen
        place = slot - base
        low, high = words
        word = jnp.where(place < WORD_BITS, low, high)
        bit = jax.lax.shift_right_logical(word, place & (WORD_BITS - 1)) & 1
        return seen | ((place >= 0) & (place < WORDS * WORD_BITS) & (bit == 1))

    def attend(self, shared, worker, queries, tiles, this, seen, kept, i, done):
        """What a computing warpgroup does: a part's output, its rows' lse, and tiles done."""
        queries.arrived(i)
        full, columns = self.ops.full, shared["v"].shape[2]
        nothing = (
            full((WARPGROUP_ROWS, columns), 0.0),
            full((WARPGROUP_ROWS,), -jnp.inf),
            full((WARPGROUP_ROWS,), 0.0),
        )
        first, inner, outer, last = this.tiles
        step = functools.partial(self.step, shared, worker, tiles, this, kept, done - first)
        carry = jax.lax.fori_loop(first, inner, functools.partial(step, seen), nothing)
        carry = jax.lax.fori_loop(inner, outer, functools.partial(step, None), carry)
        acc, top, total = jax.lax.fori_loop(outer, last, functools.partial(step, seen), carry)
        queries.leave(i)
        empty = total == 0
        share = 1 / jnp.where(empty, 1.0, total)
        lse = jnp.where(empty, -jnp.inf, top / LOG2_E + jnp.log(total))
        return acc * spread(share, acc.shape), lse, done + last - first

    def step(self, shared, worker, tiles, this, kept, before, seen, j, carry):
        """One tile into the running softmax; `top` in units of log 2."""
        acc, top, total = carry
        stage = tiles.arrived(before + j)
        v = shared["v"].at[stage]
        if seen is not None:
            self.clean(v, this, j)
        shape = (WARPGROUP_ROWS, self.tile.keys)
        scores = self.ops.matmul(shared["q"].at[worker], shared["k"].at[stage], transpose_b=True)
        scores = self.logits(scores)
        if seen is not None:
            slot = self.ops.iota(shape, 1) + j * self.tile.keys
            scores = jnp.where(seen(slot), scores, -jnp.inf)
        if kept is not None:
            of_tile = pl.ds(j * self.tile.keys, self.tile.keys)
            self.store(shared, worker, scores, kept.at[:, of_tile])
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        # Rows that saw nothing yet.
        shift = higher if seen is None else jnp.where(higher == -jnp.inf, 0.0, higher)
        old = jnp.exp2(top - shift)
        weights = jnp.exp2(scores - spread(shift, shape))
        total = total * old + jnp.sum(weights, axis=1)
        acc = acc * spread(old, acc.shape)
        acc = self.ops.accumulate(acc, weights.astype(v.dtype), v)
        tiles.leave(before + j)
        return acc, higher, total

    def logits(self, scores):
        """In units of log 2."""
        if self.soft_cap is None:
            return scores * (self.scale * LOG2_E)
        return tanh(scores * (self.scale / self.soft_cap)) * (self.soft_cap * LOG2_E)

    def clean(self, v, this, j):
        """Zeros in the values of slots that nobody sees: nothing times no number is no number."""
        start = j * self.tile.keys
        low, high = this.begin - start, this.end - start

        @pl.when((low > 0) | (high < self.tile.keys))
        def _():
            for column in range(0, v.shape[1], COLUMNS):
                part = v.at[:, pl.ds(column, COLUMNS)]
                row = self.ops.iota(part.shape, 0)
                part[...] = jnp.where(
                    (row >= low) & (row < high), part[...], jnp.zeros((), v.dtype)
                )
            plgpu.commit_smem()

    def store(self, shared, worker, value, there):
        """The rows of a matrix that are somebody's to global memory, through shared memory."""
        leaving = shared["leaving"].at[worker, :, pl.ds(0, value.shape[1])]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.ops.store(leaving, value)
        plgpu.commit_smem()
        here = shared["leaving"].at[worker, pl.ds(0, self.rows), pl.ds(0, value.shape[1])]
        self.ops.copy_out(here, there)
