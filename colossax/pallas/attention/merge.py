"""Parts of one softmax: sums over other keys, a sink, and what their gradients share.

A softmax over some of the keys is kept as its output and its log-partition (`lse`); -inf is one
over nothing. None of these functions makes a NaN of it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_blocks(
    out: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    other_out: Float[Array, "b s n hv"],
    other_lse: Float[Array, "b n s"],
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Attention to the keys of two disjoint blocks from the attention to each, in float32.

    lse = log(exp(lse_1) + exp(lse_2));  out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)
    """
    total = jnp.logaddexp(lse, other_lse)
    finite = jnp.where(jnp.isneginf(total), 0.0, total)
    return (
        out * _per_row(jnp.exp(lse - finite)) + other_out * _per_row(jnp.exp(other_lse - finite)),
        total,
    )


def with_sinks(
    out: Float[Array, "b s n hv"], lse: Float[Array, "b n s"], sinks: Float[Array, " n"]
) -> tuple[Float[Array, "b s n hv"], Float[Array, "b n s"]]:
    """Attention with one more logit per head in the denominator; keeps the output's dtype."""
    # A sink only scales the output: exp(lse) / (exp(lse) + exp(sink)).
    sink = sinks.astype(jnp.float32)[:, None]
    share = _per_row(jax.nn.sigmoid(lse - sink))
    return (out * share).astype(out.dtype), jnp.logaddexp(lse, sink)


def row_delta(
    out: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    dout: Float[Array, "b s n hv"],
    dlse: Float[Array, "b n s"],
) -> Float[Array, "b n s"]:
    """What a row's logits share: `dlogit = p (dp - delta)`, `delta = sum(out * dout) - dlse`.

    Rows that see nothing have no gradient, whatever the one of their -inf is.
    """
    delta = jnp.einsum("bsnh,bsnh->bns", out, dout, preferred_element_type=jnp.float32)
    return jnp.where(jnp.isneginf(lse), 0.0, delta - dlse)


def _per_row(x: Float[Array, "b n s"]) -> Float[Array, "b s n 1"]:
    return jnp.swapaxes(x, 1, 2)[..., None]
