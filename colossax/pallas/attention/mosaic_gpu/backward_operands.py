"""What the kernels of the backward pass share: their operands and one tile of probabilities."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from colossax.pallas.attention.tiles import visits_of_keys, visits_of_queries
from colossax.pallas.mosaic import Ops, tanh
from colossax.pallas.padding import pad_to_multiple

from .backward_tiles import BackwardTiles

LOG2_E = math.log2(math.e)

COPY_REGISTERS = 24
"""Of a thread of the warpgroup that only starts copies; the others share what it leaves."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardVisits:
    """What the kernels read of a mask, filled up to whole tiles.

    Attributes:
        ranges: int32 `[b or 1, 2, s]`: `lo` and `hi`.
        of_queries: `Visits.packed` of the blocks of dq.
        of_keys: Those of dk and dv.
        of_bias: Those of dbias, or None.
        step: As of `ForwardVisits`.
    """

    ranges: Any
    of_queries: Any
    of_keys: Any
    of_bias: Any
    step: Any = None

    @classmethod
    def of(
        cls, lo: jax.Array, hi: jax.Array, t: int, tiles: BackwardTiles, biased: bool
    ) -> "BackwardVisits":
        """Of queries that see keys `[lo, hi)` of `t`."""
        # Rows filled in have an empty range, which widens none.
        ranges = pad_to_multiple(jnp.stack([lo, hi], axis=1), {2: tiles.s_multiple})
        lo, hi = ranges[:, 0], ranges[:, 1]
        rows, keys, bias = tiles.of_queries, tiles.of_keys, tiles.of_bias
        key_tiles = -(-t // tiles.t_multiple) * tiles.t_multiple // keys.keys
        seen = visits_of_queries(lo, hi, keys.queries, keys.keys)
        return cls(
            ranges=ranges,
            of_queries=visits_of_queries(lo, hi, rows.rows, rows.keys).packed,
            of_keys=visits_of_keys(seen, key_tiles).packed,
            of_bias=visits_of_queries(lo, hi, bias.rows, bias.keys).packed if biased else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """Arrays padded to whole tiles, and what a trace depends on.

    Attributes:
        q, k, v, dout: `[b s n h]`, `[b t k h]`, `[b t k hv]`, `[b s n hv]`.
        rows: float32 `[b n 2 s]`: the log-partition in base 2, infinite where a row sees nothing,
            and `delta`.
        visits: What they read of the mask.
        bias: `[b or 1, n or 1, s, t]` or None.
        scale: Of the scores.
        soft_cap: See `api.attention`.
        dtype: Of the gradients.
        interpret: Whether kernels are interpreted.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any
    visits: BackwardVisits
    bias: Any
    scale: float
    soft_cap: float | None
    dtype: Any
    interpret: bool

    @property
    def ops(self) -> Ops:
        return Ops(interpret=self.interpret)

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Those that every kernel takes, in order."""
        return self.q, self.k, self.v, self.dout, self.rows, self.visits.ranges

    @property
    def biases(self) -> tuple[jax.Array, ...]:
        """The bias, if there is one."""
        return () if self.bias is None else (self.bias,)

    @property
    def steps(self) -> tuple[jax.Array, ...]:
        """Which step of a ring it is, where visits are stacks over those."""
        return () if self.visits.step is None else (self.visits.step,)

    def of_step(self, ranges: Any, visits: Any, others: list[Any]) -> tuple[Any, Any]:
        """References to this step's ranges and visits; takes `steps` off the front of `others`."""
        if not self.steps:
            return ranges, visits
        step = others.pop(0)[0]
        return ranges.at[step], visits.at[step]


def weigh(
    operands: Operands, scores: jax.Array, bias: jax.Array | None, lse: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """`exp(logit - lse)`, and d(capped)/d(score) without its scale, None where that is 1.

    The logit is `cap tanh(scale score / cap) + bias`; `lse` is in base 2, one per score.
    """
    if operands.soft_cap is None:
        slope, logits = None, scores * (operands.scale * LOG2_E)
    else:
        capped = tanh(scores * (operands.scale / operands.soft_cap))
        slope, logits = 1.0 - capped * capped, capped * (operands.soft_cap * LOG2_E)
    if bias is not None:
        logits = logits + bias * LOG2_E
    return jnp.exp2(logits - lse), slope


def pull_back(
    weights: jax.Array, dweights: jax.Array, delta: jax.Array, slope: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the bias, and of the scores without their scale."""
    dbias = weights * (dweights - delta)
    return dbias, dbias if slope is None else dbias * slope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """The tiles that one block visits: first the `edges`, which need a mask, then the others.

    Two loops in place of three: where sums of all registers of a warpgroup pass from loop to loop,
    each loop more costs copies, and at head size 256 spills.
    """

    first: Any
    inner_first: Any
    inner_last: Any
    last: Any

    @classmethod
    def of(cls, visits: Any, *index: Any) -> "Walk":
        """Of the block at `index` of `Visits.packed`, in global memory."""
        first, inner_first, inner_last, last = (visits[*index, i] for i in range(4))
        return cls(first=first, inner_first=inner_first, inner_last=inner_last, last=last)

    @property
    def steps(self) -> Any:
        """Tiles."""
        return self.last - self.first

    @property
    def edges(self) -> Any:
        """Tiles that need a mask."""
        return self.steps - (self.inner_last - self.inner_first)

    def tile(self, step: Any) -> Any:
        """Which tile a step visits."""
        before = self.inner_first - self.first
        edge = jnp.where(step < before, self.first, self.inner_last - before)
        return step + jnp.where(step < self.edges, edge, self.inner_first - self.edges)


def named(body: Callable[..., None], *given: Any) -> Callable[..., None]:
    """`body` with its first arguments given, under its name: profiles show it."""
    return functools.update_wrapper(functools.partial(body, *given), body)


def compute_registers(warpgroups: int) -> int:
    """What a thread gets where `warpgroups` compute and one copies: a multiple of 8.

    All together get what they start with, 65536 in equal multiples of 8 per thread: whoever
    asked for more would wait for ever.
    """
    parts = warpgroups + 1
    return min(240, (512 // parts // 8 * 8 * parts - COPY_REGISTERS) // warpgroups // 8 * 8)


def place(ref: Any, *index: Any) -> tuple[Any, ...]:
    """`index` into the first dims of `ref`, those of size 1 always at 0."""
    return tuple(0 if size == 1 else i for size, i in zip(ref.shape, index, strict=False))


def store(ops: Ops, value: jax.Array, staging: Any, out: Any) -> None:
    """Registers to global memory: float32 as it is, half precision through shared memory."""
    if out.dtype == jnp.float32:
        out[...] = value
        return
    staging[...] = value.astype(out.dtype)
    plgpu.commit_smem()
    ops.copy_out(staging, out)
    plgpu.wait_smem_to_gmem(0)
