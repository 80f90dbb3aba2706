"""Learning rates as functions of the step, counted from 0; all begin with a linear warmup.

The warmup goes from 0 at step 0 to the peak at step `warmup`; without one, step 0 has the peak. A
schedule reaches `end` at step `steps` and stays there. A run shorter than its warmup ends in it.
`one_cycle` alone rises in another way.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from colossax.config import above, at_least, within
from colossax.errors import InputError

_RISE_SHARE = 0.3


def constant(peak: float, *, warmup: int = 0) -> optax.Schedule:
    """The peak, for ever."""
    return _after_warmup(peak, warmup, optax.constant_schedule(peak))


def linear(peak: float, *, steps: int, warmup: int = 0, end: float = 0.0) -> optax.Schedule:
    """A straight line from the peak to `end`."""
    rest = _rest("linear", steps, warmup)
    return _after_warmup(peak, warmup, optax.linear_schedule(peak, end, rest))


def warmup_cosine(peak: float, *, steps: int, warmup: int = 0, end: float = 0.0) -> optax.Schedule:
    """Half a cosine from the peak to `end`."""
    rest = _rest("warmup_cosine", steps, warmup)
    # As a share of the swing, not of the peak, so that a peak of 0 is no division by it.
    swing = optax.cosine_decay_schedule(1.0, rest)
    return _after_warmup(peak, warmup, lambda count: end + (peak - end) * swing(count))


def inverse_sqrt(peak: float, *, warmup: int) -> optax.Schedule:
    """`peak sqrt(warmup / step)` after the warmup; no end need be known.

    Raises:
        InputError: No warmup, which would make the peak infinite.
    """
    if warmup < 1:
        raise InputError(f"inverse_sqrt: warmup is {warmup}; choose 1 step or more")

    def after(count: ArrayLike) -> ArrayLike:
        # Joined schedules are evaluated on both sides of the joint; below it the rate is the peak.
        return peak * jnp.sqrt(warmup / (warmup + jnp.maximum(count, 0)))

    return _after_warmup(peak, warmup, after)


def wsd(
    peak: float, *, steps: int, warmup: int = 0, decay: int, end: float = 0.0
) -> optax.Schedule:
    """Warmup, stable, decay: the peak until `decay` steps before the end, then a straight line.

    Raises:
        InputError: No decay, or one longer than what follows the warmup.
    """
    rest = _rest("wsd", steps, warmup)
    if not 1 <= decay <= rest:
        raise InputError(
            f"wsd: a decay of {decay} steps does not fit into the {rest} steps after the warmup;"
            f" choose from 1 to {rest}"
        )
    line = optax.linear_schedule(peak, end, decay, transition_begin=rest - decay)
    return _after_warmup(peak, warmup, line)


def polynomial(
    peak: float, *, steps: int, warmup: int = 0, end: float = 0.0, power: float = 2.0
) -> optax.Schedule:
    """`end + (peak - end) (1 - t)^power`, t the share of the way; power 1 is `linear`.

    Raises:
        InputError: The power is not above 0.
    """
    above(0).check(power, "polynomial: power")
    rest = _rest("polynomial", steps, warmup)
    return _after_warmup(peak, warmup, optax.polynomial_schedule(peak, end, power, rest))


def one_cycle(
    peak: float, *, steps: int, warmup: int | None = None, start: float = 0.04, end: float = 0.0
) -> optax.Schedule:
    """Half a cosine up from `start * peak` to the peak at step `warmup`, another down to `end`.

    Moments keep their decay, which the paper lets fall and rise against the rate.

    Args:
        peak: Largest rate.
        steps: Until `end` is reached.
        warmup: Steps of the rise; None: 0.3 of all.
        start: Rate of step 0, as a share of the peak.
        end: Last rate.

    Raises:
        InputError: `start` is no share.

    Reference: Smith and Topin 2018, Super-Convergence; the shape is that of PyTorch's OneCycleLR.
    """
    within(0, 1).check(start, "one_cycle: start")
    rise = round(_RISE_SHARE * steps) if warmup is None else warmup
    rest = _rest("one_cycle", steps, rise)
    fall = warmup_cosine(peak, steps=rest, end=end)
    at_least(0).check(rise, "schedule: warmup")
    if rise == 0:
        return fall
    up = optax.cosine_decay_schedule(1.0, rise)
    return optax.join_schedules([lambda count: peak * (1 - (1 - start) * up(count)), fall], [rise])


def multistep(peak: float, *, milestones: Mapping[int, float], warmup: int = 0) -> optax.Schedule:
    """The peak, then from each milestone on that share of the peak: `{3000: 0.1, 4000: 0.01}`.

    Raises:
        InputError: There is no milestone; one is within the warmup, or its share is not 0 to 1.
    """
    if not milestones:
        raise InputError("multistep: there is no milestone; give steps with shares, as 3000=0.1")
    for step, share in milestones.items():
        within(0, 1).check(share, f"multistep: milestone {step}")
        if step <= warmup:
            raise InputError(
                f"multistep: milestone {step} is not after the warmup of {warmup} steps; give"
                f" {warmup + 1} or more"
            )
    joints = jnp.asarray(sorted(milestones)) - warmup
    shares = jnp.asarray([1.0, *(milestones[step] for step in sorted(milestones))])

    def after(count: ArrayLike) -> ArrayLike:
        return peak * shares[jnp.searchsorted(joints, count, side="right")]

    return _after_warmup(peak, warmup, after)


def _rest(schedule: str, steps: int, warmup: int) -> int:
    """Steps after the warmup, at least one."""
    if steps < 1:
        raise InputError(f"{schedule}: steps is {steps}; choose 1 or more")
    return max(steps - warmup, 1)


def _after_warmup(peak: float, warmup: int, after: optax.Schedule) -> optax.Schedule:
    at_least(0).check(peak, "schedule: peak")
    at_least(0).check(warmup, "schedule: warmup")
    if warmup == 0:
        return after
    ramp = optax.linear_schedule(0.0, peak, warmup)
    return optax.join_schedules([ramp, after], [warmup])
