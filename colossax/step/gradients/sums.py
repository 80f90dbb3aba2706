"""Gradients added over microbatches, in the dtype and layout of the plan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.layerwise import Maximum, added, nothing
from colossax.sharding import param_sharding
from colossax.typing import Params


def summed_up(grad: Callable, constrain: Callable, xs: Any, infos: Any) -> tuple[Params, Any]:
    """`grad(*x) -> (gradients, sums)` added over the microbatches; of what is noted the largest.

    Args:
        grad: Of a microbatch.
        constrain: Gradients to where the plan wants them.
        xs: Of all microbatches.
        infos: Of the gradients.
    """

    def one(*x: Any) -> tuple[Any, Any]:
        grads, sums = grad(*x)
        return noted(infos, grads), sums

    def constrained(grads: Any) -> Any:
        return noted(infos, constrain(as_arrays(infos, grads)))

    def body(acc: Any, x: Any):
        acc = added(acc, one(*x))
        # Without this the accumulator may be replicated, and reduced every time.
        return (constrained(acc[0]), acc[1]), None

    shapes = jax.eval_shape(one, *jax.tree.map(lambda x: x[0], xs))
    zeros = nothing(shapes)
    grads, sums = jax.lax.scan(body, (constrained(zeros[0]), zeros[1]), xs)[0]
    return as_arrays(infos, grads), sums


def noted(infos: Any, grads: Any) -> Any:
    """Gradients of which a `Maximum` each is what is noted, so that the largest counts."""
    return jax.tree.map(lambda info, g: Maximum(g) if info.noted else g, infos, grads)


def as_arrays(infos: Any, grads: Any) -> Any:
    """The same as arrays."""
    return jax.tree.unflatten(jax.tree.structure(infos), jax.tree.leaves(grads))


def together(infos: Any, one: Any, other: Any) -> Any:
    """Gradients of two parts of a batch as one: their sum, of what is noted the larger."""
    return as_arrays(infos, added(noted(infos, one), noted(infos, other)))


def accumulable(bound: BoundPlan, infos: Any, grads: Any, *, constrain: bool = True) -> Any:
    """Gradients in the dtype and the layout in which they are accumulated."""
    dtype = bound.plan.precision.accumulation
    grads = jax.tree.map(lambda g: g.astype(dtype), grads)
    return constrained(bound, infos, grads) if constrain else grads


def square_norm(grads: Any) -> Array:
    """Sum of the squares of all, in float32."""
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    return optax.tree_utils.tree_norm(wide, squared=True)


def constrained(bound: BoundPlan, infos: Any, grads: Any) -> Any:
    if bound.single:
        return grads

    def constrain(grad: Array, info: Any) -> Array:
        return jax.lax.with_sharding_constraint(grad, param_sharding(bound, "gradients", info))

    return jax.tree.map(constrain, grads, infos)
