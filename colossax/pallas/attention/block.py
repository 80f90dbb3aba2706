"""Attention to some of the keys, and its gradients: the two steps of every ring.

Neither is differentiated: who moves the blocks writes the backward pass. A kernel replaces both or
neither.
"""

from jaxtyping import Array, Float

from . import xla
from .mask import Mask


def attend_block(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Attention to this block alone, as the first or second part of `merge_blocks`.

    Returns:
        Output and log-partition in float32, 0 and -inf where a query sees none of these keys.

    Cost: 4 s t n h FLOPs a row, less what the mask leaves out.
    """
    return xla.attend_block(
        q, k, v, mask=mask, alibi_slopes=alibi_slopes, scale=scale, soft_cap=soft_cap
    )


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

    Cost: 10 s t n h FLOPs a row, less what the mask leaves out.
    """
    return xla.block_gradients(
        q,
        k,
        v,
        mask=mask,
        alibi_slopes=alibi_slopes,
        scale=scale,
        soft_cap=soft_cap,
        dout=dout,
        lse=lse,
        delta=delta,
    )
