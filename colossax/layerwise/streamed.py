"""Layers one after another through memory that holds a few of them, forward and backward.

Differentiated, a run of layers does not return gradients of its stacked parameters: its backward
pass visits the layers from the last to the first and changes stacks in place, layer by layer, so
that gradients are never whole. What JAX calls the cotangent of a stack is then the changed stack.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from colossax.compat import trace_state
from colossax.errors import PlanError
from colossax.layerwise.ahead import Ahead
from colossax.layerwise.layer import Layer, Residual, picked
from colossax.layerwise.runs import Key, LayerRun, Scanned, kept_sharding
from colossax.offload import fetch, new_stack, on_host, store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stacks:
    """Arrays of one run that its backward pass reads or changes.

    Attributes:
        params: Parameters.
        state: Optimizer state.
        grads: Sums of gradients.
        new: A second copy of parameters and state, to leave the first as it is.
    """

    params: Any = None
    state: Any = None
    grads: Any = None
    new: Any = None


jax.tree_util.register_dataclass(Stacks, ["params", "state", "grads", "new"], [])

Visit = Callable[[Key, Any, Stacks, Any, Any, Any], tuple[Stacks, Float[Array, ""]]]
"""`(key, row, stacks, parameters of the layer, their gradient, scalars) -> (stacks, squared norm)`:
what backward does with a layer's gradient."""


@dataclasses.dataclass
class Stream:
    """What the runs called while it is in force do in backward.

    Backward reads `visit`, `changing` and, but for runs `inside`, `scalars` when it is traced, so
    that a second backward pass after the same forward pass may have others.

    Attributes:
        stacks: By run. Differentiate by those that any `visit` changes.
        changing: Fields of them that it does. Backward carries no others: a loop that carries what
            it only reads may be given a copy of it.
        tap: Two zeros; their cotangents are the sum of squared norms, and the number of runs.
        scalars: Passed to `visit`.
        visit: See `Visit`.
        called: Runs called so far.
        inside: Those of them called inside a transformation that the loss applies.
    """

    stacks: dict[Key, Stacks]
    changing: tuple[str, ...]
    tap: Float[Array, "2"]
    scalars: Any
    visit: Visit
    called: list[Key] = dataclasses.field(default_factory=list)
    inside: list[Key] = dataclasses.field(default_factory=list)
    _trace: Any = dataclasses.field(default_factory=trace_state)

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`.

        Cost: on the device at a time two layers of what lives in host memory. Forward fetches each
        layer's parameters once, backward once more, beside what `visit` moves.

        Raises:
            PlanError: Layers hand state from one to the next, or come in groups.
        """
        if layers.key not in self.stacks:
            return Scanned().run(layers, params, carry, side, scanned, carried)
        _check(layers, scanned, carried)
        self._note(layers.key)
        stacks = dataclasses.replace(self.stacks[layers.key], params=params)

        @jax.custom_vjp
        def call(stacks: Stacks, tap: Any, scalars: Any, carry: Any, side: Any) -> Any:
            layer = _layer(layers, stacks.params, carry, side, None)
            return _forward(layers, layer, stacks.params, carry, side)[0]

        def forward(*args: Any) -> Any:
            stacks, _, scalars, carry, side = jax.tree.map(_value, args, is_leaf=_is_primal)
            moving = jax.tree.map(_moving, args[-1], is_leaf=_is_primal)
            layer = _layer(layers, stacks.params, carry, side, moving)
            out, kept = _forward(layers, layer, stacks.params, carry, side)
            return out, (_Static(layer), stacks, scalars, kept, side)

        def backward(residuals: Any, cotangents: Any) -> Any:
            static, stacks, scalars, *others = residuals
            scalars = scalars if layers.key in self.inside else self.scalars
            residuals = (stacks, scalars, *others)
            return _backward(layers, self, static.layer, residuals, cotangents)

        call.defvjp(forward, backward, symbolic_zeros=True)
        carry, sums = call(stacks, self.tap, self.scalars, carry, side)
        return carry, scanned, carried, sums

    def _note(self, key: Key) -> None:
        """That a run is called."""
        self.called.append(key)
        if trace_state() != self._trace:
            self.inside.append(key)

    def check(self) -> None:
        """Refuse a loss that did not call every run exactly once.

        Raises:
            PlanError: Naming the layer stack.
        """
        for key in self.stacks:
            times = self.called.count(key)
            if times != 1:
                raise PlanError(
                    f"plan.offload: the loss calls the layer stack '{key[0]}' {times} times, and a"
                    " stack whose layers are updated during backward must be called once; call it"
                    " once, or train without offload"
                )

    def transposed(self, vjp: Callable, cotangent: Any) -> Any:
        """What `vjp` makes of the cotangent.

        Raises:
            PlanError: JAX cannot where stacks in host memory are in a loop, naming one.
        """
        try:
            return vjp(cotangent)
        except (TypeError, ValueError) as problem:
            # It says so in the types it shows; what else is wrong is the loss's own mistake.
            if not self.inside or "<host>" not in str(problem):
                raise
            raise PlanError(
                f"plan.offload: the loss calls the layer stack '{self.inside[0][0]}' inside a loop,"
                " a branch or vmap, where arrays in host memory cannot be changed; call it outside"
                " of them, or train without offload"
            ) from problem


def _check(layers: LayerRun, scanned: Any, carried: Any) -> None:
    if jax.tree.leaves((scanned, carried)):
        raise PlanError(
            f"plan.offload: the layer stack '{layers.key[0]}' hands state from layer to layer,"
            " which cannot be done while layers are updated during backward; train without"
            " offload"
        )
    if layers.group != 1:
        raise alternates(layers.key[0])


def alternates(stack: str) -> PlanError:
    """The refusal of a stack whose kinds of layers take turns."""
    return PlanError(
        f"plan.offload: the layer stack '{stack}' alternates kinds of layers, which cannot be"
        " updated one by one during backward; train without offload"
    )


_KEPT: list[dict[Key, int]] = []


@contextlib.contextmanager
def recording_kept() -> Iterator[dict[Key, int]]:
    """Bytes that runs keep in host memory for backward, by run, found as they are traced.

    Of each device; of all layers of the run.
    """
    recorded: dict[Key, int] = {}
    _KEPT.append(recorded)
    try:
        yield recorded
    finally:
        _KEPT.pop()


class _Static:
    """A layer among residuals: no array, the same for forward and backward."""

    def __init__(self, layer: Layer):
        self.layer = layer


jax.tree_util.register_pytree_node(
    _Static, lambda static: ((), static.layer), lambda layer, _: _Static(layer)
)


def _layer(layers: LayerRun, params: Any, carry: Any, side: Any, moving: Any) -> Layer:
    """One layer of the run, on the device."""

    def apply(row: Any, carry: Any, side: Any, number: Array) -> tuple[Any, Any]:
        carry, _, sums = layers.apply(row, carry, side, layers.state(number))
        return carry, sums

    row = jax.eval_shape(lambda p: fetch(p, 0, stacked=layers.stacked), params)
    return Layer(layers.checkpoint(apply), row, carry, side, moving)


def _forward(layers: LayerRun, layer: Layer, params: Any, carry: Any, side: Any) -> Any:
    """((carry, sums), what backward keeps), the kept in stacks of `count` rows."""
    wanted = [each for each in layer.residuals if each.source == "kept"]
    hosts = [_to_host(layers, each) for each in wanted]
    where = [
        kept_sharding(leaf) if host else None for leaf, host in zip(layer.kept, hosts, strict=True)
    ]
    for recorded in _KEPT:
        recorded[layers.key] = layers.count * _host_row_bytes(layer.kept, hosts, where)
    stacks = [
        new_stack(layers.count, leaf, host=host, stacked=layers.stacked, sharding=sharding)
        for leaf, host, sharding in zip(layer.kept, hosts, where, strict=True)
    ]
    totals = jax.tree.map(lambda s: new_stack(layers.count, s, host=False), layer.out[1])
    ahead = Ahead(params, layers.count - 1) if _fetches_ahead(layers) else None

    def step(i: Any, loop: Any) -> Any:
        carry, totals, stacks, slots = loop
        if ahead is None:
            row = fetch(params, i, stacked=layers.stacked)
        else:
            row, slots = ahead.turn(slots, i, 1)
        (carry, sums), kept = layer.forward(row, carry, side, layers.origin + jnp.int32(i))
        kept = [_constrained(*pair) for pair in zip(kept, where, strict=True)]
        stacks = store(stacks, kept, i, stacked=layers.stacked)
        return carry, store(totals, sums, i), stacks, slots

    slots = None if ahead is None else ahead.first(0)
    carry, totals, stacks, _ = _loop(layers, step, (carry, totals, stacks, slots))
    return (carry, totals), stacks


def _fetches_ahead(layers: LayerRun) -> bool:
    """Whether a layer's rows are fetched during the one before.

    Of experts alone, which are most of a layer and wanted in its middle. Whole layers are not: they
    would be twice on the device, for copies that their own matmuls hide as well.
    """
    return layers.stacked and layers.policy.placement.experts_alone


def _to_host(layers: LayerRun, residual: Residual) -> bool:
    """Whether the segment keeps this in host memory."""
    placement = layers.policy.placement
    kept = placement.input_on_host if residual.carry else placement.activations_on_host
    return residual.host or kept


def _host_row_bytes(
    rows: Sequence[Any], hosts: Sequence[bool], where: Sequence[NamedSharding | None]
) -> int:
    """Bytes of a device's part of the rows that go to host memory."""
    return sum(
        math.prod(row.shape if sharding is None else sharding.shard_shape(row.shape))
        * row.dtype.itemsize
        for row, host, sharding in zip(rows, hosts, where, strict=True)
        if host
    )


def _backward(
    layers: LayerRun, stream: Stream, layer: Layer, residuals: Any, cotangents: Any
) -> Any:
    stacks, scalars, kept, side = residuals
    dcarry, dsums = jax.tree.map(_zero, cotangents, is_leaf=_is_zero)
    dside = [jnp.zeros_like(x) for x in picked(side, layer.moving)]
    unchanged = "params" not in stream.changing and _fetches_ahead(layers)
    ahead = Ahead(stacks.params, 0) if unchanged else None

    def step(k: Any, loop: Any) -> Any:
        changed, dcarry, dside, norm, slots = loop
        now = dataclasses.replace(stacks, **changed)
        i = layers.count - 1 - jnp.int32(k)
        if ahead is None:
            row = fetch(now.params, i, stacked=layers.stacked)
        else:
            row, slots = ahead.turn(slots, i, -1)
        saved = fetch(kept, i, stacked=layers.stacked)
        grads = layer.transpose(row, side, layers.origin + i, saved, (dcarry, fetch(dsums, i)))
        dside = jax.tree.map(jnp.add, dside, grads.side)
        now, square = stream.visit(layers.key, i, now, row, grads.params, scalars)
        return fields(now), grads.carry, dside, norm + square, slots

    def fields(stacks: Stacks) -> dict[str, Any]:
        return {name: getattr(stacks, name) for name in stream.changing}

    slots = None if ahead is None else ahead.first(layers.count - 1)
    start = (fields(stacks), dcarry, dside, jnp.float32(0), slots)
    changed, dcarry, dside, norm, _ = _loop(layers, step, start)
    tap = jnp.stack([norm, jnp.float32(1)])
    updated = dataclasses.replace(stacks, **changed)
    return updated, tap, None, dcarry, _spread(side, layer.moving, dside)


def _constrained(x: Array, sharding: NamedSharding | None) -> Array:
    """As its stack is: else the stack may be laid out anew, in host memory, by the host."""
    if sharding is None or on_host(x):
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


def _loop(layers: LayerRun, step: Callable[[Any, Any], Any], start: Any) -> Any:
    """`step(i, loop)` for every layer; of a single unstacked one without a loop."""
    return jax.lax.fori_loop(0, layers.count, step, start) if layers.stacked else step(0, start)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _value(x: Any) -> Any:
    return x.value


def _moving(x: Any) -> bool:
    """Whether a side input is differentiated."""
    return bool(x.perturbed) and jnp.issubdtype(x.value.dtype, jnp.floating)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _zero(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x


def _spread(side: Any, moving: Any, cotangents: list[Any]) -> Any:
    """A tree like `side` with these where it is differentiated, None elsewhere."""
    remaining = iter(cotangents)
    return jax.tree.map(lambda _, moves: next(remaining) if moves is True else None, side, moving)
