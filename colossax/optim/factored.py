"""Adafactor and CAME: a second moment as the product of one number a row and one a column.

Rows and columns are the last two sides of a parameter (`dims.sides`), of each layer and expert by
itself. Optax's Adafactor takes the two largest dims, layers among them, and its clipping and its
parameter scale are of a whole stack.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from colossax.config import above, at_least
from colossax.config.bounds import DECAYS
from colossax.optim.by_leaf import NOTHING, by_leaf
from colossax.optim.contract import DimsOptimizer, LearningRate, check_rates
from colossax.optim.dims import sides, unit_norms
from colossax.optim.groups import ALIKE, Groups
from colossax.optim.transforms import decayed
from colossax.typing import Dims

_SQUARE_EPS = 1e-30
"""Added to squares of gradients: far below float32's resolution of any that is not 0."""

Factors = tuple[Any, Any, Any]
"""Numbers of rows and of columns of a matrix, or what a vector has for each of its elements."""


@dataclasses.dataclass(frozen=True)
class AdafactorRule:
    """See `adafactor`; a `by_leaf.Rule`."""

    momentum: float | None
    decay_power: float
    clip: float
    least_scale: float | None
    moment_dtype: DTypeLike
    fields = ("rows", "cols", "full", "mu")

    def start(self, dims: Dims, p: Any) -> tuple[Any, ...]:
        mu = NOTHING if self.momentum is None else jnp.zeros(p.shape, self.moment_dtype)
        return (*_zeros(dims, p), mu)

    def move(
        self, dims: Dims, count: Int[Array, ""], g: Array, p: Array, state: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        *factors, mu = state
        keep = 1 - count.astype(jnp.float32) ** -self.decay_power
        factors = _followed(dims, factors, jnp.square(g) + _SQUARE_EPS, keep)
        step = _clipped(dims, g * _inverse_root(dims, factors), self.clip)
        if self.momentum is not None:
            step = self.momentum * mu.astype(jnp.float32) + (1 - self.momentum) * step
            mu = step.astype(self.moment_dtype)
        if self.least_scale is not None:
            step = step * jnp.maximum(_unit_rms(dims, p), self.least_scale)
        return step, (*factors, mu)


@dataclasses.dataclass(frozen=True)
class CameRule:
    """See `came`; a `by_leaf.Rule`."""

    b1: float
    b2: float
    b3: float
    eps: float
    clip: float
    moment_dtype: DTypeLike
    fields = ("rows", "cols", "full", "mu", "doubt_rows", "doubt_cols")

    def start(self, dims: Dims, p: Any) -> tuple[Any, ...]:
        factors = _zeros(dims, p)
        return (*factors, jnp.zeros(p.shape, self.moment_dtype), *factors[:2])

    def move(
        self, dims: Dims, count: Int[Array, ""], g: Array, p: Array, state: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        rows, cols, full, mu, doubt_rows, doubt_cols = state
        factors = _followed(dims, (rows, cols, full), jnp.square(g) + _SQUARE_EPS, self.b2)
        step = _clipped(dims, g * _inverse_root(dims, factors), self.clip)
        mean = self.b1 * mu.astype(jnp.float32) + (1 - self.b1) * step
        doubts: Factors = (doubt_rows, doubt_cols, NOTHING)
        moved = mean
        if len(sides(dims)) >= 2:
            doubts = _followed(dims, doubts, jnp.square(step - mean) + self.eps, self.b3)
            moved = mean * _inverse_root(dims, doubts)
        return moved, (*factors, mean.astype(self.moment_dtype), *doubts[:2])


def adafactor(
    learning_rate: LearningRate,
    *,
    momentum: float | None = None,
    decay_power: float = 0.8,
    clip: float = 1.0,
    least_scale: float | None = 1e-3,
    weight_decay: float = 0.0,
    groups: Groups = ALIKE,
    moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """Adafactor: `p -= lr (max(least_scale, RMS(p)) u + weight_decay p)`.

    `u = g / sqrt(r c / mean(r))`, clipped to an RMS of `clip`; r and c are means over the columns
    and the rows of `g^2`, averaged over steps with decay `1 - t^-decay_power`. Vectors keep all of
    `g^2`. Everything is of one layer and expert, however it is stacked and sharded.

    Args:
        learning_rate: A number, or a schedule of the step count from 0; relative to the size of
            parameters where they are scaled.
        momentum: Decay of a mean of `u`; None keeps none.
        decay_power: How fast the averages forget less.
        clip: Largest RMS of u.
        least_scale: Size that a parameter is taken to have at least; None: steps know no sizes.
        weight_decay: Times the parameter; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        moment_dtype: Of the mean of u.

    Raises:
        InputError: An argument is out of range.

    Cost: 4 bytes of state for each row and column of a matrix; with momentum one `moment_dtype` a
    parameter more. Communicates the sums of rows and columns over the devices that share them.
    Reference: Shazeer and Stern 2018, Adafactor, algorithms 4 and 5; sizes as in 8.
    """
    for name, value in {"decay_power": decay_power, "clip": clip}.items():
        above(0).check(value, f"adafactor: {name}")
    if momentum is not None:
        DECAYS.check(momentum, "adafactor: momentum")
    if least_scale is not None:
        at_least(0).check(least_scale, "adafactor: least_scale")
    check_rates("adafactor", learning_rate, shares={}, sizes={"weight_decay": weight_decay})
    rule = AdafactorRule(momentum, decay_power, clip, least_scale, moment_dtype)
    return decayed(lambda dims: by_leaf(rule, dims), learning_rate, weight_decay, groups)


def came(
    learning_rate: LearningRate,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9999,
    eps: float = 1e-16,
    clip: float = 1.0,
    weight_decay: float = 0.0,
    groups: Groups = ALIKE,
    moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """CAME: Adafactor's mean step m, divided by the root of how far steps u were from it.

    `m = b1 m + (1 - b1) u; p -= lr (m / sqrt(R C / mean(R)) + weight_decay p)`, where R and C
    follow rows and columns of `(u - m)^2 + eps` with decay b3. Vectors step along m. All is of one
    layer and expert, however it is stacked and sharded.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        b1: Decay of the mean step.
        b2: Decay of rows and columns of squares.
        b3: Decay of those of the distances.
        eps: Added to the distances.
        clip: Largest RMS of u.
        weight_decay: Times the parameter; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        moment_dtype: Of the mean step.

    Raises:
        InputError: An argument is out of range.

    Cost: one `moment_dtype` a parameter, 8 bytes for each row and column of a matrix.
    Reference: Luo et al. 2023, CAME: Confidence-guided Adaptive Memory Efficient Optimization.
    """
    for name, value in {"eps": eps, "clip": clip}.items():
        above(0).check(value, f"came: {name}")
    shares = {"b1": b1, "b2": b2, "b3": b3}
    check_rates("came", learning_rate, shares=shares, sizes={"weight_decay": weight_decay})
    rule = CameRule(b1, b2, b3, eps, clip, moment_dtype)
    return decayed(lambda dims: by_leaf(rule, dims), learning_rate, weight_decay, groups)


def _zeros(dims: Dims, p: Any) -> Factors:
    found = sides(dims)
    if len(found) < 2:
        return NOTHING, NOTHING, jnp.zeros(p.shape, jnp.float32)
    rows, cols = found[-2:]
    return _ones_at(cols, p), _ones_at(rows, p), NOTHING


def _ones_at(axes: tuple[int, ...], p: Any) -> Array:
    """Zeros like `p`, of size 1 along some dims."""
    shape = [1 if at in axes else size for at, size in enumerate(p.shape)]
    return jnp.zeros(shape, jnp.float32)


def _followed(dims: Dims, factors: Any, square: Array, keep: Any) -> Factors:
    """Averages that have gone on by these squares."""
    rows, cols, full = factors
    found = sides(dims)
    if len(found) < 2:
        return rows, cols, keep * full + (1 - keep) * square
    over_cols = jnp.mean(square, axis=found[-1], keepdims=True)
    over_rows = jnp.mean(square, axis=found[-2], keepdims=True)
    return keep * rows + (1 - keep) * over_cols, keep * cols + (1 - keep) * over_rows, full


def _inverse_root(dims: Dims, factors: Factors) -> Float[Array, "..."]:
    """`1 / sqrt(r c / mean(r))`, by parts: products of two of them leave float32."""
    rows, cols, full = factors
    found = sides(dims)
    if len(found) < 2:
        return jax.lax.rsqrt(full)
    mean = jnp.mean(rows, axis=found[-2], keepdims=True)
    return jax.lax.rsqrt(rows / mean) * jax.lax.rsqrt(cols)


def _clipped(dims: Dims, step: Array, largest: float) -> Array:
    return step / jnp.maximum(1.0, _unit_rms(dims, step) / largest)


def _unit_rms(dims: Dims, x: Array) -> Float[Array, "..."]:
    """Root of the mean square of each unit; unit dims keep their size, the others become 1."""
    norms = unit_norms(x, dims)
    return norms / jnp.sqrt(x.size / norms.size)
