"""Matmuls of a plan's layout in regions of our own, manual over the whole mesh.

Nothing here is left to the compiler's partitioner: what is gathered, summed and scattered is what
`layout` says. The rule for derivatives stands outside of the regions, so that no gradient is
summed twice.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from colossax.sharding.matmul import cannon, collective, gather
from colossax.sharding.matmul.gather import Arrays
from colossax.sharding.matmul.layout import Layout, MapLayout
from colossax.sharding.matmul.splits import Split, axes_of, move_local, spec_of, turn_local
from colossax.sharding.row_major import row_major_local


@dataclasses.dataclass(frozen=True, kw_only=True)
class Island:
    """What is known of matmuls before they are traced.

    Attributes:
        layout: Where everything lies.
        way: `gather`, `overlap` or `cannon`; where the latter two do not fit, the first is taken.
        summed: Dtype in which devices sum the gradients of weights and biases.
        keep: Whether backward gets gathered operands instead of gathering again.
    """

    layout: Layout
    way: str
    summed: jnp.dtype
    keep: bool

    @functools.cached_property
    def gathering(self) -> collective.Ring | None:
        """The ring in place of a gather of x."""
        return collective.gathering_ring(self.layout) if self.way == "overlap" else None

    @functools.cached_property
    def scattering(self) -> collective.Ring | None:
        """The ring in place of a reduce-scatter of y."""
        return collective.scattering_ring(self.layout) if self.way == "overlap" else None

    @functools.cached_property
    def cannon(self) -> bool:
        """Whether blocks pass around in two rings."""
        return self.way == "cannon" and cannon.fits(self.layout)

    @property
    def w_held(self) -> tuple[Split, ...]:
        """The weights as their gathers leave them."""
        maps = self.layout.maps
        if self.cannon:
            return tuple(cannon.held(self.layout, at) for at in range(len(maps)))
        return tuple(linear.w_used for linear in maps)

    @property
    def x_held(self) -> Split:
        """The input as it is kept for backward."""
        return self.layout.x_used if self.keep and not self.cannon else self.layout.x_rest


Biases = tuple[Array | None, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmuls(island: Island, x: Array, weights: Arrays, biases: Biases) -> Arrays:
    """`x @ w + bias` for each of several weights, x gathered once.

    Args:
        island: Layout and dtypes.
        x: `[b, s, *in]` in the compute dtype.
        weights: `[*in, *out]` each, at rest.
        biases: `[*out]` each, at rest, or None.

    Cost: the moves of `layout`, see `move_local`: x and the weights gathered, the outputs summed;
    backward the same once more (gathers not where `keep`), the gradient of x summed as x was
    gathered, and those of the weights as they were. `cost` has the sums.
    """
    return _forward(island, x, weights, biases)[0]


def _matmuls_fwd(island: Island, x: Array, weights: Arrays, biases: Biases):
    ys, held = _forward(island, x, weights, biases)
    likes = tuple(jnp.zeros((0,), w.dtype) for w in weights)
    return ys, (held if island.keep else (x, weights), likes, biases)


def _forward(island: Island, x: Array, weights: Arrays, biases: Biases):
    """The outputs, and x and weights as they were multiplied if they are to be kept."""
    layout, maps = island.layout, island.layout.maps

    def forward_local(x: Array, weights: Any, biases: Any) -> Any:
        weights = _held_local(island, weights, x.dtype)
        ys, x = _multiplied_local(island, x, weights)
        biased = tuple(
            y if bias is None else y + _bias_local(linear, bias.astype(y.dtype))
            for linear, y, bias in zip(maps, ys, biases, strict=True)
        )
        return biased, (x, weights) if island.keep else ()

    kept = (spec_of(island.x_held), _specs(island.w_held)) if island.keep else ()
    mapped = jax.shard_map(
        forward_local,
        mesh=layout.bound.mesh,
        in_specs=(
            spec_of(layout.x_rest),
            _specs(linear.w_rest for linear in maps),
            _bias_specs((linear.bias_rest for linear in maps), biases),
        ),
        out_specs=(_specs(linear.y_rest for linear in maps), kept),
        check_vma=False,
    )
    return mapped(x, weights, biases)


def _matmuls_bwd(island: Island, residuals: Any, dys: Arrays):
    layout, maps = island.layout, island.layout.maps
    (x, weights), likes, biases = residuals

    def backward_local(x: Array, weights: Any, dys: Any) -> Any:
        if not island.keep:
            weights = _held_local(island, weights, x.dtype)
        dx, dws = _differentiated_local(island, x, weights, dys)
        dws = tuple(
            _summed_local(linear, held, dw)
            for linear, held, dw in zip(maps, island.w_held, dws, strict=True)
        )
        dbs = tuple(
            None if bias is None else _bias_gradient_local(island, linear, dy)
            for linear, dy, bias in zip(maps, dys, biases, strict=True)
        )
        return dx, dws, dbs

    held = island.w_held if island.keep else (linear.w_rest for linear in maps)
    mapped = jax.shard_map(
        backward_local,
        mesh=layout.bound.mesh,
        in_specs=(spec_of(island.x_held), _specs(held), _specs(linear.y_rest for linear in maps)),
        out_specs=(
            spec_of(layout.x_rest),
            _specs(linear.w_grad for linear in maps),
            _bias_specs((linear.bias_grad for linear in maps), biases),
        ),
        check_vma=False,
    )
    dx, dws, dbs = mapped(x, weights, dys)
    return dx, _alike(dws, likes), _alike(dbs, biases)


matmuls.defvjp(_matmuls_fwd, _matmuls_bwd)


def _multiplied_local(island: Island, x: Array, weights: Arrays) -> tuple[Arrays, Array]:
    """The outputs at rest, and x as it is to be kept."""
    if island.cannon:
        return cannon.forward_local(x, weights), x
    if island.gathering is not None:
        return collective.gathering_forward_local(island.gathering, x, weights, keep=island.keep)
    if island.scattering is not None:
        return (collective.scattering_forward_local(island.scattering, x, weights[0]),), x
    return gather.forward_local(island.layout, x, weights)


def _differentiated_local(
    island: Island, x: Array, weights: Arrays, dys: Arrays
) -> tuple[Array, Arrays]:
    """The gradient of x at rest, and those of the weights, summed over tokens that were here."""
    layout, kept, summed = island.layout, island.keep, island.summed
    if island.cannon:
        return cannon.backward_local(x, weights, dys, summed=summed)
    if island.gathering is not None:
        return collective.gathering_backward_local(
            island.gathering, layout, x, weights, dys, kept=kept, summed=summed
        )
    if island.scattering is not None:
        dx, dw = collective.scattering_backward_local(
            island.scattering, x, weights[0], dys[0], summed=summed
        )
        return dx, (dw,)
    return gather.backward_local(layout, x, weights, dys, kept=kept, summed=summed)


def _held_local(island: Island, weights: Arrays, dtype: Any) -> Arrays:
    """Weights gathered; cast first, where the shards are."""
    return tuple(
        move_local(_as_in_stack_local(linear.w_rest, held, w).astype(dtype), linear.w_rest, held)
        for linear, held, w in zip(island.layout.maps, island.w_held, weights, strict=True)
    )


def _summed_local(linear: MapLayout, held: Split, dw: Array) -> Array:
    """A weight's gradient over all tokens: scattered before it is summed over what is left."""
    tokens = axes_of(linear.y_used[:2])
    partial = tuple(axis for axis in tokens if axis not in axes_of(held))
    dw = move_local(dw, held, linear.w_grad, partial=partial)
    return _as_in_stack_local(linear.w_grad, held, dw)


def _as_in_stack_local(rest: Split, held: Split, w: Array) -> Array:
    """Weight or gradient as it is stored, which is multiplied split as `held`."""
    return w if rest[1:] == held[1:] else row_major_local(w)


def _bias_local(linear: MapLayout, bias: Array) -> Array:
    return turn_local(bias, linear.bias_rest, linear.y_rest[2:])


def _bias_gradient_local(island: Island, linear: MapLayout, dy: Array) -> Array:
    """The sum of the output's gradient, at rest, over tokens."""
    db = jnp.sum(dy, axis=(0, 1), dtype=jnp.float32).astype(island.summed)
    return turn_local(db, linear.y_rest[2:], linear.bias_grad, partial=axes_of(linear.y_rest[:2]))


def _alike(grads: tuple[Any, ...], likes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each in the dtype of its parameter."""
    return tuple(
        None if like is None else x.astype(like.dtype) for x, like in zip(grads, likes, strict=True)
    )


def _specs(splits: Iterable[Split]) -> tuple[PartitionSpec, ...]:
    return tuple(map(spec_of, splits))


def _bias_specs(splits: Iterable[Split], biases: Biases) -> tuple[PartitionSpec | None, ...]:
    return tuple(
        None if bias is None else spec_of(split) for split, bias in zip(splits, biases, strict=True)
    )
