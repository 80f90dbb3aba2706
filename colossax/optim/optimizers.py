"""The optimizers, each `dims -> optax.GradientTransformation`."""

import math

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from colossax.config import above
from colossax.errors import InputError
from colossax.optim.contract import DimsOptimizer, LearningRate, check_rates, layerwise
from colossax.optim.groups import ALIKE, Groups
from colossax.optim.transforms import (
    decayed,
    scale_by_adam,
    scale_by_lamb_ratio,
    scale_by_lars_ratio,
)


def adamw(
    learning_rate: LearningRate,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    groups: Groups = ALIKE,
    moment_dtype: DTypeLike = jnp.float32,
    second_moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """Adam with decoupled weight decay: `p -= lr (m' / (sqrt(v') + eps) + weight_decay p)`.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Times the parameter; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        moment_dtype: Of the first moment.
        second_moment_dtype: Of the second: float32, or bfloat16, which is rounded at random.

    Raises:
        InputError: An argument is out of range.

    Cost: 8 bytes of state a parameter, 6 with one moment in bfloat16, 4 with both.
    Reference: Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization.
    """
    above(0).check(eps, "adamw: eps")
    sizes = {"weight_decay": weight_decay}
    check_rates("adamw", learning_rate, shares={"b1": b1, "b2": b2}, sizes=sizes)
    _check_second_moment("adamw", second_moment_dtype)
    adam = scale_by_adam(b1, b2, eps, moment_dtype, second_moment_dtype)
    return decayed(lambda dims: adam, learning_rate, weight_decay, groups)


def sgd(
    learning_rate: LearningRate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    groups: Groups = ALIKE,
    moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """Stochastic gradient descent: `m = momentum m + g; p -= lr (m + weight_decay p)`.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        momentum: 0 keeps no moment.
        nesterov: Steps along `g + momentum m` instead of m.
        weight_decay: Times the parameter, outside the momentum; see `decays`.
        groups: Other rates and decays, by pattern.
        moment_dtype: Of the moment.

    Raises:
        InputError: An argument is out of range.

    Cost: no state without momentum, else one `moment_dtype` a parameter.
    """
    sizes = {"weight_decay": weight_decay}
    check_rates("sgd", learning_rate, shares={"momentum": momentum}, sizes=sizes)
    trace = optax.trace(momentum, nesterov, moment_dtype) if momentum else optax.identity()
    return decayed(lambda dims: trace, learning_rate, weight_decay, groups)


def lion(
    learning_rate: LearningRate,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.1,
    groups: Groups = ALIKE,
    moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """Lion: `p -= lr (sign(b1 m + (1 - b1) g) + weight_decay p); m = b2 m + (1 - b2) g`.

    Each element moves by the whole rate: take a third to a tenth of AdamW's, and a decay as many
    times greater.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        b1: Share of the moment in a step.
        b2: Decay of the moment.
        weight_decay: Times the parameter; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        moment_dtype: Of the moment.

    Raises:
        InputError: An argument is out of range.

    Cost: one `moment_dtype` a parameter.
    Reference: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms.
    """
    sizes = {"weight_decay": weight_decay}
    check_rates("lion", learning_rate, shares={"b1": b1, "b2": b2}, sizes=sizes)
    sign = optax.chain(_wide(), optax.scale_by_lion(b1, b2, moment_dtype))
    return decayed(lambda dims: sign, learning_rate, weight_decay, groups)


def lamb(
    learning_rate: LearningRate,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    groups: Groups = ALIKE,
    bounds: tuple[float, float] = (0.0, math.inf),
    adapt_all: bool = False,
    moment_dtype: DTypeLike = jnp.float32,
    second_moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """LAMB: Adam's direction u (with decay), scaled to `phi(|p|) / |u|`, per layer and expert.

    Norms are of one parameter of one layer (and expert), however it is stacked and sharded.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to Adam's denominator.
        weight_decay: Times the parameter, inside u; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        bounds: phi clamps the parameter's norm to this range; the default leaves it.
        adapt_all: Scale norms and biases too; else they take Adam's step, as in the authors' code.
        moment_dtype: Of the first moment.
        second_moment_dtype: Of the second: float32, or bfloat16, which is rounded at random.

    Raises:
        InputError: An argument is out of range.

    Cost: state as `adamw`; communicates as `unit_norms` says, twice a leaf.
    Reference: You et al. 2019, Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes, algorithm 2.
    """
    above(0).check(eps, "lamb: eps")
    sizes = {"weight_decay": weight_decay}
    check_rates("lamb", learning_rate, shares={"b1": b1, "b2": b2}, sizes=sizes)
    _check_second_moment("lamb", second_moment_dtype)
    low, high = bounds
    if not 0 <= low <= high or high == 0:
        raise InputError(f"lamb: bounds {bounds} hold no norm; give 0 <= low <= high, high above 0")
    decay = groups.decay_of(weight_decay)
    return layerwise(
        lambda dims: optax.chain(
            scale_by_adam(b1, b2, eps, moment_dtype, second_moment_dtype),
            scale_by_lamb_ratio(decay, dims, bounds=bounds, adapt_all=adapt_all),
            optax.scale_by_learning_rate(learning_rate),
            *groups.scaled(dims),
        ),
        groups,
    )


def lars(
    learning_rate: LearningRate,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 1e-4,
    groups: Groups = ALIKE,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    adapt_all: bool = False,
    moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """LARS: SGD whose rate is scaled per layer and expert by `|p| / (|g| + weight_decay |p|)`.

    `m = momentum m + lr coefficient |p| / (|g| + weight_decay |p| + eps) (g + weight_decay p)`,
    then `p -= m`. Norms are of one parameter of one layer (and expert), however it is stacked and
    sharded.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        momentum: Of steps, the learning rate included.
        nesterov: Steps along `step + momentum m` instead of m.
        weight_decay: Times the parameter; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        trust_coefficient: How far a step may move a parameter, as a share of its norm.
        eps: Added to the denominator.
        adapt_all: Scale norms and biases too; else they take the step of SGD with momentum.
        moment_dtype: Of the moment.

    Raises:
        InputError: An argument is out of range.

    Cost: 4 bytes of state a parameter; communicates as `unit_norms` says, twice a leaf.
    Reference: You et al. 2017, Large Batch Training of Convolutional Networks, algorithm 1.
    """
    sizes = {"eps": eps, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
    check_rates("lars", learning_rate, shares={"momentum": momentum}, sizes=sizes)
    decay = groups.decay_of(weight_decay)
    return layerwise(
        lambda dims: optax.chain(
            scale_by_lars_ratio(
                decay, dims, coefficient=trust_coefficient, eps=eps, adapt_all=adapt_all
            ),
            optax.scale_by_learning_rate(learning_rate),
            optax.trace(momentum, nesterov, moment_dtype),
            *groups.scaled(dims),
        ),
        groups,
    )


def _wide() -> optax.GradientTransformation:
    """Gradients in float32, for what computes in their dtype."""
    return optax.stateless(lambda updates, params: optax.tree.cast(updates, jnp.float32))


def _check_second_moment(optimizer: str, dtype: DTypeLike) -> None:
    name = jnp.dtype(dtype).name
    if name not in ("float32", "bfloat16"):
        raise InputError(
            f"{optimizer}: second_moment_dtype is {name}; choose float32, or bfloat16, which is"
            f" rounded at random"
        )
