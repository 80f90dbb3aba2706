"""What keeps experts evenly used: losses, statistics, and the bias that moves after a step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from colossax.sharding.experts.routing import Routing

BALANCES: tuple[str, ...] = ("sequence", "global", "microbatch", "none")


def load(routing: Routing, valid: Bool[Array, "b s"], experts: int) -> Float[Array, "b e"]:
    """Choices of each expert, sequence by sequence, those that a capacity drops among them."""
    expert = routing.expert if routing.asked is None else routing.asked
    chosen = expert[..., None] == jnp.arange(experts)
    return jnp.sum(chosen & valid[..., None, None], axis=(1, 2)).astype(jnp.float32)


def balance_loss(
    routing: Routing,
    valid: Bool[Array, "b s"],
    *,
    over: str,
    shares: Float[Array, " e"] | None = None,
) -> Float[Array, ""]:
    """Times the tokens: `e sum_i f_i P_i`, 1 where experts are evenly used.

    f is the share of choices before any is dropped, not differentiated, P the mean score (Fedus et
    al. 2021).

    Args:
        routing: Of all tokens.
        valid: Which are some.
        over: `sequence`: f and P are of a sequence, and losses of sequences add up (DeepSeek-V3);
            `global`: f is given, so that P alone is summed; `microbatch`: f and P are of the
            tokens here: over microbatches the sum is of other losses than that of the whole batch.
        shares: For `global`: f, such as of the step before.
    """
    experts = routing.scores.shape[-1]
    counts = jax.lax.stop_gradient(load(routing, valid, experts))
    score = jnp.sum(jnp.where(valid[..., None], routing.scores, 0.0), axis=1)
    if over == "sequence":
        share = counts / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1.0)
        return experts * jnp.sum(share * score)
    if over == "microbatch":
        total = jnp.sum(counts, axis=0)
        return experts * jnp.sum(total / jnp.maximum(jnp.sum(total), 1.0) * jnp.sum(score, axis=0))
    assert shares is not None
    return experts * jnp.sum(jax.lax.stop_gradient(shares) * jnp.sum(score, axis=0))


def z_loss(logits: Float[Array, "b s e"], valid: Bool[Array, "b s"]) -> Float[Array, ""]:
    """Sum over tokens of the squared log-partition of the router (Zoph et al. 2022)."""
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.sum(jnp.where(valid, squares, 0.0))


def entropy(routing: Routing, valid: Bool[Array, "b s"]) -> Float[Array, ""]:
    """Sum over tokens of the entropy of their scores, in nats."""
    each = -jnp.sum(routing.scores * jnp.log(routing.scores + 1e-20), axis=-1)
    return jnp.sum(jnp.where(valid, each, 0.0))


def moved_bias(
    bias: Float[Array, "*l e"], counts: Float[Array, "*l e"], rate: float
) -> Float[Array, "*l e"]:
    """The bias of scores after a step: up for experts below the mean load, down above.

    Args:
        bias: Before.
        counts: Choices of each expert in the whole step, over all devices and microbatches.
        rate: By which it moves.

    Source: Wang et al. 2024, auxiliary-loss-free load balancing; DeepSeek-V3.
    """
    return bias + rate * jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)
