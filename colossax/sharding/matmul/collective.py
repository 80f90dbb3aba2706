"""Collective matmul: gathers and reductions step by step, each step under a multiplication.

The axis of size n that is gathered or scattered splits a dim of the tokens. Instead of an
all-gather, blocks of the tokens go around a ring, and each device multiplies the block it holds
while the next one is on its way. Instead of a reduce-scatter, the sums go around, and each device
adds its own product to the one that arrives, which it multiplied meanwhile.

The steps are those of a `lax.scan`: side by side XLA would merge products that share an operand
into one, behind all sends. Source: Wang et al. 2023, Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models.

Cost: `n - 1` sends of a block, the bytes of the all-gather or reduce-scatter. Alive: two blocks
in place of all n (with `keep` all n), beside the sum or the outputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.sharding.matmul.gather import Arrays, added
from colossax.sharding.matmul.layout import Layout
from colossax.sharding.matmul.products import (
    input_gradient_local,
    product_local,
    weight_gradient_local,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The axis along which blocks go around, and the dim that it splits at rest."""

    axis: str
    dim: int

    @property
    def size(self) -> int:
        """Devices along the axis."""
        return jax.lax.axis_size(self.axis)

    def shift(self, x: Any) -> Any:
        """What the device before this one holds."""
        n = self.size
        return jax.lax.ppermute(x, self.axis, [(i, (i + 1) % n) for i in range(n)])

    def arrived(self, step: Any) -> Array:
        """Whose block a device holds after so many shifts of its own."""
        return (jax.lax.axis_index(self.axis) - step) % self.size

    def due(self, step: Any) -> Array:
        """For whom is the sum that is here after so many shifts, after n - 1 of them at home."""
        return self.arrived(step + 1)

    def block(self, x: Array, of: Any) -> Array:
        """A device's block of all tokens."""
        size = x.shape[self.dim] // self.size
        return jax.lax.dynamic_slice_in_dim(x, of * size, size, self.dim)

    def put(self, x: Array, block: Array, of: Any) -> Array:
        """All tokens with a device's block set."""
        at = of * block.shape[self.dim]
        return jax.lax.dynamic_update_slice_in_dim(x, block, at, self.dim)

    def room(self, like: Array, features: tuple[int, ...]) -> Array:
        """Zeros for all tokens of which `like` is one block."""
        tokens = [n * (self.size if at == self.dim else 1) for at, n in enumerate(like.shape[:2])]
        return jnp.zeros((*tokens, *features), like.dtype)


def gathering_ring(layout: Layout) -> Ring | None:
    """The ring in place of an all-gather of x, where that is all that the maps ask for."""
    if any(linear.y_used != linear.y_rest or linear.k_axes for linear in layout.maps):
        return None
    return _ring(layout.x_rest, layout.x_used)


def scattering_ring(layout: Layout) -> Ring | None:
    """The ring in place of a reduce-scatter of y, where that is all that the one map asks for."""
    if layout.x_rest != layout.x_used or len(layout.maps) > 1 or layout.maps[0].n_axes:
        return None
    linear = layout.maps[0]
    ring = _ring(linear.y_rest, linear.y_used)
    return ring if ring is not None and linear.k_axes == (ring.axis,) else None


def _ring(finer: Any, coarser: Any) -> Ring | None:
    """The ring along the one axis that `finer` has beyond `coarser`, if it splits tokens."""
    more = [
        Ring(axis=axis, dim=dim)
        for dim, (one, other) in enumerate(zip(finer, coarser, strict=True))
        for axis in one[len(other) :]
    ]
    return more[0] if len(more) == 1 and more[0].dim < 2 else None


def gathering_forward_local(
    ring: Ring, x: Array, weights: Arrays, *, keep: bool
) -> tuple[Arrays, Array]:
    """`all_gather(x) @ w` for each weight, and the gathered x if it is to be kept, else x."""

    def put(filled: Arrays, block: Array, step: Any) -> Arrays:
        made = [product_local(block, w) for w in weights] + [block] * keep
        whose = ring.arrived(step)
        return tuple(ring.put(all_, one, whose) for all_, one in zip(filled, made, strict=True))

    features = [w.shape[x.ndim - 2 :] for w in weights] + [x.shape[2:]] * keep
    room = tuple(ring.room(x, each) for each in features)
    filled = _passed_around(ring, x, put, room)
    return filled[: len(weights)], filled[-1] if keep else x


def gathering_backward_local(
    ring: Ring, layout: Layout, x: Array, weights: Arrays, dys: Arrays, *, kept: bool, summed: Any
) -> tuple[Array, Arrays]:
    """Gradients of `all_gather(x) @ w`: x goes around once more while the sums of its gradient do.

    Args:
        ring: Axis and dim.
        layout: Tells which weights are replicated on all devices: those need no sum.
        x: At rest, or gathered if `kept`.
        weights: As they are multiplied.
        dys: Gradients of the outputs.
        kept: Whether x is gathered.
        summed: Dtype of the weights' gradients.
    """
    pairs = list(zip(weights, dys, strict=True))
    split = [pair for linear, pair in zip(layout.maps, pairs, strict=True) if linear.n_axes]
    replicated = [
        pair for linear, pair in zip(layout.maps, pairs, strict=True) if not linear.n_axes
    ]

    def transposed(pairs: list[tuple[Array, Array]], of: Any) -> Array:
        return added(
            [input_gradient_local(ring.block(dy, of), w, dtype=jnp.float32) for w, dy in pairs]
        )

    def sums(step: Any) -> Array:
        return transposed(split, ring.due(step))

    local = [transposed(replicated, ring.arrived(0))] if replicated else []
    if kept:
        dws = tuple(weight_gradient_local(x, dy, summed) for dy in dys)
        around = [_summed_around(ring, sums, x.dtype)] if split else []
        return added([*around, *local]).astype(x.dtype), dws

    def multiply(state: Any, block: Array, step: Any) -> Any:
        dws, around = state
        whose = ring.arrived(step)
        more = (weight_gradient_local(block, ring.block(dy, whose), jnp.float32) for dy in dys)
        return tuple(map(jnp.add, dws, more)), around

    def both(state: Any, block: Array, step: Any) -> Any:
        # The block of x goes under its own products, the sum under those that are added to it.
        (dws, around), step = jax.lax.optimization_barrier((multiply(state, block, step), step))
        return dws, [(ring.shift(dx) + sums(step + 1)).astype(x.dtype) for dx in around]

    start = (
        tuple(jnp.zeros(w.shape, jnp.float32) for w in weights),
        [sums(0).astype(x.dtype)] if split else [],
    )
    dws, around = _passed_around(ring, x, both, start, last=multiply)
    return added([*around, *local]).astype(x.dtype), tuple(dw.astype(summed) for dw in dws)


def scattering_forward_local(ring: Ring, x: Array, w: Array) -> Array:
    """`reduce_scatter(x @ w)`."""

    def products(step: Any) -> Array:
        return product_local(ring.block(x, ring.due(step)), w, dtype=jnp.float32)

    return _summed_around(ring, products, x.dtype)


def scattering_backward_local(
    ring: Ring, x: Array, w: Array, dy: Array, *, summed: Any
) -> tuple[Array, Array]:
    """Gradients of `reduce_scatter(x @ w)`: that of the output goes around for both."""

    def multiply(state: Any, block: Array, step: Any) -> Any:
        dx, dw = state
        whose = ring.arrived(step)
        dw = dw + weight_gradient_local(ring.block(x, whose), block, jnp.float32)
        return ring.put(dx, input_gradient_local(block, w), whose), dw

    start = (jnp.zeros_like(x), jnp.zeros(w.shape, jnp.float32))
    dx, dw = _passed_around(ring, dy, multiply, start)
    return dx, dw.astype(summed)


Use = Callable[[Any, Array, Any], Any]


def _passed_around(ring: Ring, x: Array, use: Use, start: Any, *, last: Use | None = None) -> Any:
    """`state = use(state, block, step)` for the blocks of all devices, this one's first.

    The last block is used by `last`, by default the same.
    """

    def body(carry: Any, step: Array) -> tuple[Any, None]:
        block, state = carry
        return (ring.shift(block), use(state, block, step)), None

    steps = ring.size - 1
    # Two devices need one step, whose loop is inlined: the barriers keep its products from being
    # merged with those before and after it.
    carry, each = jax.lax.optimization_barrier(((x, start), jnp.arange(steps)))
    carry, _ = jax.lax.scan(body, carry, each)
    block, state = jax.lax.optimization_barrier(carry)
    return (last or use)(state, block, steps)


def _summed_around(ring: Ring, part: Callable[[Any], Array], dtype: Any) -> Array:
    """The sum over devices of their `part(step)`, each made for the block due at that step."""

    def body(total: Array, step: Array) -> tuple[Array, None]:
        return (ring.shift(total) + part(step)).astype(dtype), None

    first, steps = jax.lax.optimization_barrier((part(0).astype(dtype), jnp.arange(1, ring.size)))
    return jax.lax.scan(body, first, steps)[0]
