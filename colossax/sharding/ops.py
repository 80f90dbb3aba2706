"""What a model calls: names of dims in, constraints of the plan in force out.

Without a plan, or on a mesh of one device, each function is its plain mathematics.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan
from colossax.sharding.context import current
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


def gather_weight(w: Array, dims: Dims, *, dtype: jnp.dtype | None = None) -> Array:
    """A parameter as a matmul wants it: in the compute dtype, whole along the batch's axes.

    Forward all-gathers the compute-dtype copy over the axes that split the batch (fsdp);
    backward lays the gradient out by the `gradients` rules, one reduce-scatter. Left to itself
    the compiler may move activations instead of weights.

    Args:
        w: Parameter in its dtype at rest.
        dims: Its logical dims (of one layer, without `layers`).
        dtype: Dtype of the result; default the plan's compute dtype, else that of `w`.
    """
    dtype = compute_dtype(w.dtype) if dtype is None else jnp.dtype(dtype)
    return _gathered(current(), dims, dtype, w)


def _gathered(bound: BoundPlan | None, dims: Dims, dtype: jnp.dtype, w: Array) -> Array:
    if bound is None or bound.single:
        return w.astype(dtype)
    return _gather(bound, dims, dtype, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(bound: BoundPlan, dims: Dims, dtype: jnp.dtype, w: Array) -> Array:
    # Cast before the gather, where the shards are: half the bytes in bf16.
    shard = _laid_out(bound, "params", dims, w.astype(dtype))
    return _laid_out(bound, "weights", dims, shard)


def _gather_fwd(bound: BoundPlan, dims: Dims, dtype: jnp.dtype, w: Array):
    return _gather(bound, dims, dtype, w), jnp.zeros((0,), w.dtype)


def _gather_bwd(bound: BoundPlan, dims: Dims, dtype: jnp.dtype, like: Array, dw: Array):
    return (_gradient(bound, dims, dw, like),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def lookup(
    table: Float[Array, "rows d"], ids: Int[Array, "b s"], dims: Dims
) -> Float[Array, "b s d"]:
    """Rows of a parameter table, in the compute dtype.

    Forward reads the table gathered along the axes that split the batch; backward adds rows up in
    float32 in that same layout before it lays the gradient out by the plan. Left to itself the
    compiler lays the output's gradient out like the table's and replicates it on the way.

    Args:
        table: Parameter at rest.
        ids: Row numbers; those beyond the table read its last row.
        dims: Logical dims of the table.
    """
    return _lookup(current(), dims, compute_dtype(table.dtype), table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _lookup(bound, dims: Dims, dtype: jnp.dtype, table: Array, ids: Array) -> Array:
    return _gathered(bound, dims, dtype, table).at[ids].get(mode="clip")


def _lookup_fwd(bound, dims: Dims, dtype: jnp.dtype, table: Array, ids: Array):
    return _lookup(bound, dims, dtype, table, ids), (table, ids)


def _lookup_bwd(bound, dims: Dims, dtype: jnp.dtype, residuals: Any, dx: Array):
    table, ids = residuals
    total = jnp.zeros(table.shape, jnp.float32).at[ids].add(dx.astype(jnp.float32), mode="clip")
    if bound is not None and not bound.single:
        total = _laid_out(bound, "weights", dims, total)
    return _gradient(bound, dims, total, table), None


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _laid_out(bound: BoundPlan, role: str, dims: Dims, x: Array) -> Array:
    spec = resolve(bound, role, dims, x.shape, name=f"weight {dims}")
    return jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))


def linear(
    x: Float[Array, "*lead_and_in"],
    w: Float[Array, "*in_and_out"],
    dims: Dims,
    *,
    contract: int = 1,
    bias: Array | None = None,
) -> Float[Array, "*lead_and_out"]:
    """`x` times `w` over the last `contract` dims of `x` and the first of `w`, plus `bias`.

    Args:
        x: `[*lead, *in]`; cast to the plan's compute dtype.
        w: `[*in, *out]`, at rest; gathered by the plan.
        dims: Logical dims of `w`.
        contract: How many dims are contracted.
        bias: `[*out]`, with dims `dims[contract:]`.

    Returns:
        `[*lead, *out]` in the compute dtype.
    """
    x = x.astype(compute_dtype(x.dtype))
    lead, inner, out = x.shape[: x.ndim - contract], w.shape[:contract], w.shape[contract:]
    if x.shape[x.ndim - contract :] != inner:
        raise ValueError(
            f"linear: input {x.shape} ends in {x.shape[x.ndim - contract :]}, weight {w.shape} of"
            f" dims {dims} begins with {inner}; they must be equal"
        )
    # One dim of tokens: with [b, s] apart, the weight gradient contracts two dims, for which
    # XLA's CPU backend transposes instead of calling its matmul (90 against 129 GFLOP per second).
    flat = (math.prod(lead),) if _tokens_merge(lead) else lead
    y = _matmul(current(), dims, contract, x.reshape(*flat, math.prod(inner)), w, bias)
    return y.reshape(*lead, *out)


# One rule for gather and matmul together: what backward keeps is the weight at rest, which it
# gathers again. With a rule for the gather alone the matmul would keep every layer's weight whole.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _matmul(bound, dims: Dims, contract: int, x: Array, w: Array, bias: Array | None) -> Array:
    y = jnp.dot(x, _matrix(bound, dims, w, x))
    return y if bias is None else y + _gathered(bound, dims[contract:], x.dtype, bias).ravel()


def _matrix(bound, dims: Dims, w: Array, x: Array) -> Array:
    return _gathered(bound, dims, x.dtype, w).reshape(x.shape[-1], -1)


def _matmul_fwd(bound, dims: Dims, contract: int, x: Array, w: Array, bias: Array | None):
    return _matmul(bound, dims, contract, x, w, bias), (x, w, bias)


def _matmul_bwd(bound, dims: Dims, contract: int, residuals: Any, dy: Array):
    x, w, bias = residuals
    wide = jnp.promote_types(x.dtype, _accumulation_dtype(bound))
    dx = jnp.dot(dy, _matrix(bound, dims, w, x).T)
    tokens = tuple(range(x.ndim - 1))
    dw = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), preferred_element_type=wide)
    dw = _gradient(bound, dims, dw.reshape(w.shape), w)
    if bias is None:
        return dx, dw, None
    db = jnp.sum(dy, axis=tokens, dtype=wide).reshape(bias.shape)
    return dx, dw, _gradient(bound, dims[contract:], db, bias)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _accumulation_dtype(bound: BoundPlan | None) -> str:
    return "float32" if bound is None else bound.plan.precision.accumulation


def _gradient(bound: BoundPlan | None, dims: Dims, grad: Array, like: Array) -> Array:
    """A parameter's gradient where the plan wants it, summed over devices before it is narrowed."""
    if bound is not None and not bound.single:
        grad = _laid_out(bound, "gradients", dims, grad)
    return grad.astype(like.dtype)


def _tokens_merge(lead: tuple[int, ...]) -> bool:
    """Whether [b, s] may become one dim: a split sequence would have to be gathered for it."""
    bound = current()
    if bound is None or bound.single:
        return True
    rules = bound.plan.rules.activations
    axes = {axis for choice in rules.get("seq", ()) for axis in choice}
    return len(lead) == 2 and bound.size(sorted(axes)) == 1
