"""The pieces the optimizers are chained from: Adam's direction, weight decay, trust ratios.

State that mirrors parameters has their tree structure, so `optax.tree_map_params` finds it. Nothing
in `init` looks at the dims, which that function needs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from colossax.optim.contract import DimsOptimizer, LearningRate, layerwise
from colossax.optim.dims import decays, map_with_dims, unit_norms
from colossax.optim.groups import DecayOf, Groups
from colossax.optim.rounding import stochastic_round, update_entropy
from colossax.typing import Dims


def decayed(
    direction: Callable[[Any], optax.GradientTransformation],
    learning_rate: LearningRate,
    weight_decay: float,
    groups: Groups,
) -> DimsOptimizer:
    """`p -= multiple lr (direction + weight_decay p)`, marked as layerwise.

    Args:
        direction: `dims -> transformation`, of each layer and expert on its own.
        learning_rate: A number, or a schedule of the step count from 0.
        weight_decay: Of matrices and tables.
        groups: Multiples, and decays in place of that one.
    """
    decay = groups.decay_of(weight_decay)
    return layerwise(
        lambda dims: optax.chain(
            direction(dims),
            add_decay(decay, dims),
            optax.scale_by_learning_rate(learning_rate),
            *groups.scaled(dims),
        ),
        groups,
    )


def scale_by_adam(
    b1: float,
    b2: float,
    eps: float,
    moment_dtype: DTypeLike,
    second_moment_dtype: DTypeLike = jnp.float32,
) -> optax.GradientTransformation:
    """Adam's direction, `m' / (sqrt(v') + eps)` with bias-corrected moments, in float32.

    The moments are kept in `moment_dtype` and `second_moment_dtype`; a step uses them as they are
    before they are rounded. In bfloat16 the second is rounded at random: to the nearest of eight
    bits, `b2 v + (1 - b2) g^2` would return v unchanged once b2 is above 0.99.
    """
    at_random = jnp.dtype(second_moment_dtype) == jnp.bfloat16

    def init(params: Any) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(
            count=jnp.zeros((), jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=moment_dtype),
            nu=optax.tree.zeros_like(params, dtype=second_moment_dtype),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        del params
        grads = optax.tree.cast(updates, jnp.float32)
        wide = optax.tree.cast(state.nu, jnp.float32)
        mu = jax.tree.map(lambda g, m: b1 * m.astype(jnp.float32) + (1 - b1) * g, grads, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * jnp.square(g), grads, wide)
        count = optax.safe_increment(state.count)
        first, second = 1 - b1**count, 1 - b2**count
        steps = jax.tree.map(lambda m, v: (m / first) / (jnp.sqrt(v / second) + eps), mu, nu)
        if at_random:
            entropy = jax.tree.map(lambda v, g: update_entropy(v, g, count), state.nu, grads)
            nu = jax.tree.map(stochastic_round, nu, entropy)
        new = optax.ScaleByAdamState(count=count, mu=optax.tree.cast(mu, moment_dtype), nu=nu)
        return steps, new

    return optax.GradientTransformation(init, update)


def add_decay(rate: DecayOf, dims: Any) -> optax.GradientTransformation:
    """Adds `rate * parameter` to updates, in float32."""

    def decay(leaf_dims: Dims, step: Array, p: Array) -> Array:
        return _decayed(step, p, rate(leaf_dims))

    return _stateless(decay, dims)


def scaled_decay(rate: DecayOf, groups: Groups, dims: Any, steps: Any, params: Any) -> Any:
    """`multiple (step + rate * parameter)` of each parameter, in float32."""

    def one(leaf_dims: Dims, step: Array, p: Array) -> Array:
        return groups.multiple_of(leaf_dims) * _decayed(step, p, rate(leaf_dims))

    return map_with_dims(one, dims, steps, params)


def scale_by_lamb_ratio(
    rate: DecayOf, dims: Any, *, bounds: tuple[float, float], adapt_all: bool
) -> optax.GradientTransformation:
    """Per unit, `phi(|p|) / |u| * u` with `u = step + rate * p` and phi clamping to `bounds`.

    Cost: reads parameters and updates once, holds no state; communicates two `unit_norms`.
    """

    def scale(leaf_dims: Dims, step: Array, p: Array) -> Array:
        step = _decayed(step, p, rate(leaf_dims))
        if not (decays(leaf_dims) or adapt_all):
            return step
        weight = jnp.clip(unit_norms(p, leaf_dims), *bounds)
        return step * _ratio(weight, unit_norms(step, leaf_dims))

    return _stateless(scale, dims)


def scale_by_lars_ratio(
    rate: DecayOf, dims: Any, *, coefficient: float, eps: float, adapt_all: bool
) -> optax.GradientTransformation:
    """Per unit, `coefficient |p| / (|g| + rate |p| + eps) * (g + rate * p)`.

    The paper adds the two norms, where Optax takes the norm of the sum; without decay they agree.
    Cost: reads parameters and updates once, holds no state; communicates two `unit_norms`.
    """

    def scale(leaf_dims: Dims, grad: Array, p: Array) -> Array:
        decay = rate(leaf_dims)
        step = _decayed(grad, p, decay)
        if not (decays(leaf_dims) or adapt_all):
            return step
        weight = unit_norms(p, leaf_dims)
        below = unit_norms(grad, leaf_dims) + decay * weight + eps
        return step * _ratio(coefficient * weight, below)

    return _stateless(scale, dims)


def _decayed(step: Array, p: Array, rate: float) -> Array:
    step = step.astype(jnp.float32)
    return step + rate * p.astype(jnp.float32) if rate else step


def _ratio(above: Float[Array, "..."], below: Float[Array, "..."]) -> Float[Array, "..."]:
    """`above / below`; 1 where either is zero: no weight to compare with, or no step to scale."""
    known = (above > 0) & (below > 0)
    return jnp.where(known, above / jnp.where(known, below, 1.0), 1.0)


def _stateless(fn: Any, dims: Any) -> optax.GradientTransformation:
    """A transformation that is `fn(dims, update, parameter)` per leaf."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return map_with_dims(fn, dims, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
