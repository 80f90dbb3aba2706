"""What a model calls: names of dims in, constraints of the plan in force out.

Without a plan, or on a mesh of one device, each function is its plain mathematics.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.sharding.context import current
from colossax.sharding.row_major import as_in_stack
from colossax.sharding.rules import activation_sharding, resolve
from colossax.typing import Dims


def constrain(x: Array, *dims: str | None) -> Array:
    """`x`, laid out as the plan's activation rules say for these dims.

    Raises:
        PlanError: A size is not a multiple of the devices of its axes.
    """
    bound = current()
    if bound is None or bound.single:
        return x
    return jax.lax.with_sharding_constraint(x, activation_sharding(bound, dims, x.shape))


def compute_dtype(default: jnp.dtype) -> jnp.dtype:
    """The plan's dtype for matmuls and activations; `default` without a plan."""
    bound = current()
    return jnp.dtype(default if bound is None else bound.plan.precision.compute)


def gather_weight(
    w: Array, dims: Dims, *, dtype: jnp.dtype | None = None, to: Dims | None = None
) -> Array:
    """A parameter as a matmul wants it: in the compute dtype, gathered along the batch's axes.

    Forward all-gathers the compute-dtype copy over the axes that split the batch (fsdp);
    backward lays the gradient out by the `gradients` rules, one reduce-scatter. Left to itself
    the compiler may move activations instead of weights.

    Args:
        w: Parameter in its dtype at rest.
        dims: Its logical dims (of one layer, without `layers`).
        dtype: Dtype of the result; default the plan's compute dtype, else that of `w`.
        to: Dims as which it is laid out in the end like an activation; under a plan without
            rules for a batch (of inference) not, there weights stay where they are.
    """
    dtype = compute_dtype(w.dtype) if dtype is None else jnp.dtype(dtype)
    return gathered(current(), dims, dtype, w, to=to)


def gathered(
    bound: BoundPlan | None, dims: Dims, dtype: jnp.dtype, w: Array, *, to: Dims | None = None
) -> Array:
    if bound is None or bound.single:
        return w.astype(dtype)
    return _gather(bound, dims, dtype, to if "batch" in bound.rules.activations else None, w)


def gather_for_others(w: Array, dims: Dims, dtype: jnp.dtype) -> Array:
    """A parameter gathered for an operation that is not ours, whose activations have no layout.

    Backward first sums its gradient whole, as of vectors in `gather_weight`: wanted in parts from
    the start, its split would reach back into activations. On GPUs that is one reduce-scatter.

    Args:
        w: Parameter in its dtype at rest.
        dims: Its logical dims.
        dtype: Dtype of the result.
    """
    bound = current()
    if bound is None or bound.single:
        return w.astype(dtype)
    return constrained(bound, "weights", dims, _shard(bound, dims, dtype, w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather(bound: BoundPlan, dims: Dims, dtype: jnp.dtype, to: Dims | None, w: Array) -> Array:
    full = constrained(bound, "weights", dims, _shard(bound, dims, dtype, w))
    return full if to is None else constrained(bound, "activations", to, full)


def _shard(bound: BoundPlan, dims: Dims, dtype: jnp.dtype, w: Array) -> Array:
    """What is gathered: cast where the shards are, half the bytes in bf16."""
    return cast_at_rest(bound, dims, lambda w: w.astype(dtype), w)


def cast_at_rest(bound: BoundPlan, dims: Dims, cast: Callable[[Array], Array], w: Array) -> Array:
    """`cast(w)`, of each element, where the shards are."""
    return constrained(bound, "params", dims, cast(as_in_stack(bound, "params", dims, w)))


def _gather_fwd(bound: BoundPlan, dims: Dims, dtype: jnp.dtype, to: Dims | None, w: Array):
    return _gather(bound, dims, dtype, to, w), jnp.zeros((0,), w.dtype)


def _gather_bwd(
    bound: BoundPlan, dims: Dims, dtype: jnp.dtype, to: Dims | None, like: Array, dw: Array
):
    if to is not None and _crosses(bound, dims, to, dw):
        dw = constrained(bound, "weights", dims, dw)
    return (summed_gradient(bound, dims, dw, like),)


def _crosses(bound: BoundPlan, dims: Dims, to: Dims, dw: Array) -> bool:
    """Whether a split goes to another dim on the way home, which the compiler takes in steps only:

    a dim that is split here and replicated at rest gives its axes to one that is split further.
    """
    here = resolve(bound, "activations", to, dw.shape, name=f"weight {dims}")
    home = resolve(bound, "gradients", dims, dw.shape, name=f"weight {dims}")
    return any(a is not None and b is None for a, b in zip(here, home, strict=True))


_gather.defvjp(_gather_fwd, _gather_bwd)


def constrained(bound: BoundPlan, role: str, dims: Dims, x: Array) -> Array:
    spec = resolve(bound, role, dims, x.shape, name=f"weight {dims}")
    return jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))


def as_in_block(bound: BoundPlan | None, out: Dims, dy: Array) -> Array:
    """The gradient of a block's output with the sequence as inside the block.

    Both matmuls of backward need it so. Left to choose, the compiler may instead split it along
    the features, as the weight's gradient will be, by replicating it first.
    """
    if bound is None or bound.single or out != ("embed",) or dy.ndim != 3:
        return dy
    sharding = activation_sharding(bound, ("batch", "seq", "embed"), dy.shape)
    return jax.lax.with_sharding_constraint(dy, sharding)


def reduction_dtype(bound: BoundPlan | None, compute: jnp.dtype) -> jnp.dtype:
    """Dtype in which devices sum a parameter's gradient."""
    chosen = None if bound is None else bound.plan.precision.reduction
    return jnp.dtype(compute if chosen is None else chosen)


def summed_gradient(bound: BoundPlan | None, dims: Dims, grad: Array, like: Array) -> Array:
    """A parameter's gradient where the plan wants it, summed over devices in its own dtype."""
    if bound is not None and not bound.single:
        if grad.ndim == 1:
            # Of a vector the sum comes first: wanted in parts from the start, its split reaches
            # back into the activations it is a sum over, which are then replicated.
            grad = constrained(bound, "weights", dims, grad)
        grad = constrained(bound, "gradients", dims, grad)
        grad = as_in_stack(bound, "gradients", dims, grad)
    return grad.astype(like.dtype)
