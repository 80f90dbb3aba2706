"""The order in which a row's tokens lie on the devices, and what is known of it while tracing."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from colossax.config import RING_AXES, BoundPlan
from colossax.errors import PlanError
from colossax.pallas.target import current_target
from colossax.sharding.context import current, use
from colossax.sharding.rules import activation_axes, seq_axes
from colossax.sharding.sequence.order import zigzag_order

SMALLEST_CHUNK = {"cpu": 1}
"""Tokens of a chunk below which the kernels of a platform have nothing to do."""

OTHER_SMALLEST_CHUNK = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOrder:
    """How the tokens of a row lie.

    Attributes:
        ranks: Devices around the ring; each holds one chunk from the front of the row and its
            mirror image from the back. 1: tokens lie in their natural order.
        padding: Tokens at the natural end of every row that are none.
    """

    ranks: int = 1
    padding: int = 0

    def indices(self, length: int) -> np.ndarray:
        """Natural index of the token at each place of a padded row, `[length]` int32."""
        if self.ranks == 1:
            return np.arange(length, dtype=np.int32)
        return zigzag_order(length, self.ranks)


NATURAL = RowOrder()

_ORDER = jax.make_user_context(default_value=NATURAL)

_WHOLE = jax.make_user_context(default_value=None)
"""Number of rows that no devices share while they are traced; None: see the plan in force."""


@contextlib.contextmanager
def in_order(order: RowOrder) -> Iterator[None]:
    """Say that rows traced inside lie in this order."""
    with _ORDER(order):
        yield


def current_order() -> RowOrder:
    """The order of rows being traced."""
    return _ORDER.value


@contextlib.contextmanager
def whole_rows(rows: int) -> Iterator[None]:
    """Put the plan in force for so many rows that no devices share, in their natural order.

    Devices that would share a row have other rows where there are enough for all of them; else the
    same ones.
    """
    bound = current()
    if bound is None:
        with in_order(NATURAL):
            yield
        return
    seq, rules = seq_axes(bound), bound.plan.rules
    axes = (*activation_axes(bound, "batch"), *seq)
    beside = seq if rows % bound.size(axes) == 0 else ()
    changed = {
        dim: None if dim.split(":")[0] == "seq" else [(*choice, *beside) for choice in choices]
        for dim, choices in rules.activations.items()
        if dim.split(":")[0] in ("batch", "seq")
    }
    with (
        use(bound.replace(rules=rules.updated(activations=changed))),
        in_order(NATURAL),
        _WHOLE(rows),
    ):
        yield


def rows_as_here(fn: Callable) -> Callable:
    """A function whose rows lie as they do where this is called, wherever it is traced."""
    rows = _WHOLE.value
    if rows is None:
        return fn

    def as_here(*args: Any) -> Any:
        with whole_rows(rows):
            return fn(*args)

    return as_here


@contextlib.contextmanager
def shared_rows(rows: int, length: int) -> Iterator[None]:
    """Leave the plan in force as it is for rows of so many tokens, if devices divide them; else see
    `whole_rows`."""
    bound = current()
    if bound is None or length % _shards(bound) == 0:
        yield
        return
    with whole_rows(rows):
        yield


def balanced_order(bound: BoundPlan, length: int) -> RowOrder:
    """The order in which causal attention is equal work for all devices of the ring.

    Raises:
        PlanError: The row is too short for the devices that are to share it.
    """
    axes = seq_axes(bound)
    ring = bound.size([axis for axis in axes if axis in RING_AXES])
    zigzag = ring > 1 and bound.plan.attention.scheme in ("auto", "zigzag", "all_gather")
    chunks = math.lcm(2 * ring if zigzag else ring, _shards(bound))
    platform = current_target().platform
    smallest = SMALLEST_CHUNK.get(platform, OTHER_SMALLEST_CHUNK)
    if chunks > 1 and length < chunks * smallest:
        shown = ", ".join(f"{axis}={bound.mesh.shape[axis]}" for axis in axes)
        raise PlanError(
            f"plan.mesh: a row of {length} tokens is cut into {chunks} chunks ({shown}), and"
            f" attention on '{platform}' wants at least {smallest} tokens in each; give rows of"
            f" {chunks * smallest} tokens or more, or fewer devices along {' and '.join(axes)}"
        )
    return RowOrder(ranks=ring if zigzag else 1, padding=-length % chunks)


def _shards(bound: BoundPlan) -> int:
    """Devices that a row must be a multiple of, whichever phase of it is split."""
    phases = [dim for dim in bound.rules.activations if dim.split(":")[0] == "seq"]
    return math.lcm(*(bound.size(activation_axes(bound, dim)) for dim in phases)) if phases else 1
