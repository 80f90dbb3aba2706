"""Grouped matmul as kernels for Hopper GPUs.

A block has three warpgroups: one copies tiles of both operands into a ring of stages, two multiply
them, 64 rows of the output each. Row tiles start with their group, or up to 7 rows before it where
copies could not start (`ALIGN`), so none serves two groups; a tile with rows of other groups stores
its own alone (`schedule.Visits`), as other blocks may write theirs at the same time.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

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
    stage_barriers,
    why_not_hardware,
)
from colossax.pallas.mosaic import vector as plain
from colossax.pallas.mosaic import why_slow as why_slow
from colossax.pallas.target import Target

from .schedule import Visits, row_visits
from .spec import GroupedSpec

ROWS = 2 * WARPGROUP_ROWS
"""Of a tile of the output: one `wgmma` for each of two warpgroups."""

ALIGN = 8
"""Row tiles start at multiples of it, and rows are padded to one: see `mosaic.copies`."""

DEPTH = 64
"""Summed over per stage: 128 bytes, the widest swizzle."""

FEATURES = 128
"""Sizes of features are padded to a multiple of this."""

CHUNK = 32
"""Columns stored at once; two chunks per warpgroup are on their way."""

EDGE = 64
"""Columns of a chunk of which only some rows are stored."""

COPIER = 2
"""The warpgroup that loads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut.

    Attributes:
        columns: Of a tile of the output, a multiple of `FEATURES`.
        stages: Of the ring of operands.
        strip: Column tiles that are visited for one row tile before the next row tile's, so that
            the blocks running at one time read few distinct rows and columns.
        blocks: That run at one time, and stay while there are tiles; None for one on each
            multiprocessor of the target that is not spared.
    """

    columns: int
    stages: int
    strip: int = 8
    blocks: int | None = None


WIDE = Tiles(columns=256, stages=4)
NARROW = Tiles(columns=128, stages=5)


def default_tiles(columns: int) -> Tiles:
    """For an output with so many columns, a multiple of `FEATURES`."""
    return WIDE if columns % WIDE.columns == 0 else NARROW


def why_not(spec: GroupedSpec, target: Target) -> str | None:
    """The first thing about this call that the kernels cannot do."""
    return why_not_hardware(target) or why_no_shape(spec)


def why_no_shape(spec: GroupedSpec) -> str | None:
    """What about sizes and dtype the kernels cannot do, wherever they run."""
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel takes bfloat16 and float16, found {spec.dtype}"
    for name, size in (("d", spec.features_in), ("f", spec.features_out)):
        if size % 8:
            return f"{name} = {size} is not a multiple of 8"
    return None


def multiply(
    x: Float[Array, "t k"],
    w: Float[Array, "e _ _"],
    group_sizes: Int[Array, " e"],
    *,
    transposed: bool = False,
    tiles: Tiles | None = None,
    spared: int = 0,
    interpret: bool = False,
) -> Float[Array, "t n"]:
    """`x_i @ w[i]` (`x_i @ w[i].T`) for every group i, zeros after the last.

    Its blocks take nearly all shared memory and stay until the end: beside them nothing runs but on
    the multiprocessors that are `spared`.

    Cost: 2 v ROWS k n FLOPs, v <= t / ROWS + e row tiles of groups. Features that are no multiple
    of `FEATURES` cost a padded copy of both operands and one of the output; rows that are no
    multiple of `ALIGN`, or fewer than `ROWS`, one of x and the output.
    """
    rows, columns = x.shape[0], w.shape[1 if transposed else 2]
    x = _padded(x, (ROWS, None), (ALIGN, FEATURES))
    w = _padded(w, (None, None, None), (1, FEATURES, FEATURES))
    wide = w.shape[1 if transposed else 2]
    tiles = tiles or default_tiles(wide)
    visits = row_visits(group_sizes, x.shape[0], ROWS, align=ALIGN)
    block = (tiles.columns, DEPTH) if transposed else (DEPTH, tiles.columns)
    scratch = _Scratch(
        x=matrix((tiles.stages, ROWS, DEPTH), x.dtype),
        w=matrix((tiles.stages, *block), x.dtype),
        chunks=matrix((2, 2, WARPGROUP_ROWS, CHUNK), x.dtype),
        edges=plain((2, WARPGROUP_ROWS, EDGE), x.dtype),
        barriers=stage_barriers(tiles.stages, copies=2, readers=2),
    )
    assert shared_bytes(scratch) <= SHARED_BYTES, tiles
    most = visits.group.shape[0] * (wide // tiles.columns)
    run = launch(
        functools.partial(_multiply, Ops(interpret=interpret), tiles, transposed),
        out=(jax.ShapeDtypeStruct((x.shape[0], wide), x.dtype),),
        scratch=[scratch],
        grid={"block": min(tiles.blocks or max(1, multiprocessors() - spared), most)},
        warpgroups=3,
        interpret=interpret,
    )
    (out,) = run(visits, x, w)
    return out[:rows, :columns]


class _Scratch(NamedTuple):
    """Shared memory of a block of `multiply`.

    Attributes:
        x: Stages of tiles of x.
        w: Stages of tiles of w.
        chunks: Columns on their way to the output, two chunks for each warpgroup.
        edges: Columns of which only some rows are stored, for each warpgroup.
        barriers: Of the stages.
    """

    x: Any
    w: Any
    chunks: Any
    edges: Any
    barriers: Any


def _multiply(
    ops: Ops,
    tiles: Tiles,
    transposed: bool,
    visits: Visits,
    x: Any,
    w: Any,
    out: Any,
    shared: _Scratch,
) -> None:
    """Body: tiles of the output dealt out in turn, the copier ahead of the others."""
    stages = Stages(ops, {"x": shared.x, "w": shared.w}, shared.barriers, tiles.stages)
    groups = w.shape[0]
    across = out.shape[1] // tiles.columns
    block, blocks = jax.lax.axis_index("block"), jax.lax.axis_size("block")
    wg = jax.lax.axis_index("wg")
    count = visits.count[0]
    mine = jax.lax.div(count * across - block + blocks - 1, blocks)

    def place(i):
        visit, column = _in_strips(block + i * blocks, count, across, tiles.strip)
        steps = jnp.where(visits.group[visit] < groups, x.shape[1] // DEPTH, 0)
        return visit, column * tiles.columns, steps

    @pl.when(wg == COPIER)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")

        def tile(i, done):
            visit, column, steps = place(i)
            rows = pl.ds(visits.first[visit], ROWS)
            which = jnp.minimum(visits.group[visit], groups - 1)
            columns = pl.ds(column, tiles.columns)

            def stage(k, done):
                depth = pl.ds(k * DEPTH, DEPTH)
                of_w = (columns, depth) if transposed else (depth, columns)
                stages.fill(done, {"x": x.at[rows, depth], "w": w.at[which, *of_w]})
                return done + 1

            return jax.lax.fori_loop(0, steps, stage, done)

        stages.drain(jax.lax.fori_loop(0, mine, tile, jnp.int32(0)))

    @pl.when(wg != COPIER)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        my_rows = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)

        def tile(i, done):
            visit, column, steps = place(i)

            def operands(k):
                slot = stages.arrived(done + k)
                return shared.x.at[slot, my_rows], shared.w.at[slot]

            def release(k):
                stages.leave(done + k)

            acc = ops.sum_of_products(
                (WARPGROUP_ROWS, tiles.columns), steps, operands, release, transpose_b=transposed
            )
            start = wg * WARPGROUP_ROWS
            values = acc.astype(x.dtype)
            rows = pl.ds(visits.first[visit] + start, WARPGROUP_ROWS)
            _store(
                ops,
                values,
                out.at[rows, pl.ds(column, tiles.columns)],
                shared.chunks.at[wg],
                shared.edges.at[wg],
                jnp.clip(visits.low[visit] - start, 0, WARPGROUP_ROWS),
                jnp.clip(visits.high[visit] - start, 0, WARPGROUP_ROWS),
            )
            return done + steps

        jax.lax.fori_loop(0, mine, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _store(
    ops: Ops, values: Array, out: Any, chunks: Any, edge: Any, low: Array, high: Array
) -> None:
    """Rows `[low, high)` of what one warpgroup holds to global memory, through shared memory."""
    everything = (low == 0) & (high == WARPGROUP_ROWS)

    @pl.when(everything)
    def _full():
        _store_full(ops, values, out, chunks)

    @pl.when(jnp.logical_not(everything) & (low < high))
    def _some():
        # A bulk copy has a fixed size, so powers of two add up to the rows; between swizzled rows
        # it could not begin everywhere, so these are plain.
        for i in range(values.shape[1] // EDGE):
            columns = slice(i * EDGE, (i + 1) * EDGE)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            ops.store(edge, values[:, columns])
            plgpu.commit_smem()
            row, size = low, WARPGROUP_ROWS // 2
            while size:
                part = (high - low) & size

                @pl.when(part != 0)
                def _(row=row, size=size, columns=columns):
                    rows = pl.ds(row, size)
                    ops.copy_out(edge.at[rows], out.at[rows, columns])

                row, size = row + part, size // 2


def _store_full(ops: Ops, values: Array, out: Any, chunks: Any) -> None:
    """What one warpgroup holds to global memory, chunk after chunk, one of them on its way."""
    for i in range(values.shape[1] // CHUNK):
        columns = slice(i * CHUNK, (i + 1) * CHUNK)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        chunks[i % 2] = values[:, columns]
        plgpu.commit_smem()
        ops.copy_out(chunks.at[i % 2], out.at[:, columns])


def _in_strips(index: Array, down: Array | int, across: int, strip: int) -> tuple[Array, Array]:
    """Row and column of the tile at `index`: strips of columns, each row by row."""
    strip = min(strip, across)
    which = jax.lax.div(index, down * strip)
    left = which * strip
    width = jnp.minimum(strip, across - left)
    within = index - left * down
    return jax.lax.div(within, width), left + jax.lax.rem(within, width)


def _padded(x: Array, least: tuple[int | None, ...], multiples: tuple[int, ...]) -> Array:
    """With zeros up to sizes of at least `least` that are multiples."""
    sizes = [
        max(pl.cdiv(size, multiple) * multiple, low or 0)
        for size, low, multiple in zip(x.shape, least, multiples, strict=True)
    ]
    if tuple(sizes) == x.shape:
        return x
    return jnp.pad(x, [(0, new - old) for new, old in zip(sizes, x.shape, strict=True)])


def weight_gradient(
    x: Float[Array, "t d"],
    dy: Float[Array, "t f"],
    group_sizes: Int[Array, " e"],
    *,
    dtype: Any = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "e d f"]:
    """`x_i.T @ dy_i` for every group i, summed in float32, in x's dtype and cast to another after.

    Longest groups first, as blocks are many and each takes as long as its group.

    Cost: 2 (t + e DEPTH) d f FLOPs or less; padded copies as in `multiply`.
    """
    groups = group_sizes.shape[0]
    d, f = x.shape[1], dy.shape[1]
    x, dy = (_padded(z, (DEPTH, None), (ALIGN, FEATURES)) for z in (x, dy))
    wide_d, wide_f = x.shape[1], dy.shape[1]
    tiles = tiles or default_tiles(wide_f)
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), x.shape[0])
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    schedule = _Groups(jnp.argsort(starts - ends).astype(jnp.int32), starts, ends)
    scratch = _GradientScratch(
        x=matrix((tiles.stages, DEPTH, ROWS), x.dtype),
        dy=matrix((tiles.stages, DEPTH, tiles.columns), x.dtype),
        chunks=matrix((2, 2, WARPGROUP_ROWS, CHUNK), x.dtype),
        barriers=stage_barriers(tiles.stages, copies=2, readers=2),
        masked=plgpu.Barrier(num_arrivals=2),
    )
    assert shared_bytes(scratch) <= SHARED_BYTES, tiles
    run = launch(
        functools.partial(_weight_gradient, Ops(interpret=interpret), tiles),
        out=(jax.ShapeDtypeStruct((groups, wide_d, wide_f), x.dtype),),
        scratch=[scratch],
        grid={"group": groups, "tile": (wide_d // ROWS) * (wide_f // tiles.columns)},
        warpgroups=3,
        interpret=interpret,
    )
    (out,) = run(schedule, x, dy)
    return out[:, :d, :f].astype(x.dtype if dtype is None else dtype)


class _Groups(NamedTuple):
    """Where rows of groups are.

    Attributes:
        order: Groups, the longest first.
        starts: First row of each group.
        ends: One past the last.
    """

    order: Any
    starts: Any
    ends: Any


class _GradientScratch(NamedTuple):
    """Shared memory of a block of `weight_gradient`.

    Attributes:
        x: Stages of tiles of x.
        dy: Stages of tiles of dy.
        chunks: Columns on their way to the output, two chunks for each warpgroup.
        barriers: Of the stages.
        masked: Both warpgroups have zeroed rows of other groups.
    """

    x: Any
    dy: Any
    chunks: Any
    barriers: Any
    masked: Any


def _weight_gradient(
    ops: Ops, tiles: Tiles, schedule: _Groups, x: Any, dy: Any, out: Any, shared: _GradientScratch
) -> None:
    """Body: one tile of one group's matrix, summed over the rows of the group."""
    stages = Stages(ops, {"x": shared.x, "dy": shared.dy}, shared.barriers, tiles.stages)
    wg = jax.lax.axis_index("wg")
    group = schedule.order[jax.lax.axis_index("group")]
    start, end = schedule.starts[group], schedule.ends[group]
    aligned = start - jax.lax.rem(start, ALIGN)
    steps = jnp.where(start < end, jax.lax.div(end - aligned + DEPTH - 1, DEPTH), 0)
    down, across = x.shape[1] // ROWS, dy.shape[1] // tiles.columns
    row, column = _in_strips(jax.lax.axis_index("tile"), down, across, tiles.strip)
    row, column = row * ROWS, column * tiles.columns

    def first(k):
        return jnp.minimum(aligned + k * DEPTH, x.shape[0] - DEPTH)

    @pl.when(wg == COPIER)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")

        def stage(k, _):
            rows, columns = pl.ds(first(k), DEPTH), pl.ds(column, tiles.columns)
            stages.fill(k, {"x": x.at[rows, pl.ds(row, ROWS)], "dy": dy.at[rows, columns]})

        jax.lax.fori_loop(0, steps, stage, None)
        stages.drain(steps)

    @pl.when(wg != COPIER)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        half = tiles.columns // 2
        mine = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)

        def operands(k):
            slot = stages.arrived(k)
            step_start = aligned + k * DEPTH
            low = jnp.maximum(step_start, start) - first(k)
            high = jnp.minimum(step_start + DEPTH, end) - first(k)

            # Both operands, as a row of another group may be infinite.
            @pl.when((low > 0) | (high < DEPTH))
            def _():
                _keep_rows(ops, shared.x.at[slot, :, mine], low, high)
                for i in range(half // WARPGROUP_ROWS):
                    columns = pl.ds(wg * half + i * WARPGROUP_ROWS, WARPGROUP_ROWS)
                    _keep_rows(ops, shared.dy.at[slot, :, columns], low, high)
                plgpu.commit_smem()
                plgpu.barrier_arrive(shared.masked)
                plgpu.barrier_wait(shared.masked)

            return shared.x.at[slot, :, mine], shared.dy.at[slot]

        acc = ops.sum_of_products(
            (WARPGROUP_ROWS, tiles.columns), steps, operands, stages.leave, transpose_a=True
        )
        rows = pl.ds(row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        there = out.at[group, rows, pl.ds(column, tiles.columns)]
        _store_full(ops, acc.astype(x.dtype), there, shared.chunks.at[wg])
        plgpu.wait_smem_to_gmem(0)


def _keep_rows(ops: Ops, ref: Any, low: Array, high: Array) -> None:
    """Zeros in all rows of a square but `[low, high)`."""
    row = ops.iota(ref.shape, 0)
    ref[...] = jnp.where((row >= low) & (row < high), ref[...], jnp.zeros((), ref.dtype))
