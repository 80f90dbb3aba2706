"""Grouped matmul as it is written down, in float32: the truth, and slow."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from colossax.pallas.target import Target

from .spec import GroupedSpec

_EXACT = jax.lax.Precision.HIGHEST


def why_not(spec: GroupedSpec, target: Target) -> str | None:
    """It takes everything everywhere."""
    return None


def multiply(
    x: Float[Array, "t k"],
    w: Float[Array, "e _ _"],
    group_sizes: Int[Array, " e"],
    *,
    transposed: bool = False,
) -> Float[Array, "t n"]:
    """`x_i @ w[i]` (`x_i @ w[i].T`) for every group i, zeros after the last.

    Cost: 2 e t k n FLOPs.
    """
    member = _members(group_sizes, x.shape[0])
    wide = x.astype(jnp.float32)
    equation = "tk,nk->tn" if transposed else "tk,kn->tn"
    out = jnp.zeros((x.shape[0], w.shape[1 if transposed else 2]), jnp.float32)
    for i in range(w.shape[0]):
        here = jnp.einsum(equation, wide, w[i].astype(jnp.float32), precision=_EXACT)
        out = jnp.where(member[i][:, None], here, out)
    return out.astype(x.dtype)


def weight_gradient(
    x: Float[Array, "t d"],
    dy: Float[Array, "t f"],
    group_sizes: Int[Array, " e"],
    *,
    dtype: Any = None,
) -> Float[Array, "e d f"]:
    """`x_i.T @ dy_i` for every group i, in `dtype` or else x's.

    Cost: 2 e t d f FLOPs.
    """
    member = _members(group_sizes, x.shape[0])
    products = []
    for i in range(group_sizes.shape[0]):
        kept_x, kept_dy = (
            jnp.where(member[i][:, None], z.astype(jnp.float32), 0.0) for z in (x, dy)
        )
        products.append(jnp.einsum("td,tf->df", kept_x, kept_dy, precision=_EXACT))
    return jnp.stack(products).astype(x.dtype if dtype is None else dtype)


def _members(group_sizes: Int[Array, " e"], rows: int) -> Bool[Array, "e t"]:
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows)
    return (row >= (ends - group_sizes)[:, None]) & (row < ends[:, None])
