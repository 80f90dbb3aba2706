"""A linear map on the blocks of one device, and its two derivatives.

`x[b, s, *in] @ w[*in, *out] = y[b, s, *out]`, each as a product of two matrices, which XLA's CPU
backend has a call for.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def product_local(x: Array, w: Array, *, dtype: Any = None) -> Array:
    """`x @ w`."""
    contract = x.ndim - 2
    inner = math.prod(w.shape[:contract])
    y = jnp.dot(_rows(x), w.reshape(inner, -1), preferred_element_type=dtype)
    return y.reshape(*x.shape[:2], *w.shape[contract:])


def input_gradient_local(dy: Array, w: Array, *, dtype: Any = None) -> Array:
    """`dy @ w.T`."""
    outs = dy.ndim - 2
    outer = math.prod(dy.shape[2:])
    dx = jnp.dot(_rows(dy), w.reshape(-1, outer).T, preferred_element_type=dtype)
    return dx.reshape(*dy.shape[:2], *w.shape[: w.ndim - outs])


def weight_gradient_local(x: Array, dy: Array, dtype: Any) -> Array:
    """`x.T @ dy`, over all tokens."""
    tokens = (((0,), (0,)), ((), ()))
    dw = jax.lax.dot_general(_rows(x), _rows(dy), tokens, preferred_element_type=dtype)
    return dw.reshape(*x.shape[2:], *dy.shape[2:])


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:2]), -1)
