"""The forward pass of flash attention on compute capability 9.0.

A block has 128 queries of one head. One warpgroup fetches tiles of keys and values into a ring in
shared memory; two warpgroups compute 64 rows each, taking turns, so that the tensor cores multiply
for one while the other computes its softmax.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from colossax.pallas.attention.mask import RANGES
from colossax.pallas.attention.tiles import visits_of_queries
from colossax.pallas.mosaic import (
    WARPGROUP_ROWS,
    Ops,
    Stages,
    launch,
    matrix,
    spread,
    stage_barriers,
    tanh,
)
from colossax.pallas.padding import pad_to_multiple

from .shapes import BLOCK_ROWS, WARPGROUPS, Tile, tile_for

LOG2_E = math.log2(math.e)

KERNEL_NAME = "flash_attention"
"""Part of the name of the operation in compiled programs."""


def forward(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    lo: Int[Array, "_ s"] | None = None,
    hi: Int[Array, "_ s"] | None = None,
    bias: Float[Array, "_ _ s t"] | None = None,
    visits: "ForwardVisits | None" = None,
    carried: tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]] | None = None,
    scale: float,
    soft_cap: float | None = None,
    dtype: Any,
    interpret: bool = False,
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Softmax attention of each query to its range of keys, and the log-partition.

        logits = soft_cap * tanh(q . k * scale / soft_cap) + bias
        lse    = log(sum of exp(logits) over keys in [lo, hi));  out = sum of exp(logits - lse) v

    Args:
        q: Queries in bfloat16 or float16; head i reads kv head `i // (n / k)`.
        k: Keys.
        v: Values.
        lo: First key that a query sees, `[b or 1, s]`.
        hi: One behind the last, likewise; where `hi <= lo` the output is 0 and lse -inf.
        bias: `[b or 1, n or 1, s, t]`, float32, bfloat16 or float16.
        visits: Those of these ranges, where they are known; `lo` and `hi` then are not read.
        carried: Output and lse of the same queries over other keys, in float32, 0 and -inf where
            they saw none. The result then is attention to both: the running softmax starts from
            these in place of nothing, as `merge_blocks` of two results without its pass over them.
        scale: Factor of the products.
        soft_cap: Bound of the logits before the bias.
        dtype: Of the output: that of q, or float32.
        interpret: Whether to run it on the CPU.

    Returns:
        Output, and lse in float32 with the natural logarithm.

    Cost: 2 P n (h + hv) FLOPs for P pairs of a query and a key in tiles that are visited; keys and
    values are read once per block of 128 queries and head, `s t n (h + hv) / 128` items a row, most
    of it from the L2 cache. What is carried is read once, 4 s n (hv + 1) bytes a row, and
    a float32 output takes its memory. Lengths that tiles do not divide are filled up by a copy.
    Source: Dao 2023, FlashAttention-2; Shah et al. 2024, FlashAttention-3 (the turns).
    """
    s = q.shape[1]
    tile = tile_for(q.shape[3], v.shape[3], None if bias is None else bias.dtype)
    q = pad_to_multiple(q, {1: BLOCK_ROWS})
    k, v = (pad_to_multiple(x, {1: tile.keys}) for x in (k, v))
    if visits is None:
        assert lo is not None and hi is not None
        with jax.named_scope(RANGES):
            visits = ForwardVisits.of(lo, hi, tile)
    if bias is not None:
        bias = pad_to_multiple(bias, {2: BLOCK_ROWS, 3: tile.keys})
    if carried is not None:
        carried = (
            pad_to_multiple(carried[0], {1: BLOCK_ROWS}),
            pad_to_multiple(carried[1], {2: BLOCK_ROWS}),
        )
    kernel = _Forward(
        ops=Ops(interpret=interpret),
        tile=tile,
        group=q.shape[2] // k.shape[2],
        scale=scale,
        soft_cap=soft_cap,
        dtype=jnp.dtype(dtype),
        biased=bias is not None,
        carries=carried is not None,
        stepped=visits.step is not None,
    )
    given = (
        q,
        k,
        v,
        visits.lo,
        visits.hi,
        visits.plan,
        *(() if visits.step is None else (visits.step,)),
        *(() if bias is None else (bias,)),
        *(carried or ()),
    )
    b, rows, n, _ = q.shape
    run = launch(
        kernel.body,
        out=(
            jax.ShapeDtypeStruct((b, rows, n, v.shape[3]), dtype),
            jax.ShapeDtypeStruct((b, n, rows), jnp.float32),
        ),
        scratch=kernel.scratch(q, v, bias),
        # Blocks that run side by side share the keys of a head in the L2 cache.
        grid={"batch": b, "kv_heads": k.shape[2], "rows": rows // BLOCK_ROWS * kernel.group},
        warpgroups=WARPGROUPS + 1,
        interpret=interpret,
        in_place=carried is not None and kernel.dtype == jnp.float32,
    )
    with jax.named_scope(KERNEL_NAME):
        out, lse = run(*given)
    return out[:, :s], lse[:, :, :s]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardVisits:
    """What the kernel reads of a mask, filled up to whole blocks: rows' ranges, and blocks' tiles.

    Attributes:
        lo: `[b or 1, s]`.
        hi: Likewise.
        plan: `[b or 1, blocks, 5]`, see `_plan`.
        step: None; or int32 `[1]`, where all these are stacks over the steps of a ring: which step
            it is. The kernel reads it: else XLA copied the step's part of each stack beforehand.
    """

    lo: Any
    hi: Any
    plan: Any
    step: Any = None

    @classmethod
    def of(cls, lo: Int[Array, "_ s"], hi: Int[Array, "_ s"], tile: Tile) -> "ForwardVisits":
        """Of queries that see keys `[lo, hi)`."""
        # Rows that are filled up see what the last one sees: they widen no range.
        lo, hi = (pad_to_multiple(x, {1: BLOCK_ROWS}, mode="edge") for x in (lo, hi))
        return cls(lo=lo, hi=hi, plan=_plan(lo, hi, tile.keys))


def _plan(lo: Array, hi: Array, kv_tile: int) -> Int[Array, "b tiles 5"]:
    """For each block, the longest first: its place along the row, and its four visits.

    The last blocks of a grid then are short ones, and the device idles little at the end.
    """
    visits = visits_of_queries(lo, hi, BLOCK_ROWS, kv_tile)
    order = jnp.argsort(visits.first - visits.last, axis=1).astype(jnp.int32)
    by_length = jnp.take_along_axis(visits.packed, order[..., None], axis=1)
    return jnp.concatenate([order[..., None], by_length], axis=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Forward:
    """The kernel; what its code depends on."""

    ops: Ops
    tile: Tile
    group: int
    scale: float
    soft_cap: float | None
    dtype: Any
    biased: bool
    carries: bool
    stepped: bool

    def scratch(self, q: Array, v: Array, bias: Array | None) -> dict[str, Any]:
        """Shared memory of a block."""
        tile, h, hv = self.tile, q.shape[3], v.shape[3]
        barriers = functools.partial(stage_barriers, readers=WARPGROUPS)
        scratch = {
            "q": matrix((WARPGROUPS, WARPGROUP_ROWS, h), q.dtype),
            "k": matrix((tile.stages, tile.keys, h), q.dtype),
            "v": matrix((tile.stages, tile.keys, hv), q.dtype),
            "q_arrived": plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
            "k_stages": barriers(tile.stages, copies=1),
            "v_stages": barriers(tile.stages, copies=1),
            "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
        }
        if bias is not None:
            shape = (tile.bias_stages, WARPGROUPS, WARPGROUP_ROWS, tile.keys)
            scratch["bias"] = matrix(shape, bias.dtype)
            scratch["bias_stages"] = barriers(tile.bias_stages, copies=WARPGROUPS)
        return scratch

    def stages(self, shared: dict[str, Any]) -> tuple[Stages, ...]:
        """Of keys, of values and, if there is one, of the bias."""
        counts = {"k_stages": self.tile.stages, "v_stages": self.tile.stages}
        if self.biased:
            counts["bias_stages"] = self.tile.bias_stages
        return tuple(Stages(self.ops, shared, shared[name], n) for name, n in counts.items())

    def body(self, q, k, v, lo, hi, plan, *rest):
        *given, out, lse, shared = rest
        if self.stepped:
            step = given.pop(0)[0]
            lo, hi, plan = (x.at[step] for x in (lo, hi, plan))
        bias = given[0] if self.biased else None
        carried = given[-2:] if self.carries else None
        batch = jax.lax.axis_index("batch")
        kv_head = jax.lax.axis_index("kv_heads")
        place = jax.lax.axis_index("rows")
        head = kv_head * self.group + jax.lax.rem(place, self.group)
        of_plan = plan.at[_at(plan, 0, batch), jax.lax.div(place, self.group)]
        row, *bounds = (of_plan[i] for i in range(5))
        row = row * BLOCK_ROWS
        wg = jax.lax.axis_index("wg")

        @pl.when(wg == WARPGROUPS)
        def _memory():
            plgpu.set_max_registers(24, action="decrease")
            self.fetch(q, k, v, bias, shared, bounds[0], bounds[3], batch, head, kv_head, row)

        @pl.when(wg < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            mine = pl.ds(row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
            of_rows = (x.at[_at(x, 0, batch), mine] for x in (lo, hi))
            seen = tuple(self.ops.vector(x) for x in of_rows)
            rows, target = lse.at[batch, head, mine], out.at[batch, mine, head]
            start = self.nothing(v.shape[3])
            if carried is not None:
                start = self.resumed(
                    carried[0].at[batch, mine, head], carried[1].at[batch, head, mine]
                )
            out_rows, total = self.attend(shared, wg, seen, bounds, start)
            rows[...] = total
            if self.dtype == q.dtype and v.shape[3] == q.shape[3]:
                staged = shared["q"].at[wg]
                staged[...] = out_rows.astype(self.dtype)
                plgpu.commit_smem()
                self.ops.copy_out(staged, target)
                plgpu.wait_smem_to_gmem(0)
            else:
                # No room for it in shared memory: straight from the registers.
                target[...] = out_rows.astype(self.dtype)

    def fetch(self, q, k, v, bias, shared, first, last, batch, head, kv_head, row):
        """What the memory warpgroup does: queries, then tiles into the rings as they fall free."""

        def rows(wg):
            return pl.ds(row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)

        for wg in range(WARPGROUPS):
            arrived = shared["q_arrived"].at[wg]
            self.ops.copy_in(q.at[batch, rows(wg), head], shared["q"].at[wg], arrived)

        keys, values, *biases = self.stages(shared)

        @pl.loop(first, last)
        def _tile(j):
            seen = pl.ds(j * self.tile.keys, self.tile.keys)
            keys.fill(j - first, {"k": k.at[batch, seen, kv_head]})
            for stages in biases:
                of_head = bias.at[_at(bias, 0, batch), _at(bias, 1, head)]
                parts = [of_head.at[rows(wg), seen] for wg in range(WARPGROUPS)]
                stages.fill(j - first, {"bias": parts})
            values.fill(j - first, {"v": v.at[batch, seen, kv_head]})

        for stages in (keys, values, *biases):
            stages.drain(last - first)

    def nothing(self, columns):
        """The running softmax of 64 rows over no keys: sum, greatest logit in log 2, total."""
        full = self.ops.full
        return (
            full((WARPGROUP_ROWS, columns), 0.0),
            full((WARPGROUP_ROWS,), -jnp.inf),
            full((WARPGROUP_ROWS,), 0.0),
        )

    def resumed(self, out, lse):
        """The running softmax where its output and log-partition are known.

        Any logit may be the greatest, as long as the total fits it: for lse itself that is 1.
        """
        top = self.ops.vector(lse) * LOG2_E
        full = functools.partial(self.ops.full, (WARPGROUP_ROWS,))
        return self.ops.plain(out), top, jnp.where(top == -jnp.inf, full(0.0), full(1.0))

    def attend(self, shared, wg, seen, bounds, carry):
        """What a computing warpgroup does: output of its 64 rows, and their lse."""
        first, inner_first, inner_last, last = bounds

        def turn():
            plgpu.barrier_arrive(shared["turn"])
            plgpu.barrier_wait(shared["turn"])

        plgpu.barrier_wait(shared["q_arrived"].at[wg])
        # Half a step behind the other warpgroup, from here on.
        pl.when(wg == 1)(turn)
        masked, unmasked = (
            functools.partial(self.step, shared, wg, first, turn, x) for x in (seen, None)
        )
        carry = jax.lax.fori_loop(first, inner_first, masked, carry)
        carry = jax.lax.fori_loop(inner_first, inner_last, unmasked, carry)
        acc, top, total = jax.lax.fori_loop(inner_last, last, masked, carry)
        pl.when(wg == 0)(turn)
        empty = total == 0
        share = 1 / jnp.where(empty, 1.0, total)
        lse = jnp.where(empty, -jnp.inf, top / LOG2_E + jnp.log(total))
        return acc * spread(share, acc.shape), lse

    def step(self, shared, wg, first, turn, seen, j, carry):
        """One tile of keys into the running softmax; `top` in units of log 2."""
        acc, top, total = carry
        keys, values, *biases = self.stages(shared)
        k = shared["k"].at[keys.arrived(j - first)]
        scores = self.ops.matmul(shared["q"].at[wg], k, transpose_b=True, meanwhile=turn)
        keys.leave(j - first)
        scores, factor = self.logits(scores)
        for stages in biases:
            bias = shared["bias"].at[stages.arrived(j - first), wg]
            scores = scores + self.ops.tile(bias) * LOG2_E
            plgpu.commit_smem()  # read before the next copy writes
            stages.leave(j - first)
        if seen is not None:
            key = self.ops.iota(scores.shape, 1) + j * self.tile.keys
            lo, hi = (spread(x, scores.shape) for x in seen)
            scores = jnp.where((key >= lo) & (key < hi), scores, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
        # Rows that saw nothing yet; a bias may hide what the mask does not.
        shift = higher
        if seen is not None or self.biased:
            shift = jnp.where(higher == -jnp.inf, 0.0, higher)
        before = jnp.exp2(top - shift)
        weights = jnp.exp2(scores * factor - spread(shift, scores.shape))
        total = total * before + jnp.sum(weights, axis=1)
        acc = acc * spread(before, acc.shape)
        narrow = weights.astype(shared["v"].dtype)
        # Else the compiler moves the softmax behind the turn.
        acc, total, higher, narrow = jax.lax.optimization_barrier((acc, total, higher, narrow))
        plgpu.barrier_arrive(shared["turn"])
        v = shared["v"].at[values.arrived(j - first)]
        plgpu.barrier_wait(shared["turn"])
        acc = self.ops.accumulate(acc, narrow, v)
        values.leave(j - first)
        return acc, higher, total

    def logits(self, scores):
        """Scores, and the factor yet to come that makes them logits in units of log 2."""
        if self.soft_cap is not None:
            capped = tanh(scores * (self.scale / self.soft_cap))
            scores, factor = capped, self.soft_cap * LOG2_E
        else:
            factor = self.scale * LOG2_E
        # A factor left for later is one instruction less per score, but the greatest score must
        # stay the greatest, and a bias comes in between.
        if self.biased or factor <= 0:
            return scores * factor, 1.0
        return scores, factor


def _at(x: Any, dim: int, index: Any) -> Any:
    """Where along a dim that may be 1 for all."""
    return 0 if x.shape[dim] == 1 else index
