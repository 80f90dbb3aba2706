"""Attention by Mosaic GPU kernels: which calls they take, and the rule of their gradient."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from colossax.pallas.attention.mask import RANGES, Mask, row_ranges, why_no_ranges
from colossax.pallas.attention.merge import row_delta, with_sinks
from colossax.pallas.attention.operands import Operands, Scoring
from colossax.pallas.attention.spec import AttentionSpec
from colossax.pallas.mosaic import why_not_hardware
from colossax.pallas.mosaic import why_slow as why_slow
from colossax.pallas.target import Target

from .backward import gradients
from .backward_operands import BackwardVisits
from .backward_tiles import BackwardTiles, tiles_for
from .forward import ForwardVisits, forward
from .shapes import HEAD_SIZES, Tile, tile_for


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """The first thing about this call that the kernels cannot do."""
    return why_not_hardware(target) or why_not_call(spec)


def why_not_call(spec: AttentionSpec) -> str | None:
    """The same, the hardware aside."""
    reasons = (_operands(spec), _bias(spec), _mask(spec))
    return next((r for r in reasons if r is not None), None)


def _operands(spec: AttentionSpec) -> str | None:
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernels take bfloat16 and float16, found {spec.dtype}"
    sizes = spec.head_dim, spec.v_head_dim
    if sizes not in HEAD_SIZES:
        known = ", ".join(str(h) if h == hv else f"{h}/{hv}" for h, hv in HEAD_SIZES)
        return f"head sizes {sizes[0]} of keys and {sizes[1]} of values; there are {known}"
    if 0 in (spec.batch, spec.q_length, spec.kv_length):
        return "there are no tokens"
    if spec.alibi:
        return "alibi_slopes are not available in the kernels"
    if spec.dropout:
        return "dropout is not available in the kernels"
    if spec.checked:
        return "JAX's kernels know no shard_map that checks its values; give check_vma=False"
    return None


def _bias(spec: AttentionSpec) -> str | None:
    if spec.relative:
        return "a RelativeBias is not available in the kernels"
    if len(spec.biases) > 1:
        return f"{len(spec.biases)} biases; the kernels take one, add them up"
    for bias in spec.biases:
        if bias.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"a bias of {bias.dtype}; the kernels take float32, bfloat16 and float16"
        if bias.shape[2:] != (spec.q_length, spec.kv_length):
            return f"bias {bias.shape} is not an array over all queries and keys"
    return None


def _mask(spec: AttentionSpec) -> str | None:
    reason = why_no_ranges(spec.mask)
    if reason is None and not spec.mask.ascends:
        return (
            "segments and positions must ascend along a row, which is not known of these; give"
            " Mask(ascending=True) where they do"
        )
    return reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """What a trace depends on."""

    scale: float
    soft_cap: float | None
    interpret: bool

    @classmethod
    def of(cls, scoring: Scoring, interpret: bool) -> "_Static":
        return cls(scale=scoring.scale, soft_cap=scoring.soft_cap, interpret=interpret)

    @property
    def options(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRanges:
    """What the kernels read of a mask.

    Attributes:
        lo: First key of each query, `[b or 1, s]`.
        hi: One behind the last, likewise.
        forward: `ForwardVisits`, or None: computed where they are needed.
        backward: `BackwardVisits`, or None, likewise.
        made_for: Lengths and tiles.
    """

    lo: Any
    hi: Any
    forward: Any = None
    backward: Any = None
    made_for: Any = dataclasses.field(metadata={"static": True})

    def of_step(self, step: Int[Array, ""]) -> "KernelRanges":
        """Of these, stacks over the steps of a ring, those of one; the kernels pick them."""
        here = step.astype(jnp.int32)[None]
        return dataclasses.replace(
            self,
            forward=dataclasses.replace(self.forward, step=here),
            backward=dataclasses.replace(self.backward, step=here),
        )


def ranges_of(mask: Mask, spec: AttentionSpec) -> KernelRanges:
    """What `attend` reads of the mask, see `api.with_ranges`."""
    lengths, tile, tiles = _made_for(spec)
    rows = _rows_alone(mask, spec)
    with jax.named_scope(RANGES):
        return dataclasses.replace(
            rows,
            forward=ForwardVisits.of(rows.lo, rows.hi, tile),
            backward=BackwardVisits.of(rows.lo, rows.hi, lengths[1], tiles, bool(spec.biases)),
        )


def _carried(mask: Mask, spec: AttentionSpec) -> KernelRanges | None:
    """Ranges that the mask carries, if they are those of these kernels at these lengths."""
    ranges = mask.ranges
    fits = isinstance(ranges, KernelRanges) and ranges.made_for == _made_for(spec)
    return ranges if fits else None


def _rows_alone(mask: Mask, spec: AttentionSpec) -> KernelRanges:
    """Ranges of which a kernel computes its visits itself."""
    with jax.named_scope(RANGES):
        lo, hi = row_ranges(mask, spec.q_length, spec.kv_length)
    return KernelRanges(lo=lo, hi=hi, made_for=_made_for(spec))


def _made_for(spec: AttentionSpec) -> tuple[tuple[int, int], Tile, BackwardTiles]:
    """Lengths, and the tiles of both passes."""
    sizes, biased = (spec.head_dim, spec.v_head_dim), bool(spec.biases)
    tile = tile_for(*sizes, spec.biases[0].dtype if biased else None)
    tiles = tiles_for(*sizes, biased=biased, soft_cap=spec.soft_cap)
    return (spec.q_length, spec.kv_length), tile, tiles


def attend(
    operands: Operands, scoring: Scoring, *, interpret: bool = False
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Attention and its log-partition for the calls that `why_not` accepts, see `api.attention`.

    Cost: see `forward.forward` and `backward.gradients`; residuals are the inputs, two integers per
    query, the output and 4 bytes per query and head.
    """
    assert scoring.alibi_slopes is None and len(scoring.biases) <= 1
    bias = scoring.biases[0] if scoring.biases else None
    static = _Static.of(scoring, interpret)
    spec = AttentionSpec.of(operands, scoring, return_lse=True)
    ranges = _carried(operands.masked, spec) or _rows_alone(operands.masked, spec)
    out, lse = _attend(static, operands.q, operands.k, operands.v, bias, ranges)
    return (out, lse) if scoring.sinks is None else with_sinks(out, lse, scoring.sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q: Any, k: Any, v: Any, bias: Any, ranges: KernelRanges) -> Any:
    seen = {"lo": ranges.lo, "hi": ranges.hi, "visits": ranges.forward}
    return forward(q, k, v, **seen, bias=bias, dtype=q.dtype, **static.options)


def _attend_fwd(static: _Static, q: Any, k: Any, v: Any, bias: Any, ranges: KernelRanges) -> Any:
    outputs = _attend(static, q, k, v, bias, ranges)
    # Both, or a policy that keeps the output runs the kernel again for lse alone.
    out, lse = (checkpoint_name(x, "attention") for x in outputs)
    return (out, lse), (q, k, v, bias, dataclasses.replace(ranges, forward=None), out, lse)


def _attend_bwd(static: _Static, saved: Any, cotangents: Any) -> Any:
    q, k, v, bias, ranges, out, lse = saved
    dout, dlse = cotangents
    delta = row_delta(out, lse, dout, dlse)
    seen = {"lo": ranges.lo, "hi": ranges.hi, "visits": ranges.backward}
    given = {**seen, "bias": bias, "dout": dout, "lse": lse, "delta": delta}
    dq, dk, dv, dbias = gradients(q, k, v, **given, dtype=q.dtype, **static.options)
    assert (dbias is None) == (bias is None)
    if dbias is not None:
        dbias = dbias.astype(bias.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dbias, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _of_block(operands: Operands, scoring: Scoring) -> KernelRanges:
    """One kernel serves all blocks: what is no step among several is the only one."""
    spec = AttentionSpec.of(operands, scoring, return_lse=True, block=True)
    ranges = _carried(operands.masked, spec) or ranges_of(operands.masked, spec)
    if ranges.forward.step is not None:
        return ranges
    return jax.tree.map(lambda x: x[None], ranges).of_step(jnp.zeros((), jnp.int32))


def attend_block(
    operands: Operands,
    scoring: Scoring,
    *,
    carried: tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """See `block.forward_block`."""
    ranges = _of_block(operands, scoring)
    given = {"visits": ranges.forward, "carried": carried, "dtype": jnp.float32}
    options = _Static.of(scoring, interpret).options
    return forward(operands.q, operands.k, operands.v, **given, **options)


def block_gradients(
    operands: Operands,
    scoring: Scoring,
    *,
    dout: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    delta: Float[Array, "b n s"],
    interpret: bool = False,
) -> tuple[Operands, Scoring]:
    """See `block.backward_block`."""
    ranges = _of_block(operands, scoring)
    given = {"visits": ranges.backward, "dout": dout, "lse": lse, "delta": delta}
    options = {**_Static.of(scoring, interpret).options, "dtype": jnp.float32}
    dq, dk, dv, _ = gradients(operands.q, operands.k, operands.v, **given, **options)
    return Operands(q=dq, k=dk, v=dv, mask=None), Scoring(
        scale=scoring.scale, soft_cap=scoring.soft_cap
    )
