"""Attention to some of the keys, and its gradients: the two steps of every ring.

Neither is differentiated: who moves the blocks writes the backward pass. Both are computed alike,
by the kernels or by XLA: what a block asks for is the same in both directions.
"""

from types import ModuleType
from typing import Any

import jax
from jaxtyping import Array, Float

from colossax.pallas.target import current_target

from . import xla
from .api import choose
from .mask import Mask
from .mosaic_gpu import attend as mosaic
from .mosaic_gpu import interpreted
from .operands import Operands, Scoring
from .spec import AttentionSpec

_FORMS: dict[str, ModuleType] = {"mosaic": mosaic, "xla": xla, "interpret": interpreted}


def attend_block(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float,
    soft_cap: float | None = None,
    carried: tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]] | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Attention to this block, and to those before it whose result is `carried`.

    Args:
        q: Queries.
        k: Keys of this block.
        v: Values of this block.
        mask: Who sees whom in this block.
        alibi_slopes: As of `attention`.
        scale: As of `attention`.
        soft_cap: As of `attention`.
        carried: Result for the same queries and other keys, in float32. `merge_blocks` of it and of
            this block alone is the same; the kernels start from it and need no second pass.
        implementation: `auto`, `mosaic`, `xla` or `interpret`.

    Returns:
        Output and log-partition in float32, 0 and -inf where a query sees no key.

    Raises:
        NotImplementedError: The implementation named does not take this block, says why.

    Cost: 4 s t n h FLOPs a row, less what the mask leaves out.
    """
    operands = Operands(q=q, k=k, v=v, mask=mask)
    scoring = Scoring(scale=scale, soft_cap=soft_cap, alibi_slopes=alibi_slopes)
    return forward_block(operands, scoring, carried=carried, implementation=implementation)


def forward_block(
    operands: Operands,
    scoring: Scoring,
    *,
    carried: tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]] | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """`attend_block` of its two values; sinks are added once, when all blocks are merged."""
    return _form(operands, scoring, implementation).attend_block(operands, scoring, carried=carried)


def block_gradients(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float,
    soft_cap: float | None = None,
    dout: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    delta: Float[Array, "b n s"],
    implementation: str = "auto",
) -> tuple[
    Float[Array, "b s n h"],
    Float[Array, "b t k h"],
    Float[Array, "b t k hv"],
    Float[Array, " n"] | None,
]:
    """What this block adds to the gradients of q, k, v and the slopes, in float32.

    Probabilities are those of the whole softmax, `exp(logit - lse)`.

    Args:
        q: Queries.
        k: Keys of this block.
        v: Values of this block.
        mask: Who sees whom in this block, as forward.
        alibi_slopes: As forward.
        scale: As forward.
        soft_cap: As forward.
        dout: Gradient of the output over all blocks.
        lse: Log-partition over all blocks, without sinks.
        delta: `row_delta` over all blocks.
        implementation: As forward.

    Raises:
        NotImplementedError: The implementation named does not take this block, says why.

    Cost: 10 s t n h FLOPs a row, less what the mask leaves out; 14 in the kernels.
    """
    operands = Operands(q=q, k=k, v=v, mask=mask)
    scoring = Scoring(scale=scale, soft_cap=soft_cap, alibi_slopes=alibi_slopes)
    given = {"dout": dout, "lse": lse, "delta": delta, "implementation": implementation}
    gradients, of_scoring = backward_block(operands, scoring, **given)
    return gradients.q, gradients.k, gradients.v, of_scoring.alibi_slopes


def backward_block(
    operands: Operands,
    scoring: Scoring,
    *,
    dout: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    delta: Float[Array, "b n s"],
    implementation: str = "auto",
) -> tuple[Operands, Scoring]:
    """`block_gradients` of its two values, as trees of the same shape: float32, no mask."""
    form = _form(operands, scoring, implementation)
    return form.block_gradients(operands, scoring, dout=dout, lse=lse, delta=delta)


def block_implementation(
    operands: Operands, scoring: Scoring, *, implementation: str = "auto"
) -> str:
    """Name of what will compute this block in both directions: `mosaic`, `xla` or `interpret`.

    Raises:
        NotImplementedError: The implementation named does not take this block, says why.
    """
    spec = AttentionSpec.of(operands, scoring, return_lse=True, block=True)
    return choose(spec, current_target(), implementation, _FORMS)


def block_ranges(operands: Operands, scoring: Scoring, *, implementation: str = "auto") -> Mask:
    """The mask of a block, carrying what both directions would compute of it alone.

    As `with_ranges` for whole attention: a block that finds ranges of others computes its own, and
    a mask without arrays carries nothing.

    Args:
        operands: As of `forward_block`; q, k and v may be shapes.
        scoring: As of `forward_block`, likewise.
        implementation: As of `attend_block`.

    Raises:
        NotImplementedError: The implementation named does not take this block, says why.
    """
    mask = operands.masked
    if not jax.tree.leaves(mask):
        return mask
    spec = AttentionSpec.of(operands, scoring, return_lse=True, block=True)
    form = _form(operands, scoring, implementation)
    return mask.changed(ranges=form.ranges_of(mask, spec))


def _form(operands: Operands, scoring: Scoring, implementation: str) -> Any:
    return _FORMS[block_implementation(operands, scoring, implementation=implementation)]
