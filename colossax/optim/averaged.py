"""Averages of parameters over steps, kept in the optimizer's state, to evaluate and to save."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from colossax.config import above
from colossax.config.bounds import DECAYS
from colossax.errors import InputError
from colossax.optim.by_model import Optimizer, transformation
from colossax.optim.contract import (
    DimsOptimizer,
    LearningRate,
    check_rates,
    is_layerwise,
    layerwise,
    with_groups,
)
from colossax.optim.groups import ALIKE, Groups
from colossax.optim.transforms import scaled_decay
from colossax.typing import TrainState


class AverageState(NamedTuple):
    """Of `ema`; before the first update the average is unset.

    Attributes:
        count: Updates so far.
        average: Like the parameters, in float32.
        inner: State of the optimizer within.
    """

    count: Any
    average: Any
    inner: Any


class ScheduleFreeState(NamedTuple):
    """Of `schedule_free`; before the first update `z` is unset.

    Attributes:
        count: Updates so far.
        weights: Sum of the weights of the average.
        largest: Learning rate so far.
        share: `b1`.
        z: Like the parameters: where plain steps lead.
        nu: Like the parameters: the second moment.
    """

    count: Any
    weights: Any
    largest: Any
    share: Any
    z: Any
    nu: Any


def ema(optimizer: Optimizer, decay: float = 0.999) -> DimsOptimizer:
    """`optimizer`, and after each step `average = decay average + (1 - decay) parameters`.

    The average begins with the parameters as they are before the first step. Parameters move as
    without it. `averaged(state)` is the state to evaluate or to save.

    Args:
        optimizer: A transformation of Optax, or `dims -> transformation`; it may be updated layer
            by layer where that one may.
        decay: Share of the average that a step keeps.

    Raises:
        InputError: The decay is out of range; or there is an optimizer for each of several models,
            each of which may be given an average instead.

    Cost: 4 bytes of state a parameter; nothing is sent.
    """
    DECAYS.check(decay, "ema: decay")
    if isinstance(optimizer, Mapping):
        raise InputError(
            "ema: it goes around one optimizer; give one that is a transformation or a function of"
            " dims, for each of several models its own"
        )

    def make(dims: Any) -> optax.GradientTransformation:
        return _with_average(transformation(optimizer, dims), decay)

    mark = layerwise if is_layerwise(optimizer) else with_groups
    return mark(make, getattr(optimizer, "groups", ALIKE))


def _with_average(
    inner: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    taking = optax.with_extra_args_support(inner)

    def init(params: Any) -> AverageState:
        # Zeros, for a layer's fresh state knows nothing of its parameters.
        average = optax.tree.zeros_like(params, dtype=jnp.float32)
        return AverageState(jnp.zeros((), jnp.int32), average, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        steps, own = taking.update(updates, state.inner, params, **more)
        moved = optax.tree.cast(optax.apply_updates(params, steps), jnp.float32)
        before = _or_params(state.count, state.average, params)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, before, moved)
        return steps, AverageState(optax.safe_increment(state.count), average, own)

    return optax.GradientTransformationExtraArgs(init, update)


def schedule_free(
    learning_rate: LearningRate,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    groups: Groups = ALIKE,
    second_moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """Schedule-free AdamW: no end need be known, an average of all steps replaces the schedule.

    `z -= lr (g / (sqrt(v') + eps) + weight_decay y); x = (1 - c) x + c z; y = (1 - b1) z + b1 x`,
    where parameters are y, c is this step's share of the sum of `max(lr)^2`, and v' is Adam's.
    x is what is meant: `averaged(state)` has it, to evaluate or to save.

    Args:
        learning_rate: A number, or a schedule of the step count from 0: a warmup, then constant.
        b1: Share of x in y, the momentum's place.
        b2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Times y; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        second_moment_dtype: As kept.

    Raises:
        InputError: An argument is out of range; b1 is 0, from which x cannot be found again.

    Cost: 8 bytes of state a parameter.
    Reference: Defazio et al. 2024, The Road Less Scheduled, algorithm 1.
    """
    for name, value in {"eps": eps, "b1": b1}.items():
        above(0).check(value, f"schedule_free: {name}")
    shares, sizes = {"b1": b1, "b2": b2}, {"weight_decay": weight_decay}
    check_rates("schedule_free", learning_rate, shares=shares, sizes=sizes)
    decay = groups.decay_of(weight_decay)

    def init(params: Any) -> ScheduleFreeState:
        return ScheduleFreeState(
            count=jnp.zeros((), jnp.int32),
            weights=jnp.zeros((), jnp.float32),
            largest=jnp.zeros((), jnp.float32),
            share=jnp.asarray(b1, jnp.float32),
            z=optax.tree.zeros_like(params, dtype=jnp.float32),
            nu=optax.tree.zeros_like(params, dtype=second_moment_dtype),
        )

    def make(dims: Any) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
            rate = jnp.asarray(rate, jnp.float32)
            count = optax.safe_increment(state.count)
            largest = jnp.maximum(state.largest, rate)
            weights = state.weights + jnp.square(largest)
            share = jnp.where(weights > 0, jnp.square(largest) / jnp.maximum(weights, 1e-37), 0.0)
            grads = optax.tree.cast(updates, jnp.float32)
            nu = jax.tree.map(
                lambda g, v: b2 * v.astype(jnp.float32) + (1 - b2) * jnp.square(g), grads, state.nu
            )
            second = 1 - b2**count
            steps = jax.tree.map(lambda g, v: g / (jnp.sqrt(v / second) + eps), grads, nu)
            steps = scaled_decay(decay, groups, dims, steps, params)
            z = _or_params(state.count, state.z, params)
            # y + c (z - y), further by the step's part in y: as one, so that few digits are lost.
            moved = jax.tree.map(
                lambda y, z, s: (
                    share * (z - y.astype(jnp.float32)) + rate * (b1 * (1 - share) - 1) * s
                ),
                params,
                z,
                steps,
            )
            z = jax.tree.map(lambda z, s: z - rate * s, z, steps)
            kept = optax.tree.cast(nu, second_moment_dtype)
            return moved, ScheduleFreeState(count, weights, largest, state.share, z, kept)

        return optax.GradientTransformation(init, update)

    return layerwise(make, groups)


def averaged(state: TrainState) -> TrainState:
    """A training state whose parameters are what its optimizer averages, all else as it is.

    For `step.evaluate`, `step.model` and `step.save`: not to train on.

    Args:
        state: Of a step whose optimizer is `ema` or `schedule_free`, or with one of them for a
            model of several.

    Raises:
        InputError: Nothing in it is averaged, or it lies on disk.
    """
    found = _averages(state["opt_state"], state["params"])
    if found is None:
        raise InputError(
            "averaged: the optimizer keeps no average of parameters; make it by optim.ema or"
            " optim.schedule_free"
        )
    return {**state, "params": found}


def _averages(state: Any, params: Any) -> Any:
    """Parameters with averages in their place; None where there are none."""
    if isinstance(state, AverageState):
        begun = bool(state.count > 0)
        return _like(state.average, params, lambda a, p: a if begun else p)
    if isinstance(state, ScheduleFreeState):
        # On the host: where stages have programs, each has its parameters on devices of its own.
        begun, share = bool(state.count > 0), float(state.share)

        def x(z: Any, y: Any) -> Any:
            return (y - (1 - share) * z) / share if begun else y

        return _like(state.z, params, x)
    if isinstance(state, dict) and set(state) <= set(params):  # of several models
        found = {name: _averages(each, params[name]) for name, each in state.items()}
        if any(each is not None for each in found.values()):
            return {**params, **{name: x for name, x in found.items() if x is not None}}
    return None


def _like(averages: Any, params: Any, of: Any) -> Any:
    """`of(average, parameter in float32)` in each parameter's dtype and place."""

    def one(average: Any, p: Any) -> Any:
        if average is None:
            return p
        if isinstance(average, optax.MaskedNode):
            raise InputError(
                "averaged: a part of the averages lies on disk; give plan.offload.disk 0, which"
                " keeps them in host memory"
            )
        on_device = p.sharding.with_memory_kind("device")
        there = [jax.device_put(x, on_device).astype(jnp.float32) for x in (average, p)]
        return jax.device_put(of(*there).astype(p.dtype), p.sharding)

    def ends(leaf: Any) -> bool:
        return leaf is None or isinstance(leaf, optax.MaskedNode)

    return jax.tree.map(one, averages, params, is_leaf=ends)


def _or_params(count: Any, tree: Any, params: Any) -> Any:
    """The tree, or the parameters in float32 before the first update."""
    return jax.tree.map(lambda x, p: jnp.where(count > 0, x, p.astype(jnp.float32)), tree, params)
