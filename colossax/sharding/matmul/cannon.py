"""Cannon's algorithm: in 2d and 2.5d on q x q devices, blocks are passed around and not gathered.

Device (i, j) of rows and columns has block (i, j) of x, w and y = x w, the tokens of x cut by rows
and its features by columns, w by rows and columns. After a skew it holds x(i, i+j) and w(i+j, j);
q times it multiplies what it holds, adds that to y(i, j), and gets x from its right and w from
below. Backward the same blocks pass once more, and with each of them travels the sum of its
gradient: to that of x(i, k) device (i, j) adds dy(i, j) w(k, j)^T while both are there.

Source: Cannon 1969, A Cellular Computer to Implement the Kalman Filter Algorithm.

Cost: sends q blocks of each operand forward and 2q backward, one block more each time than the
gathers (the skew and the way home). Alive: two blocks of each operand in place of q.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import MeshAxis
from colossax.sharding.matmul.gather import Arrays, added
from colossax.sharding.matmul.layout import Layout
from colossax.sharding.matmul.products import (
    input_gradient_local,
    product_local,
    weight_gradient_local,
)
from colossax.sharding.matmul.splits import Split, axes_of, without

Blocks = tuple[Array, Arrays]
"""Of x, or of its gradient, and of the weights."""

_GRID = (MeshAxis.ROW.value, MeshAxis.COL.value)


def fits(layout: Layout) -> bool:
    """Whether all maps are made of q x q blocks; a weight that is whole along `col` is not."""
    row, col = _GRID
    size = layout.bound.mesh.shape
    features = layout.x_rest[2:]
    cut = tuple(tuple(row if axis == col else axis for axis in entry) for entry in features)
    return (
        size[row] == size[col] > 1
        and row in axes_of(layout.x_rest[:2])
        and axes_of(features) == (col,)
        and all(
            held(layout, at)[: layout.contract] == cut and own.n_axes == (col,)
            for at, own in enumerate(layout.maps)
        )
        and all(own.y_rest == own.y_used for own in layout.maps)
    )


def held(layout: Layout, at: int) -> Split:
    """A weight as it is multiplied here: whole along the batch's axes, `row` apart."""
    own = layout.maps[at]
    drop = set(axes_of(own.w_rest)) - set(axes_of(own.w_used)) - {_GRID[0]}
    return without(own.w_rest, drop)


def forward_local(x: Array, weights: Arrays) -> Arrays:
    """Blocks of `x @ w` for each weight, all blocks at home."""

    def body(carry: Any, _: Any) -> tuple[Any, None]:
        blocks, ys = carry
        return (_passed(blocks), tuple(map(jnp.add, ys, _products(blocks)))), None

    blocks = _skewed(x, weights)
    start = _apart((_passed(blocks), _products(blocks)))
    (blocks, ys), _ = jax.lax.scan(body, start, length=_size() - 2)
    blocks, ys = _apart((blocks, ys))
    return tuple((y + more).astype(x.dtype) for y, more in zip(ys, _products(blocks), strict=True))


def backward_local(x: Array, weights: Arrays, dys: Arrays, *, summed: Any) -> tuple[Array, Arrays]:
    """Gradients of x and of the weights, all blocks at home; of the weights in dtype `summed`."""

    def products(blocks: Blocks) -> Blocks:
        x, weights = blocks
        pairs = zip(dys, weights, strict=True)
        dx = added([input_gradient_local(dy, w, dtype=jnp.float32) for dy, w in pairs])
        return dx, tuple(weight_gradient_local(x, dy, jnp.float32) for dy in dys)

    def rounded(sums: Blocks) -> Blocks:
        return sums[0].astype(x.dtype), tuple(dw.astype(summed) for dw in sums[1])

    def arriving(sums: Blocks, blocks: Blocks) -> Blocks:
        # On their way, one step behind their blocks, while the products for them are made.
        return rounded(jax.tree.map(jnp.add, _passed(sums), products(blocks)))

    def body(carry: Any, _: Any) -> tuple[Any, None]:
        blocks, sums = carry
        return (_passed(blocks), arriving(sums, blocks)), None

    blocks = _skewed(x, weights)
    start = _apart((_passed(blocks), rounded(products(blocks))))
    (blocks, sums), _ = jax.lax.scan(body, start, length=_size() - 2)
    blocks, sums = _apart((blocks, sums))
    return _home(*arriving(sums, blocks))


def _products(blocks: Blocks) -> Arrays:
    x, weights = blocks
    return tuple(product_local(x, w, dtype=jnp.float32) for w in weights)


def _passed(blocks: Blocks) -> Blocks:
    """What the device to the right holds of x, and the one below of the weights."""
    x, weights = blocks
    return _sent(x, lambda i, j: (i, j - 1)), tuple(
        _sent(w, lambda i, j: (i - 1, j)) for w in weights
    )


def _skewed(x: Array, weights: Arrays) -> Blocks:
    """From home to where the first products are made."""
    return _sent(x, lambda i, j: (i, j - i)), tuple(
        _sent(w, lambda i, j: (i - j, j)) for w in weights
    )


def _home(dx: Array, dws: Arrays) -> Blocks:
    """From where the last products are made, of x(i, i+j-1) and w(i+j-1, j), to home."""
    to = tuple(_sent(dw, lambda i, j: (i + j - 1, j)) for dw in dws)
    return _sent(dx, lambda i, j: (i, i + j - 1)), to


def _sent(x: Array, to: Callable[[int, int], tuple[int, int]]) -> Array:
    """Blocks of devices (i, j) on devices `to(i, j)`, modulo q."""
    q = _size()
    pairs = []
    for i, j in itertools.product(range(q), repeat=2):
        row, col = to(i, j)
        pairs.append((i * q + j, row % q * q + col % q))
    return jax.lax.ppermute(x, _GRID, pairs)


def _size() -> int:
    return jax.lax.axis_size(_GRID[0])


def _apart(values: Any) -> Any:
    """Short loops are inlined; their products must not be merged with those before and after."""
    return jax.lax.optimization_barrier(values)
