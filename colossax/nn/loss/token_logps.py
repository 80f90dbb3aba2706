"""Log-probabilities of given tokens, the logits made chunk by chunk and never kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.nn.loss.cross_entropy import (
    Settings,
    VocabParts,
    check_cuts,
    logits_of,
    over_chunks,
    picked_of,
    second_pass,
)
from colossax.pallas.varying import vary_alike


def token_logps(
    hidden: Float[Array, "b s d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "b s"],
    *,
    temperature: float = 1.0,
    chunks: int = 1,
    soft_cap: float | None = None,
    bias: Float[Array, " v"] | None = None,
    vocab_sharded: bool = False,
    batch_shards: int = 1,
    seq_shards: int = 1,
    reduction: Any = None,
    parts: VocabParts | None = None,
) -> Float[Array, "b s"]:
    """`log softmax(logits / T)[target]` of each token, in float32.

    As `cross_entropy`, whose arguments these are, but token by token: what is made of them, such as
    a ratio of two models or a sum over an answer, may be any function, and its gradient comes back
    through this one. Logits are made again backward, as the factor of each token is not known
    before.

    Args:
        hidden: Final hidden states.
        head: Output matrix, gathered along the axes that split the batch.
        targets: Tokens; any integer where nobody reads the result.
        temperature: T, above 0: what the tokens were drawn at.
        chunks: Parts of the sequence, of which one has its logits alive at a time.
        soft_cap: Bound of the logits.
        bias: Added to the logits.
        vocab_sharded: Pick the target's logit without a gather of a split vocabulary.
        batch_shards: Devices that the batch dim is split over.
        seq_shards: Devices that the sequence is split over.
        reduction: Dtype of the sum of the head's gradient over them; None: the head's.
        parts: Of a vocabulary that is split over devices.

    Raises:
        ValueError: `chunks` exceeds s, or the shards do not divide b and s.

    Cost: 2 b s d v FLOPs forward, 6 backward. Alive: b s v / chunks float32 logits, backward their
    gradient too; kept: the inputs and 4 bytes per token.
    """
    check_cuts(hidden, chunks, batch_shards, seq_shards, "token_logps")
    static = Settings(
        chunks=chunks,
        temperature=float(temperature),
        soft_cap=soft_cap,
        vocab_sharded=vocab_sharded,
        batch_shards=batch_shards,
        seq_shards=seq_shards,
        reduction=jnp.dtype(head.dtype if reduction is None else reduction),
        parts=parts,
    )
    return _told(static, *vary_alike((hidden, head, bias, targets)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _told(static: Settings, hidden: Any, head: Any, bias: Any, targets: Any) -> Any:
    return _pass(static, (hidden, head, bias), targets)[0]


def _told_fwd(static: Settings, hidden: Any, head: Any, bias: Any, targets: Any) -> tuple[Any, Any]:
    operands = (hidden, head, bias)
    told, lse = _pass(static, operands, targets)
    return told, (operands, targets, lse)


def _told_bwd(static: Settings, saved: Any, by: Any) -> Any:
    operands, targets, lse = saved
    grads = second_pass(static, operands, targets, lse, -by, -by)
    typed = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, operands)
    # As in `cross_entropy`: the head's gradient is reduced before what comes before the head.
    return *jax.lax.optimization_barrier(typed), None


_told.defvjp(_told_fwd, _told_bwd)


def _pass(static: Settings, operands: Any, targets: Array) -> tuple[Array, Array]:
    """Log-probability and log-partition of each token."""
    hidden, head, bias = operands

    def chunk(x: Array, label: Array) -> tuple[Any, Any]:
        logits, _ = logits_of(static, x, head, bias)
        lse = jax.nn.logsumexp(logits, axis=-1)
        return (), (picked_of(static, logits, label) - lse, lse)

    return over_chunks(static, chunk, hidden, targets)[1]
