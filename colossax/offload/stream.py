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
from colossax.offload.memory import fetch, new_stack, on_host, store

Key = tuple[str, int]
"""Path of a layer stack in the model, and the number of one of its segments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A segment of a layer stack.

    Attributes:
        key: Which.
        apply: `(parameters of a layer, carry, side, layer) -> (carry, sums)`, wrapped in its
            rematerialisation policy.
        first: Number of its first layer.
        count: Layers.
        stacked: Whether arrays have a dim of layers in front; else there is one layer.
        host_inputs: Whether what a layer gets from the one before is kept in host memory.
        host_saved: Whether all that backward keeps is.
        sharding_of: Sharding of what a layer keeps, by its shape and dtype; None on one device.
    """

    key: Key
    apply: Callable[[Any, Any, Any, Array], tuple[Any, Any]]
    first: int
    count: int
    stacked: bool
    host_inputs: bool
    host_saved: bool
    sharding_of: Callable[[Any], NamedSharding | None]


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

    def call(self, key: Key) -> None:
        """Note that a run is called."""
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


_STREAM: list[Stream] = []


@contextlib.contextmanager
def streaming(stream: Stream) -> Iterator[None]:
    """Put a stream in force while a loss is traced."""
    _STREAM.append(stream)
    try:
        yield
    finally:
        _STREAM.pop()


def current_stream() -> Stream | None:
    """The stream in force, or None."""
    return _STREAM[-1] if _STREAM else None


_KEPT: list[dict[Key, int]] = []


@contextlib.contextmanager
def recording_kept() -> Iterator[dict[Key, int]]:
    """Bytes that runs keep in host memory for backward, by run, found as they are traced.

    Of each device; of all layers of the run.
    """
    found: dict[Key, int] = {}
    _KEPT.append(found)
    try:
        yield found
    finally:
        _KEPT.pop()


def run_streamed(stream: Stream, run: Run, params: Any, carry: Any, side: Any) -> tuple[Any, Any]:
    """Carry after the run's last layer, and the sums of its layers.

    Cost: on the device at a time two layers of what lives in host memory. Forward fetches each
    layer's parameters once, backward once more, beside what `visit` moves.
    """
    stacks = stream.stacks[run.key]
    stream.call(run.key)
    stacks = dataclasses.replace(stacks, params=params)

    @jax.custom_vjp
    def call(stacks: Stacks, tap: Any, scalars: Any, carry: Any, side: Any) -> Any:
        return _forward(run, stacks.params, carry, side, _still(side), _Saved())[0]

    def forward(*args: Any) -> Any:
        stacks, tap, scalars, carry, side = jax.tree.map(_value, args, is_leaf=_is_primal)
        moving = jax.tree.map(_moving, args[-1], is_leaf=_is_primal)
        saved = _Saved()
        out, kept = _forward(run, stacks.params, carry, side, moving, saved)
        forms.append((saved, moving))
        return out, (stacks, scalars, kept, side)

    def backward(residuals: Any, cotangents: Any) -> Any:
        saved, moving = forms[-1]
        if run.key not in stream.inside:
            stacks, _, *others = residuals
            residuals = (stacks, stream.scalars, *others)
        return _backward(run, stream, saved, moving, residuals, cotangents)

    forms: list[tuple[_Saved, Any]] = []
    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(stacks, stream.tap, stream.scalars, carry, side)


class _Saved:
    """How the residuals of a layer's backward pass are put together, found while it is traced."""

    treedef: Any
    origins: list[tuple[str, Any]]


def _forward(
    run: Run, params: Any, carry: Any, side: Any, moving: Any, saved: _Saved
) -> tuple[Any, Any]:
    """((carry, sums), what backward keeps), the kept in stacks of `count` rows."""

    def layer(row: Any, carry: Any, index: Array) -> tuple[Any, list[Array]]:
        return _layer(run, saved, row, carry, side, moving, index)

    row = jax.eval_shape(lambda p: fetch(p, 0, stacked=run.stacked), params)
    (_, sums), kept = jax.eval_shape(layer, row, carry, jax.ShapeDtypeStruct((), jnp.int32))
    hosts = [place for kind, place in saved.origins if kind == "kept"]
    where = [
        run.sharding_of(leaf) if host else None for leaf, host in zip(kept, hosts, strict=True)
    ]
    for found in _KEPT:
        found[run.key] = run.count * _host_row_bytes(kept, hosts, where)
    stacks = [
        new_stack(run.count, leaf, host=host, stacked=run.stacked, sharding=sharding)
        for leaf, host, sharding in zip(kept, hosts, where, strict=True)
    ]
    totals = jax.tree.map(lambda s: new_stack(run.count, s, host=False), sums)

    def step(i: Any, loop: Any) -> Any:
        carry, totals, stacks = loop
        row = fetch(params, i, stacked=run.stacked)
        (carry, sums), kept = layer(row, carry, run.first + jnp.int32(i))
        kept = [_laid_out(*pair) for pair in zip(kept, where, strict=True)]
        return carry, store(totals, sums, i), store(stacks, kept, i, stacked=run.stacked)

    carry, totals, stacks = _loop(run, step, (carry, totals, stacks))
    return (carry, totals), stacks


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


def _layer(
    run: Run, saved: _Saved, row: Any, carry: Any, side: Any, moving: Any, index: Array
) -> tuple[Any, list[Array]]:
    """One layer's result, and what backward needs of it beside parameters and side inputs."""

    def call(row: Any, carry: Any, differentiated: list[Any]) -> Any:
        return run.apply(row, carry, _merged(side, moving, differentiated), index)

    out, vjp = jax.vjp(call, row, carry, _picked(side, moving))
    leaves, saved.treedef = jax.tree.flatten(vjp)
    known = {
        **{id(x): ("side", i) for i, x in enumerate(jax.tree.leaves(side))},
        **{id(x): ("params", i) for i, x in enumerate(jax.tree.leaves(row))},
        id(index): ("index", None),
    }
    inputs = {id(x) for x in jax.tree.leaves(carry)}
    saved.origins, kept = [], []
    for leaf in leaves:
        origin = known.get(id(leaf))
        if origin is None and not isinstance(leaf, jax.core.Tracer):
            origin = ("constant", leaf)
        if origin is None:
            wanted = run.host_saved or (run.host_inputs and id(leaf) in inputs)
            origin = ("kept", wanted or on_host(leaf))
            kept.append(leaf)
        saved.origins.append(origin)
    return out, kept


def _backward(
    run: Run, stream: Stream, saved: _Saved, moving: Any, residuals: Any, cotangents: Any
) -> Any:
    stacks, scalars, kept, side = residuals
    dcarry, dsums = jax.tree.map(_zero, cotangents, is_leaf=_is_zero)
    dside = [jnp.zeros_like(x) for x in _picked(side, moving)]

    def step(k: Any, loop: Any) -> Any:
        changed, dcarry, dside, norm = loop
        now = dataclasses.replace(stacks, **changed)
        i = run.count - 1 - jnp.int32(k)
        row = fetch(now.params, i, stacked=run.stacked)
        sources = {
            "params": jax.tree.leaves(row),
            "side": jax.tree.leaves(side),
            "index": {None: run.first + i},
        }
        own = iter(fetch(kept, i, stacked=run.stacked))
        leaves = [
            next(own) if kind == "kept" else at if kind == "constant" else sources[kind][at]
            for kind, at in saved.origins
        ]
        vjp = jax.tree.unflatten(saved.treedef, leaves)
        drow, dcarry, more = vjp((dcarry, fetch(dsums, i)))
        dside = jax.tree.map(jnp.add, dside, more)
        now, square = stream.visit(run.key, i, now, row, drow, scalars)
        return fields(now), dcarry, dside, norm + square

    def fields(stacks: Stacks) -> dict[str, Any]:
        return {name: getattr(stacks, name) for name in stream.changing}

    start = (fields(stacks), dcarry, dside, jnp.float32(0))
    changed, dcarry, dside, norm = _loop(run, step, start)
    tap = jnp.stack([norm, jnp.float32(1)])
    found = dataclasses.replace(stacks, **changed)
    return found, tap, None, dcarry, _spread(side, moving, dside)


def _laid_out(x: Array, sharding: NamedSharding | None) -> Array:
    """As its stack is: else the stack may be laid out anew, in host memory, by the host."""
    if sharding is None or on_host(x):
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


def _loop(run: Run, step: Callable[[Any, Any], Any], start: Any) -> Any:
    """`step(i, loop)` for every layer; of a single unstacked one without a loop."""
    return jax.lax.fori_loop(0, run.count, step, start) if run.stacked else step(0, start)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _value(x: Any) -> Any:
    return x.value


def _moving(x: Any) -> bool:
    """Whether a side input is differentiated."""
    return bool(x.perturbed) and jnp.issubdtype(x.value.dtype, jnp.floating)


def _still(side: Any) -> Any:
    """Nothing of it is differentiated."""
    return jax.tree.map(lambda _: False, side)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _zero(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x


def _picked(side: Any, moving: Any) -> list[Any]:
    """The side inputs that are differentiated."""
    pairs = zip(jax.tree.leaves(side), jax.tree.leaves(moving), strict=True)
    return [x for x, moves in pairs if moves is True]


def _merged(side: Any, moving: Any, chosen: list[Any]) -> Any:
    """`side` with these in place of those that are differentiated."""
    found = iter(chosen)
    return jax.tree.map(lambda x, moves: next(found) if moves is True else x, side, moving)


def _spread(side: Any, moving: Any, cotangents: list[Any]) -> Any:
    """A tree like `side` with these where it is differentiated, None elsewhere."""
    found = iter(cotangents)
    return jax.tree.map(lambda _, moves: next(found) if moves is True else None, side, moving)
