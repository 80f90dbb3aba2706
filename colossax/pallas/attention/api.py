"""One attention, several implementations: the call, its checks and the choice."""

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from colossax.pallas import choice
from colossax.pallas.dropout import PairDropout, why_not_dropout
from colossax.pallas.target import Target, current_target

from . import cudnn, reference, xla
from .mask import Mask
from .mosaic_gpu import attend as mosaic
from .mosaic_gpu import interpreted
from .operands import Operands, Scoring
from .relative import RelativeBias, why_not_relative
from .spec import AttentionSpec

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "mosaic": mosaic,
    "cudnn": cudnn,
    "xla": xla,
    "reference": reference,
    "interpret": interpreted,
}
"""Fastest first; the last one only if named."""

UNPROVEN = "mosaic"
"""What `auto` takes only once it has proved itself on the device that is there."""

declined_by = choice.Choice("attention", IMPLEMENTATIONS, UNPROVEN).declined_by

_NAME_THEIR_OWN = ("mosaic", "xla", "interpret")
"""They name for remat policies what their backward passes need."""


def attention(
    q: Float[Array, "*b s n h"],
    k: Float[Array, "*b t k h"],
    v: Float[Array, "*b t k hv"],
    *,
    mask: Mask,
    biases: Sequence[Array | RelativeBias] = (),
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " n"] | None = None,
    dropout: PairDropout | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
) -> Any:
    """Exact softmax attention on one device; query head i reads kv head `i // (n / k)`.

        logits = soft_cap * tanh(q . k * scale / soft_cap) + biases - slope * (q_pos - kv_pos)
        out    = softmax over the keys the mask shows, and the sink, of logits, times v

    A query that sees no key gives 0 and has no gradient.

    Args:
        q: Queries; any number of leading batch dims, which k and v share.
        k: Keys; `n` is a multiple of their heads.
        v: Values; their head size may differ.
        mask: Who sees whom; leading dims of its arrays are those of q, or 1.
        biases: Each broadcastable to `[*b, n, s, t]`, with all its dims written out. -inf hides a
            key. A huge finite number does it worse: where all keys of a row have -1e30, the
            log-partition, which gradients are made from, has no digits left for the differences.
            Or a `RelativeBias`, which is no array of pairs.
        alibi_slopes: Penalty per head and unit of distance in the mask's positions.
        scale: Default `1 / sqrt(h)`.
        soft_cap: Bound of the logits.
        sinks: One more logit per head, in the denominator only.
        dropout: Of the probabilities, once they are those of a softmax; `return_lse` knows nothing
            of it.
        return_lse: Also return the log of the softmax's denominator, sink included.
        implementation: `auto` takes the first that accepts of `mosaic`, `cudnn`, `xla` and
            `reference`, the first only once proved on the device that is there; or one of them; or
            `interpret`, the source of `mosaic` run on a CPU, slow.

    Returns:
        Output `[*b, s, n, hv]` in q's dtype; with `return_lse` a pair of it and float32
        `[*b, n, s]`, natural logarithm, -inf where nothing is visible. Both are differentiable.

    Raises:
        ValueError: Shapes contradict one another, or `implementation` is no name.
        NotImplementedError: The implementation named does not take this call, says why.
        ExceptionGroup: None takes it; holds the reason of each.
    """
    scoring = Scoring.of(
        q,
        scale=scale,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        biases=biases,
        dropout=dropout,
    )
    operands = Operands(q=q, k=k, v=v, mask=mask)
    return attend(operands, scoring, return_lse=return_lse, implementation=implementation)


def attend(
    operands: Operands,
    scoring: Scoring,
    *,
    return_lse: bool = False,
    implementation: str = "auto",
) -> Any:
    """`attention` of its two values; results, refusals and cost are the same."""
    _check(operands, scoring)
    q, v = operands.q, operands.v
    lead, (s, heads) = q.shape[:-3], q.shape[-3:-1]
    operands, scoring = _flat_operands(operands, lead), _flat_scoring(scoring, lead)
    spec = AttentionSpec.of(operands, scoring, return_lse=return_lse)
    chosen = choose(spec, current_target(), implementation)
    out, lse = IMPLEMENTATIONS[chosen].attend(operands, scoring)
    out = out.reshape(*lead, s, heads, v.shape[-1])
    if chosen not in _NAME_THEIR_OWN:
        out = checkpoint_name(out, "attention")
    return (out, lse.reshape(*lead, heads, s)) if return_lse else out


def with_ranges(
    operands: Operands,
    scoring: Scoring,
    *,
    return_lse: bool = False,
    implementation: str = "auto",
) -> Mask:
    """The mask of `operands`, carrying what `attend` of them would compute of it alone.

    For layers that share a mask: which keys a query sees, and which tiles a kernel visits, is then
    computed once a step, outside of the loop over layers, forward and backward. A call that finds
    ranges of other lengths, of other tiles or of another implementation computes its own. A mask
    without arrays carries nothing: the compiler knows its ranges.

    Args:
        operands: As of `attend`; q, k and v may be shapes. Several batch dims carry nothing.
        scoring: As of `attend`, likewise.
        return_lse: As of `attend`.
        implementation: As of `attend`.

    Raises:
        ValueError: As `attend`.
        NotImplementedError: As `attend`.
        ExceptionGroup: As `attend`.

    Cost: the look-ups of `row_ranges`, and 8 to 30 bytes a token of a row.
    """
    _check(operands, scoring)
    mask = operands.masked
    if operands.q.ndim != 4 or not jax.tree.leaves(mask):
        return mask
    spec = AttentionSpec.of(operands, scoring, return_lse=return_lse)
    chosen = IMPLEMENTATIONS[choose(spec, current_target(), implementation)]
    make = getattr(chosen, "ranges_of", None)
    return mask if make is None else mask.changed(ranges=make(mask, spec))


def choose(
    spec: AttentionSpec,
    target: Target,
    implementation: str = "auto",
    known: Mapping[str, ModuleType] = IMPLEMENTATIONS,
) -> str:
    """Name of the implementation that will run, of those known.

    Raises:
        ValueError: No such name.
        NotImplementedError: The one named declines.
        ExceptionGroup: All decline.
    """
    return choice.choose("attention", known, spec, target, implementation, unproven=UNPROVEN)


def _check(operands: Operands, scoring: Scoring) -> None:
    q, k, v, mask = operands.q, operands.k, operands.v, operands.mask
    lead, (s, n, _), (t, kv_heads, _) = q.shape[:-3], q.shape[-3:], k.shape[-3:]
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if k.shape[:-3] != lead or v.shape[:-1] != k.shape[:-1] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"attention: {shapes} do not fit; they are [*b, s, n, h], [*b, t, k, h], [*b, t, k, hv]"
        )
    if n % kv_heads:
        raise ValueError(f"attention: {shapes}: {n} query heads are no multiple of {kv_heads}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"attention: dtypes {q.dtype}, {k.dtype}, {v.dtype} differ; cast first")
    of_tokens = {
        "q_positions": (s,),
        "q_segments": (s,),
        "kv_positions": (t,),
        "kv_segments": (t,),
        "kv_valid": (t,),
        "prefix": (),
    }
    for name, tail in of_tokens.items():
        array = getattr(mask, name)
        if array is not None and not _fits(array.shape, (*lead, *tail), len(tail)):
            raise ValueError(
                f"attention: mask {name} {array.shape} does not fit {shapes};"
                f" it is {(*lead, *tail)}, leading dims may be 1"
            )
    for bias in scoring.relative:
        reason = why_not_relative(bias, n)
        if reason is not None:
            raise ValueError(f"attention: a RelativeBias does not fit q {q.shape}: {reason}")
    for bias in scoring.arrays:
        if not _fits(bias.shape, (*lead, n, s, t), 0):
            raise ValueError(
                f"attention: bias {bias.shape} is not {(*lead, n, s, t)} with any dim 1; {shapes}"
            )
    for name in ("alibi_slopes", "sinks"):
        per_head = getattr(scoring, name)
        if per_head is not None and per_head.shape != (n,):
            raise ValueError(f"attention: {name} {per_head.shape} is not ({n},), one per head of q")
    if scoring.dropout is not None:
        reason = why_not_dropout(scoring.dropout, lead, n)
        if reason is not None:
            raise ValueError(f"attention: dropout does not fit q {q.shape}: {reason}")


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...], exact: int) -> bool:
    """Whether sizes agree or are 1, the last `exact` of them exactly."""
    if len(shape) != len(wanted):
        return False
    split = len(wanted) - exact
    return shape[split:] == wanted[split:] and all(
        size in (1, w) for size, w in zip(shape[:split], wanted[:split], strict=True)
    )


def _flat(x: Any, lead: tuple[int, ...], tail: int) -> Any:
    """`x` with its leading dims merged into one, of size 1 or the whole batch."""
    here = x.shape[: x.ndim - tail]
    rest = x.shape[x.ndim - tail :]
    if math.prod(here) == 1:
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*lead, *rest)).reshape(-1, *rest)


def _flat_operands(operands: Operands, lead: tuple[int, ...]) -> Operands:
    q, k, v = (
        x.reshape(math.prod(lead), *x.shape[-3:]) for x in (operands.q, operands.k, operands.v)
    )
    return Operands(q=q, k=k, v=v, mask=_flat_mask(operands.mask, lead))


def _flat_scoring(scoring: Scoring, lead: tuple[int, ...]) -> Scoring:
    dropout = scoring.dropout
    if dropout is not None and len(lead) != 1:
        dropout = dropout.replace(words=dropout.words.reshape(-1))
    return scoring.replace(
        biases=tuple(_flat_bias(x, lead) for x in scoring.biases), dropout=dropout
    )


def _flat_bias(bias: Any, lead: tuple[int, ...]) -> Any:
    return bias if isinstance(bias, RelativeBias) else _flat(bias, lead, 3)


def _flat_mask(mask: Mask, lead: tuple[int, ...]) -> Mask:
    if len(lead) == 1:
        return mask
    fields = {
        name: _flat(getattr(mask, name), lead, tail)
        for name, tail in (
            ("prefix", 0),
            ("q_positions", 1),
            ("kv_positions", 1),
            ("q_segments", 1),
            ("kv_segments", 1),
            ("kv_valid", 1),
        )
        if getattr(mask, name) is not None
    }
    return mask.changed(**fields)
