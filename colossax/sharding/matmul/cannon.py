"""Cannon's algorithm: in 2d and 2.5d on q x q devices, blocks are passed around and not gathered.

Device (i, j) of rows and columns has block (i, j) of x, w and y = x w, the tokens of x cut by rows
and its features by columns, w by rows and columns. After a skew it holds x(i, i+j) and w(i+j, j);
q times it multiplies what it holds, adds that to y(i, j), and gets x from its right and w from
below. Backward the same blocks pass once more, and with each of them travels the sum of its
gradient: to that of x(i, k) device (i, j) adds dy(i, j) w(k, j)^T while both are there.

Source: Cannon 1969, A Cellular Computer to Implement the Kalman Filter Algorithm.

Cost: sends q blocks of each operand forward and 2q backward, one block more each time than the
gathers: the skew and the way home, the only sends that no product hides. Alive: two blocks of each
operand in place of q, beside the outputs, or the sums of the gradients, in float32.
"""

import itertools
from collections.abc import Callable, Sequence
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

Blocks = tuple[Array, ...]
"""A block of x, or of its gradient, and one of each weight, or of theirs."""

Way = Callable[[int, int], tuple[int, int]]
"""From the place (i, j) of a block to another."""

Product = Callable[[Any], Array]
"""A product of blocks, or a part of one."""

_F32 = jnp.float32
_GRID = (MeshAxis.ROW.value, MeshAxis.COL.value)


def fits(layout: Layout) -> bool:
    """Whether all maps are made of q x q blocks; a weight that is replicated along `col` is not."""
    row, col = _GRID
    size = layout.bound.mesh.shape
    features = layout.x_rest[2:]
    cut = tuple(tuple(row if axis == col else axis for axis in entry) for entry in features)
    return (
        size[row] == size[col] > 1
        and row in axes_of(layout.x_rest[:2])
        and axes_of(features) == (col,)
        and all(
            held(layout, at)[: layout.contract] == cut and linear.n_axes == (col,)
            for at, linear in enumerate(layout.maps)
        )
        and all(linear.y_rest == linear.y_used for linear in layout.maps)
    )


def held(layout: Layout, at: int) -> Split:
    """A weight as it is multiplied here: replicated along the batch's axes, `row` apart."""
    linear = layout.maps[at]
    drop = set(axes_of(linear.w_rest)) - set(axes_of(linear.w_used)) - {_GRID[0]}
    return without(linear.w_rest, drop)


def forward_local(x: Array, weights: Arrays) -> Arrays:
    """Blocks of `x @ w` for each weight, all blocks at home."""

    def product(at: int, half: int) -> Product:
        return lambda blocks: product_local(_cut(blocks[0])[half], blocks[1 + at], dtype=_F32)

    products = [product(at, half) for at in range(len(weights)) for half in range(len(_cut(x)))]

    def body(carry: Any, _: Any) -> tuple[Any, None]:
        blocks, ys = carry
        passed, more = _under(blocks, _ways(blocks), products, blocks)
        return (passed, list(map(jnp.add, ys, more))), None

    blocks = _skewed((x, *weights))
    start = _under(blocks, _ways(blocks), products, blocks)
    (blocks, ys), _ = jax.lax.scan(body, start, length=_size() - 2)
    blocks, ys = jax.lax.optimization_barrier((blocks, ys))
    ys = [(y + product(blocks)).astype(x.dtype) for y, product in zip(ys, products, strict=True)]
    return tuple(_joined(part, x) for part in _dealt(ys, len(weights)))


def backward_local(x: Array, weights: Arrays, dys: Arrays, *, summed: Any) -> tuple[Array, Arrays]:
    """Gradients of x and of the weights, all blocks at home; of the weights in dtype `summed`."""
    halves = len(_cut(x))

    def to_x(at: int, half: int) -> Product:
        return lambda ops: input_gradient_local(_cut(ops[1][at])[half], ops[0][1 + at], dtype=_F32)

    def to_w(at: int, half: int) -> Product:
        return lambda ops: weight_gradient_local(
            _cut(ops[0][0])[half], _cut(ops[1][at])[half], _F32
        )

    each = list(itertools.product(range(len(weights)), range(halves)))
    products = [to_x(*which) for which in each] + [to_w(*which) for which in each]

    def gathered(made: list[Array], sums: Blocks | None) -> Blocks:
        """The gradients of blocks from products, and what was summed before."""
        for_x, for_w = _dealt(made, 2)
        gradients = [
            added([_joined(halves, x) for halves in _dealt(for_x, len(weights))]),
            *(added(halves) for halves in _dealt(for_w, len(weights))),
        ]
        gradients = gradients if sums is None else list(map(jnp.add, sums, gradients))
        return tuple(one.astype(x.dtype if at == 0 else summed) for at, one in enumerate(gradients))

    def body(carry: Any, _: Any) -> tuple[Any, None]:
        blocks, sums = carry
        # The sums go one step behind their blocks, while the products for them are made.
        ways = _ways(blocks)
        passed, made = _under((*blocks, *sums), ways + ways, products, (blocks, dys))
        return (passed[: len(ways)], gathered(made, passed[len(ways) :])), None

    blocks = _skewed((x, *weights))
    blocks_after, made = _under(blocks, _ways(blocks), products, (blocks, dys))
    start = (blocks_after, gathered(made, None))
    (blocks, sums), _ = jax.lax.scan(body, start, length=_size() - 2)
    blocks, sums = jax.lax.optimization_barrier((blocks, sums))
    sums, made = _under(sums, _ways(blocks), products, (blocks, dys))
    dx, *dws = _home(gathered(made, sums))
    return dx, tuple(dws)


def _under(
    leaving: Blocks, ways: list[Way], products: list[Product], operands: Any
) -> tuple[Blocks, list[Array]]:
    """Sends blocks while products are made of operands.

    One after another, each send with its share of the products: several at once XLA would put in a
    row, behind what hides the first of them.
    """
    passed: list[Array] = []
    made: list[Array] = []
    for at, way in enumerate(ways):
        passed.append(_sent(leaving[at], way))
        first, end = (len(products) * n // len(ways) for n in (at, at + 1))
        made += [product(operands) for product in products[first:end]]
        state = (leaving, operands, passed, made)
        leaving, operands, passed, made = jax.lax.optimization_barrier(state)
    return tuple(passed), made


def _cut(x: Array) -> list[Array]:
    """Two halves of the tokens, if there is a number of them that two divides."""
    dim = next((dim for dim in (0, 1) if x.shape[dim] % 2 == 0), None)
    return [x] if dim is None else jnp.split(x, 2, axis=dim)


def _joined(halves: Sequence[Array], like: Array) -> Array:
    """What `_cut` cut, of tokens such as those of `like`."""
    return halves[0] if len(halves) == 1 else jnp.concatenate(halves, like.shape[0] % 2)


def _dealt(parts: Sequence[Array], count: int) -> list[list[Array]]:
    """As many runs of equal length."""
    size = len(parts) // count
    return [list(parts[at * size : (at + 1) * size]) for at in range(count)]


def _ways(blocks: Blocks) -> list[Way]:
    """One step of a round: x to the left, weights up."""
    return [lambda i, j: (i, j - 1), *[lambda i, j: (i - 1, j)] * (len(blocks) - 1)]


def _skewed(blocks: Blocks) -> Blocks:
    """From home to where the first products are made."""
    x, *weights = blocks
    return _sent(x, lambda i, j: (i, j - i)), *(_sent(w, lambda i, j: (i - j, j)) for w in weights)


def _home(sums: Blocks) -> Blocks:
    """From where the last products are made, of x(i, i+j-1) and w(i+j-1, j), to home."""
    dx, *dws = sums
    to = (_sent(dw, lambda i, j: (i + j - 1, j)) for dw in dws)
    return _sent(dx, lambda i, j: (i, i + j - 1)), *to


def _sent(x: Array, way: Way) -> Array:
    """Blocks of devices (i, j) on devices `way(i, j)`, modulo q."""
    q = _size()
    pairs = []
    for i, j in itertools.product(range(q), repeat=2):
        row, col = way(i, j)
        pairs.append((i * q + j, row % q * q + col % q))
    return jax.lax.ppermute(x, _GRID, pairs)


def _size() -> int:
    return jax.lax.axis_size(_GRID[0])
