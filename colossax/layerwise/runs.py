"""Runs of equal layers, and who runs them: the runner in force, or one scan after another."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from colossax.config import Segment
from colossax.errors import PlanError
from colossax.layerwise.hosted import fetched, hosted_of
from colossax.layerwise.recompute import checkpointed
from colossax.offload import fetch
from colossax.sharding import activation_sharding, current, replicated

Key = tuple[str, int]
"""Path of a layer stack in the model, and the number of one of its runs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerState:
    """What one layer gets beside its input, and gives back.

    Attributes:
        index: Number of the layer in its stack, int32 scalar.
        row: Its number among the layers of its kind, which is `index` in a stack of one kind: the
            row of the kind's caches.
        scanned: State sliced per layer (dim 0 of the stack's is layers), or None.
        carried: State that travels whole from layer to layer (caches: a slice would be a copy).
        at: Its number in the run, where it gets some parameters as stacks in host memory, of which
            it fetches what it wants; else None. See `LayerRun.left`.
    """

    index: Any
    row: Any
    scanned: Any = None
    carried: Any = None
    at: Any = None


Apply = Callable[[Any, Any, Any, LayerState], tuple[Any, LayerState, dict[str, Any]]]
"""`(parameters of a layer, carry, side, state) -> (carry, state, sums)`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerRun:
    """A segment of a layer stack: equal layers, or equal groups of layers, one after another.

    Where a stack alternates kinds of layers, what repeats is a group of `group` layers, and all
    that is said of a layer here is meant of a group.

    Attributes:
        key: Which.
        apply: What one layer does, nothing of it recomputed in backward; those of a group say so
            themselves.
        first: Number of its first layer.
        first_row: Of the first layer of each kind, its number among those.
        count: How often `apply` is called.
        group: Layers of one call.
        stacked: Whether arrays have a dim of layers in front; else there is one layer.
        policy: What the segment recomputes, and what of it lives in host memory.
        before: Layers of the stacks that the model made before this one.
        left: Of each leaf of the parameters, whether the layer gets its stack, in host memory, in
            place of its part of it; None: of none. Runners that differentiate do not ask.
    """

    key: Key
    apply: Apply
    first: int
    first_row: int = 0
    count: int
    group: int = 1
    stacked: bool
    policy: Segment
    before: int = 0
    left: Any = None

    def checkpoint(self, fn: Callable) -> Callable:
        """What a loop does for a layer, under the segment's rematerialisation policy."""
        if self.group != 1:
            return fn
        return checkpointed(fn, self.policy, in_loop=self.stacked)

    @property
    def origin(self) -> int:
        """What the loop over the run counts from."""
        return self.first if self.group == 1 else 0

    def state(self, number: Any, scanned: Any = None, carried: Any = None) -> LayerState:
        """Of the layer that the loop reaches at `number`, `origin` for the first."""
        if self.group != 1:
            index, row = self.first + self.group * number, number
        else:
            index, row = number, number
            if self.first_row != self.first:
                row = number + (self.first_row - self.first)
        return LayerState(index=index, row=row, scanned=scanned, carried=carried)


@runtime_checkable
class StackRunner(Protocol):
    """Who decides in which order, and where, the layers of stacks are run."""

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Run all layers of a run.

        Args:
            layers: Which.
            params: Tree of arrays; `[count, ...]` where the run is stacked.
            carry: Input of the first layer.
            side: Passed to every layer.
            scanned: Tree of `[count, ...]` state, or None.
            carried: Tree handed from layer to layer, or None.

        Returns:
            `(carry, scanned, carried, sums)`, sums `[count, ...]`.
        """
        ...


class Scanned:
    """All layers one after another: one scan, or no loop for a single layer.

    Cost: program and compile time of one layer. Of parameters in host memory the device holds one
    layer's, but for what is left to the layer to fetch; backward fetches them again.
    """

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`."""
        run = self._scan if layers.stacked else self._one
        return run(layers, params, carry, side, scanned, carried)

    def _one(self, layers, params, carry, side, scanned, carried):
        def call(row, carry, scanned, carried):
            state = layers.state(jnp.int32(layers.origin), scanned, carried)
            return layers.apply(row, carry, side, state)

        hosted = hosted_of(layers.key)
        row = _fetched(layers, params, 0)
        if hosted is not None:
            row = fetched(row, hosted, 0, stacked=False)
        scanned_row = jax.tree.map(lambda x: x[0], scanned)
        carry, state, sums = layers.checkpoint(call)(row, carry, scanned_row, carried)
        scanned, sums = jax.tree.map(lambda x: x[None], (state.scanned, sums))
        return carry, scanned, state.carried, sums

    def _scan(self, layers, params, carry, side, scanned, carried):
        hosted = hosted_of(layers.key)
        whole = hosted is None and layers.policy.placement.any_params_on_host

        def body(loop, xs):
            carry, carried = loop
            number, row, scanned_row = xs
            if whole:
                row = _fetched(layers, params, number - layers.origin)
            if hosted is not None:
                row = fetched(row, hosted, number - layers.origin)
            state = layers.state(number, scanned_row, carried)
            if layers.left is not None:
                state = dataclasses.replace(state, at=number - layers.origin)
            carry, state, sums = layers.apply(row, carry, side, state)
            return (carry, state.carried), (state.scanned, sums)

        numbers = jnp.arange(layers.origin, layers.origin + layers.count, dtype=jnp.int32)
        (carry, carried), (scanned, sums) = jax.lax.scan(
            layers.checkpoint(body),
            (carry, carried),
            (numbers, None if whole else params, scanned),
        )
        return carry, scanned, carried, sums


def _fetched(layers: LayerRun, params: Any, at: Any) -> Any:
    """Parameters of a layer on the device, but for those that are left to it."""
    if layers.left is None:
        return fetch(params, at, stacked=layers.stacked)
    return jax.tree.map(
        lambda stack, left: stack if left else fetch(stack, at, stacked=layers.stacked),
        params,
        layers.left,
    )


class _Held:
    """A runner while it is in force. Traces that JAX keeps hold this, which is empty afterwards."""

    def __init__(self, runner: StackRunner):
        self.runner: StackRunner | None = runner


# Part of every trace key, as the plan is: a function traced under one runner is traced anew under
# another. Each time a runner is put in force counts as another.
_RUNNER = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def running(runner: StackRunner) -> Iterator[None]:
    """Let layer stacks be run by this one, in everything traced inside."""
    held = _Held(runner)
    try:
        with _RUNNER(held):
            yield
    finally:
        held.runner = None


def current_runner() -> StackRunner:
    """The runner in force; without one, `Scanned`."""
    held = _RUNNER.value
    return Scanned() if held is None or held.runner is None else held.runner


def kept_sharding(leaf: Any) -> NamedSharding | None:
    """Of what a layer keeps for backward: batch and sequence first, as all it computes."""
    bound = current()
    if bound is None or bound.single:
        return None
    dims = ("batch:inner", "seq", *[None] * leaf.ndim)[: leaf.ndim]
    try:
        return activation_sharding(bound, dims, leaf.shape)
    except PlanError:
        return replicated(bound)  # no activation: something small that all devices have
