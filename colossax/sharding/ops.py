"""What a model calls: names of dims in, constraints of the plan in force out.

Without a plan, or on a mesh of one device, each function is its plain mathematics.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from colossax.config import BoundPlan
from colossax.sharding.context import current, recomputed
from colossax.sharding.matmul import Island, layout_of, matmuls
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
    """A parameter as a matmul wants it: in the compute dtype, whole along the batch's axes.

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather(bound: BoundPlan, dims: Dims, dtype: jnp.dtype, to: Dims | None, w: Array) -> Array:
    # Cast before the gather, where the shards are: half the bytes in bf16.
    shard = laid_out(bound, "params", dims, w.astype(dtype))
    whole = laid_out(bound, "weights", dims, shard)
    return whole if to is None else laid_out(bound, "activations", to, whole)


def _gather_fwd(bound: BoundPlan, dims: Dims, dtype: jnp.dtype, to: Dims | None, w: Array):
    return _gather(bound, dims, dtype, to, w), jnp.zeros((0,), w.dtype)


def _gather_bwd(
    bound: BoundPlan, dims: Dims, dtype: jnp.dtype, to: Dims | None, like: Array, dw: Array
):
    if to is not None and _crosses(bound, dims, to, dw):
        dw = laid_out(bound, "weights", dims, dw)
    return (summed_gradient(bound, dims, dw, like),)


def _crosses(bound: BoundPlan, dims: Dims, to: Dims, dw: Array) -> bool:
    """Whether a split goes to another dim on the way home, which the compiler takes in steps only:

    a dim that is split here and whole at rest gives its axes to one that is split further.
    """
    here = resolve(bound, "activations", to, dw.shape, name=f"weight {dims}")
    home = resolve(bound, "gradients", dims, dw.shape, name=f"weight {dims}")
    return any(a is not None and b is None for a, b in zip(here, home, strict=True))


_gather.defvjp(_gather_fwd, _gather_bwd)


def laid_out(bound: BoundPlan, role: str, dims: Dims, x: Array) -> Array:
    spec = resolve(bound, role, dims, x.shape, name=f"weight {dims}")
    return jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))


Map = tuple[Array, Dims, Array | None]
"""Weight, its dims, and bias of a linear map."""


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
    return linears(x, ((w, dims, bias),), contract=contract)[0]


def linears(
    x: Float[Array, "*lead_and_in"], maps: Sequence[Map], *, contract: int = 1
) -> tuple[Array, ...]:
    """Several linear maps of one input: what `linear` gives for each, but `x` is moved once.

    With `plan.tensor_matmul` other than `compiler`, an input of two leading dims `[b, s, *in]` is
    gathered once for all maps, and the sum of their gradients is reduced once; see
    `colossax.sharding.matmul`. An input of other rank (chosen tokens, pooled rows) is left to the
    compiler.

    Args:
        x: `[*lead, *in]`; cast to the plan's compute dtype.
        maps: Weight `[*in, *out]` at rest, its dims, and its bias `[*out]` or None, of each.
        contract: How many dims are contracted.

    Raises:
        ValueError: Input and weight do not meet.
        PlanError: A size is not a multiple of the devices of its axes.
    """
    x = x.astype(compute_dtype(x.dtype))
    for w, dims, _ in maps:
        inner = w.shape[:contract]
        if x.shape[x.ndim - contract :] != inner:
            raise ValueError(
                f"linear: input {x.shape} ends in {x.shape[x.ndim - contract :]}, weight {w.shape}"
                f" of dims {dims} begins with {inner}; they must be equal"
            )
    bound = current()
    if bound is None or bound.single or not _own_regions(bound) or x.ndim - contract != 2:
        return tuple(_by_compiler(x, *one, contract) for one in maps)
    shapes = tuple((w.shape, tuple(dims)) for w, dims, _ in maps)
    island = Island(
        layout=layout_of(bound, x.shape, shapes, contract),
        way=bound.plan.tensor_matmul,
        summed=reduction_dtype(bound, x.dtype),
        keep=recomputed(),
    )
    return matmuls(island, x, tuple(w for w, _, _ in maps), tuple(bias for _, _, bias in maps))


def _own_regions(bound: BoundPlan) -> bool:
    """Whether matmuls communicate as `colossax.sharding.matmul` says, not as the compiler does."""
    chosen = bound.plan.tensor_matmul
    return chosen != "compiler" and (chosen != "auto" or bound.plan.tensor_layout != "1d")


def _by_compiler(x: Array, w: Array, dims: Dims, bias: Array | None, contract: int) -> Array:
    lead, inner, out = x.shape[: x.ndim - contract], w.shape[:contract], w.shape[contract:]
    # One dim of tokens: with [b, s] apart, the weight gradient contracts two dims, for which
    # XLA's CPU backend transposes instead of calling its matmul (90 against 129 GFLOP per second).
    flat = (math.prod(lead),) if _tokens_merge(lead) else lead
    static = _Linear(bound=current(), dims=tuple(dims), contract=contract, recomputed=recomputed())
    y = _matmul(static, x.reshape(*flat, math.prod(inner)), w, bias)
    return y.reshape(*lead, *out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Linear:
    bound: BoundPlan | None
    dims: Dims
    contract: int
    recomputed: bool


# One rule for gather and matmul together, so that backward can keep the weight at rest and gather
# it again: with a rule for the gather alone the matmul would keep every layer's weight whole. In
# a layer that is recomputed the second gather is part of that, and a third would cost its bytes.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static: _Linear, x: Array, w: Array, bias: Array | None) -> Array:
    return _forward(static, x, _matrix(static, w, x), bias)


def _forward(static: _Linear, x: Array, matrix: Array, bias: Array | None) -> Array:
    y = jnp.dot(x, matrix)
    if bias is None:
        return y
    return y + gathered(static.bound, static.dims[static.contract :], x.dtype, bias).ravel()


def _matrix(static: _Linear, w: Array, x: Array) -> Array:
    return gathered(static.bound, static.dims, x.dtype, w).reshape(x.shape[-1], -1)


def _matmul_fwd(static: _Linear, x: Array, w: Array, bias: Array | None):
    matrix = _matrix(static, w, x)
    return _forward(static, x, matrix, bias), (x, matrix if static.recomputed else None, w, bias)


def _matmul_bwd(static: _Linear, residuals: Any, dy: Array):
    x, matrix, w, bias = residuals
    bound, dims = static.bound, static.dims
    summed = reduction_dtype(bound, x.dtype)
    dy = _whole_rows(bound, dims[static.contract :], dy)
    dx = jnp.dot(dy, (_matrix(static, w, x) if matrix is None else matrix).T)
    tokens = tuple(range(x.ndim - 1))
    dw = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), preferred_element_type=summed)
    dw = summed_gradient(bound, dims, dw.reshape(w.shape), w)
    if bias is None:
        return dx, dw, None
    db = jnp.sum(dy, axis=tokens, dtype=jnp.float32).astype(summed).reshape(bias.shape)
    return dx, dw, summed_gradient(bound, dims[static.contract :], db, bias)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _whole_rows(bound: BoundPlan | None, out: Dims, dy: Array) -> Array:
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
            grad = laid_out(bound, "weights", dims, grad)
        grad = laid_out(bound, "gradients", dims, grad)
    return grad.astype(like.dtype)


def _tokens_merge(lead: tuple[int, ...]) -> bool:
    """Whether [b, s] may become one dim: a split sequence would have to be gathered for it."""
    bound = current()
    if bound is None or bound.single:
        return True
    rules = bound.rules.activations
    phases = [choices for dim, choices in rules.items() if dim.split(":")[0] == "seq"]
    axes = {axis for choices in phases for choice in choices for axis in choice}
    return len(lead) == 2 and bound.size(sorted(axes)) == 1
