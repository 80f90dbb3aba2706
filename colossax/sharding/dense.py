"""Products with dense matrices at rest: gathered, multiplied and differentiated by the plan."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.sharding.context import current, recomputed
from colossax.sharding.matmul import Island, layout_of, matmuls
from colossax.sharding.ops import gathered, reduction_dtype, summed_gradient
from colossax.sharding.rules import activation_sharding
from colossax.typing import Dims

DenseMap = tuple[Array, Dims, Array | None]
"""Matrix at rest, its dims, and bias of a linear map."""


def products(x: Array, maps: Sequence[DenseMap], *, contract: int) -> tuple[Array, ...]:
    """`x @ w + bias` of each map; see `colossax.sharding.linears`."""
    bound = current()
    if bound is None or bound.single or not _is_manual(bound) or x.ndim - contract != 2:
        return tuple(_by_compiler(x, *one, contract) for one in maps)
    shapes = tuple((w.shape, tuple(dims)) for w, dims, _ in maps)
    island = Island(
        layout=layout_of(bound, x.shape, shapes, contract),
        way=bound.plan.tensor_matmul,
        summed=reduction_dtype(bound, x.dtype),
        keep=recomputed(),
    )
    return matmuls(island, x, tuple(w for w, _, _ in maps), tuple(bias for _, _, bias in maps))


def _is_manual(bound: BoundPlan) -> bool:
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
# it again: with a rule for the gather alone the matmul would keep every layer's full weight. In
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
    dy = _as_in_block(bound, dims[static.contract :], dy)
    dx = jnp.dot(dy, (_matrix(static, w, x) if matrix is None else matrix).T)
    tokens = tuple(range(x.ndim - 1))
    dw = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), preferred_element_type=summed)
    dw = summed_gradient(bound, dims, dw.reshape(w.shape), w)
    if bias is None:
        return dx, dw, None
    db = jnp.sum(dy, axis=tokens, dtype=jnp.float32).astype(summed).reshape(bias.shape)
    return dx, dw, summed_gradient(bound, dims[static.contract :], db, bias)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _as_in_block(bound: BoundPlan | None, out: Dims, dy: Array) -> Array:
    """The gradient of a block's output with the sequence as inside the block.

    Both matmuls of backward need it so. Left to choose, the compiler may instead split it along
    the features, as the weight's gradient will be, by replicating it first.
    """
    if bound is None or bound.single or out != ("embed",) or dy.ndim != 3:
        return dy
    sharding = activation_sharding(bound, ("batch", "seq", "embed"), dy.shape)
    return jax.lax.with_sharding_constraint(dy, sharding)


def _tokens_merge(lead: tuple[int, ...]) -> bool:
    """Whether [b, s] may become one dim: a split sequence would have to be gathered for it."""
    bound = current()
    if bound is None or bound.single:
        return True
    rules = bound.rules.activations
    phases = [choices for dim, choices in rules.items() if dim.split(":")[0] == "seq"]
    axes = {axis for choices in phases for choice in choices for axis in choice}
    return len(lead) == 2 and bound.size(sorted(axes)) == 1
