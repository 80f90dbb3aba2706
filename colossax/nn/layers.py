"""Linear maps, norms and embeddings."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from colossax.nn.module import param
from colossax.nn.weights import Weighted
from colossax.pallas.norms import layer_norm, rms_norm
from colossax.sharding import Dense, Weight, current, gather_weight, linears, remembered
from colossax.typing import Dims


class Linear(Weighted):
    """`x @ w + b` over the last `contract` dims of x; `w` is `[*in, *out]`.

    `w` is a parameter, or a module that has a `weight` (see `with_weights`). Initial weights are
    normal with standard deviation `std`, biases zero. Where the plan in force multiplies it in
    float8 by delayed scales, `history` has the largest numbers of the steps before.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dims: Dims,
        *,
        rngs: nnx.Rngs,
        contract: int = 1,
        bias: bool = False,
        std: float = 0.02,
    ):
        self.contract = contract
        self.dims = tuple(dims)
        self.w = param(jax.random.normal(rngs.params(), shape, jnp.float32) * std, dims)
        self.b = param(jnp.zeros(shape[contract:], jnp.float32), dims[contract:]) if bias else None
        self.history = _history(self.dims)

    def __call__(self, x: Float[Array, "*lead_and_in"]) -> Float[Array, "*lead_and_out"]:
        return linears(x, (self.map,), contract=self.contract)[0]

    @property
    def weight(self) -> Weight:
        """See `Weighted`."""
        found = super().weight
        if self.history is None:
            return found
        assert isinstance(found, Dense)
        return dataclasses.replace(found, history=self.history[...])

    @property
    def map(self) -> tuple[Weight, Array | None]:
        """Weight and bias, as `colossax.sharding.linears` takes them."""
        return self.weight, None if self.b is None else self.b[...]


def _history(dims: Dims) -> nnx.Param | None:
    """Of a matrix that the plan in force multiplies in float8 by delayed scales; else None."""
    bound = current()
    if bound is None or not bound.plan.precision.remembers(dims):
        return None
    steps = bound.plan.precision.float8.history
    first = jnp.zeros((3, steps), jnp.float32)
    return param(first, (None, None), dtype="float32", update=remembered, noted=True)


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last dim, in float32.

    `dim` names the dim that is normalised, `embed` or `head_dim`. With `from_one` the factor is
    `1 + scale`, which begins at 0, so that decay draws it to 1 (Gemma).
    """

    def __init__(self, size: int, *, eps: float = 1e-6, dim: str = "embed", from_one: bool = False):
        self.eps = eps
        self.dims = (dim,)
        self.from_one = from_one
        first = jnp.zeros if from_one else jnp.ones
        self.scale = param(first((size,), jnp.float32), self.dims)

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        scale = gather_weight(self.scale[...], self.dims, dtype=jnp.dtype("float32"))
        return rms_norm(x, 1 + scale if self.from_one else scale, eps=self.eps)


class HeadsRMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last two dims together, in float32.

    Where devices split the heads, they sum up one number of each token.
    """

    def __init__(self, shape: tuple[int, int], dims: Dims, *, eps: float = 1e-6):
        self.eps = eps
        self.dims = tuple(dims)
        self.scale = param(jnp.ones(shape, jnp.float32), self.dims)

    def __call__(self, x: Float[Array, "b s n h"]) -> Float[Array, "b s n h"]:
        scale = gather_weight(self.scale[...], self.dims, dtype=jnp.dtype("float32"))
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=(-2, -1), keepdims=True)
        return (wide * jax.lax.rsqrt(square + self.eps) * scale[None, None]).astype(x.dtype)


class HeadsLayerNorm(nnx.Module):
    """`(x - mean) / std * scale` over the last dim, in float32, scales of each head.

    Source: the normed queries and keys of Command R+.
    """

    def __init__(self, shape: tuple[int, int], dims: Dims, *, eps: float = 1e-5):
        self.eps = eps
        self.dims = tuple(dims)
        self.scale = param(jnp.ones(shape, jnp.float32), self.dims)

    def __call__(self, x: Float[Array, "b s n h"]) -> Float[Array, "b s n h"]:
        scale = gather_weight(self.scale[...], self.dims, dtype=jnp.dtype("float32"))
        ones = jnp.ones(x.shape[-1:], jnp.float32)
        normed = layer_norm(x.astype(jnp.float32), ones, jnp.zeros_like(ones), eps=self.eps)
        return (normed * scale[None, None]).astype(x.dtype)


class LayerNorm(nnx.Module):
    """`(x - mean) / std * scale + bias` over the last dim, in float32; the bias may be left out."""

    def __init__(self, size: int, *, eps: float = 1e-5, bias: bool = True):
        self.eps = eps
        self.scale = param(jnp.ones((size,), jnp.float32), ("embed",))
        self.bias = param(jnp.zeros((size,), jnp.float32), ("embed",)) if bias else None

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        f32 = jnp.dtype("float32")
        scale = gather_weight(self.scale[...], ("embed",), dtype=f32)
        if self.bias is None:
            return layer_norm(x, scale, jnp.zeros_like(scale), eps=self.eps)
        bias = gather_weight(self.bias[...], ("embed",), dtype=f32)
        return layer_norm(x, scale, bias, eps=self.eps)


class Scale(nnx.Module):
    """`x * scale` over the last dim, a number of each channel that begins at `first`.

    Source: Touvron et al. 2021, Going deeper with Image Transformers (LayerScale).
    """

    def __init__(self, size: int, first: float):
        self.scale = param(jnp.full((size,), first, jnp.float32), ("embed",))

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        return x * gather_weight(self.scale[...], ("embed",), dtype=x.dtype)


class Embedding(Weighted):
    """A table `[rows, embed]` looked up by integers; initially normal with deviation `std`.

    `table` is a parameter, or a module that has a `weight` (see `with_weights`).
    """

    held_as = "table"

    def __init__(
        self,
        rows: int,
        size: int,
        *,
        rngs: nnx.Rngs,
        dim: str,
        std: float = 0.02,
        tied: bool = True,
        fixed: np.ndarray | None = None,
    ):
        """Make the table.

        Args:
            rows, size: Of the table.
            rngs: Keys of the parameters.
            dim: Of the rows.
            std: Deviation.
            tied: Whether it may be read otherwise than by looking up.
            fixed: What it holds for ever, `[rows, size]`; None: it is drawn, and learns.
        """
        self.dims = (dim, "embed" if tied else "embed:table")
        if fixed is None:
            first = jax.random.normal(rngs.params(), (rows, size), jnp.float32) * std
        else:
            first = jnp.asarray(fixed)
        self.table = param(first, self.dims, learns=fixed is None)

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        return self.weight.rows(ids)


def depth_scaled(std: float, layers: int) -> float:
    """Deviation for a map that adds to the residual stream: `std / sqrt(2 layers)` (GPT-2)."""
    return std / math.sqrt(2 * layers)
