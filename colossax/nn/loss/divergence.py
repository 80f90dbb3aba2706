"""How far a student's next token is from its teacher's, the logits of both made chunk by chunk."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.nn.loss.cross_entropy import (
    Settings,
    check_cuts,
    gradients_of,
    over_chunks,
    sum_shards,
)
from colossax.pallas.varying import vary_alike


def kl_divergence(
    hidden: Float[Array, "b s d"],
    head: Float[Array, "d v"],
    teacher: Float[Array, "b s c"],
    teacher_head: Float[Array, "c v"],
    weights: Float[Array, "b s"],
    *,
    temperature: float = 1.0,
    chunks: int = 1,
    batch_shards: int = 1,
    seq_shards: int = 1,
    reduction: Any = None,
) -> Float[Array, ""]:
    """Sum over tokens of `w T^2 KL(p || q)`, softmaxes of what teacher and student say over T.

    As `cross_entropy`: the gradient is made in the forward pass, while a chunk's logits are there.
    The square of the temperature keeps gradients of one size whatever it is (Hinton et al. 2015).

    Args:
        hidden: Final hidden states of the student.
        head: Its output matrix, gathered along the axes that split the batch.
        teacher: Those of the teacher; constants, as its matrix is.
        teacher_head: Likewise gathered.
        weights: Of tokens; constants.
        temperature: T.
        chunks: Parts of the sequence, of which one has its logits alive at a time.
        batch_shards: Devices that the batch dim is split over.
        seq_shards: Devices that the sequence is split over.
        reduction: Dtype of the sum of the head's gradient over them; None: the head's.

    Raises:
        ValueError: `chunks` exceeds s, or the shards do not divide b and s.

    Cost: 6 b s d v + 2 b s c v FLOPs forward, nothing backward but scaling. Alive: 3 b s v / chunks
    float32; kept: gradients of hidden and of head (float32).
    """
    check_cuts(hidden, chunks, batch_shards, seq_shards, "kl_divergence")
    static = Settings(
        chunks=chunks,
        batch_shards=batch_shards,
        seq_shards=seq_shards,
        reduction=jnp.dtype(head.dtype if reduction is None else reduction),
    )
    constants = jax.lax.stop_gradient((teacher, teacher_head, weights.astype(jnp.float32)))
    hidden, head, constants = vary_alike((hidden, head, constants))
    return _total(static, float(temperature), hidden, head, constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(static: Settings, temperature: float, hidden: Any, head: Any, constants: Any) -> Any:
    return _pass(static, temperature, hidden, head, constants, gradients=False)[0]


def _total_fwd(
    static: Settings, temperature: float, hidden: Any, head: Any, constants: Any
) -> tuple[Any, Any]:
    return _pass(static, temperature, hidden, head, constants, gradients=True)


def _total_bwd(_static: Settings, _temperature: float, saved: Any, by: Any) -> Any:
    dx, dhead = jax.tree.map(lambda grad: grad * by, saved[:2])
    typed = (dx.astype(saved[2].dtype), dhead.astype(saved[3].dtype))
    return *jax.lax.optimization_barrier(typed), None


_total.defvjp(_total_fwd, _total_bwd)


def _pass(
    static: Settings, t: float, hidden: Any, head: Any, constants: Any, *, gradients: bool
) -> tuple[Any, Any]:
    """The sum, and its gradients by hidden states and head, with their dtypes, if asked for."""
    teacher, teacher_head, weights = constants

    def logs(x: Array, w: Array) -> Array:
        logits = jnp.einsum("gtd,dv->gtv", x, w, preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(logits / t, axis=-1)

    def chunk(x: Array, guide: Array, w: Array) -> tuple[Any, Any]:
        own, wanted = logs(x, head), logs(guide, teacher_head)
        p = jnp.exp(wanted)
        found = jnp.sum(w * jnp.sum(p * (wanted - own), axis=-1)) * t * t
        if not gradients:
            return (found, None), None
        dlogits = (jnp.exp(own) - p) * (w * t)[..., None]
        dx, dhead, _ = gradients_of(x, head, None, dlogits)
        return (found, dhead), dx

    (found, dhead), dx = over_chunks(static, chunk, hidden, teacher, weights)
    if not gradients:
        return found, None
    like = (jnp.zeros((0,), hidden.dtype), jnp.zeros((0,), head.dtype))
    return found, (dx, sum_shards(static, dhead), *like)
