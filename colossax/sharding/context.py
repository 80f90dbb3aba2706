"""The plan in force while something is traced."""

import contextlib
from collections.abc import Iterator

import jax

from colossax.config import BoundPlan, Plan
from colossax.errors import PlanError
from colossax.pallas.target import on_device

# A JAX user context is part of every trace key: one jitted function called under two plans is
# traced twice. A plain context variable would let the second plan reuse the first one's program.
_CURRENT = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use(plan: Plan | BoundPlan | None) -> Iterator[BoundPlan | None]:
    """Put a plan in force for everything traced inside; nests, None switches it off.

    Kernels are chosen for the devices of its mesh, unless a `colossax.pallas.target` is in force.

    Args:
        plan: A bound plan, or a plan, which is bound to all devices.

    Raises:
        PlanError: It is another thing, or does not fit the devices.
    """
    if not isinstance(plan, Plan | BoundPlan | None):
        raise PlanError(
            f"use: found {plan!r}; give a plan, as colossax.use(colossax.preset('zero3'))"
        )
    bound = plan.bind() if isinstance(plan, Plan) else plan
    devices = contextlib.nullcontext() if bound is None else on_device(bound.mesh.devices.flat[0])
    with _CURRENT(bound), devices:
        yield bound


def current() -> BoundPlan | None:
    """The bound plan in force, or None."""
    return _CURRENT.value


_RECOMPUTED = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Mark what is traced inside as recomputed in backward, so that it may keep what it likes."""
    with _RECOMPUTED(True):
        yield


def recomputed() -> bool:
    """Whether what is being traced will be recomputed in backward."""
    return _RECOMPUTED.value


_KEPT_SHARE = jax.make_user_context(default_value=1.0)


@contextlib.contextmanager
def keeping(share: float) -> Iterator[None]:
    """Of what is traced inside, a block may keep its hidden states for this share of the tokens."""
    with _KEPT_SHARE(share):
        yield


def kept_share() -> float:
    """Share of the tokens whose hidden states are kept for backward; see `Segment.mlp_share`."""
    return _KEPT_SHARE.value


_APART = jax.make_user_context(default_value=())


@contextlib.contextmanager
def apart(axis: str) -> Iterator[None]:
    """Mark what is traced inside as of one of several devices, mapped by a name of an axis."""
    with _APART((*_APART.value, axis)):
        yield


def shards_apart() -> tuple[str, ...]:
    """Names of axes over which devices are mapped that do not know of one another."""
    return _APART.value
