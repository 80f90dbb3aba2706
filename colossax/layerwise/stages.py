"""The layers of a stage: forward, and backward from what forward kept, on all stages at once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import MeshAxis
from colossax.errors import PlanError
from colossax.layerwise.cut import CutRun
from colossax.layerwise.layer import Layer, shapes_of

Chunks = tuple[Any, ...]
"""Of each chunk of a stage, a tree of arrays `[stages, layers of a chunk, ...]`."""


def over_stages(fn: Callable, in_axes: Any = 0) -> Callable:
    """`fn` of one stage made one of all, whose arrays have a dim of stages in front."""
    return jax.vmap(fn, in_axes=in_axes, spmd_axis_name=MeshAxis.STAGE.value)


def in_place(update: Callable[[Array, Array, Array, int], Array]) -> Callable[..., Array]:
    """An update of one row of a dim, which stays one under `vmap`.

    Else it becomes a scatter there, which asks whether it is out of bounds, and for that the row is
    copied.

    Args:
        update: `(whole, value, number of the row, dim) -> whole`; value without the dim, number in
            bounds and the same for all that is mapped.
    """

    def at_dim(whole: Array, value: Array, at: Array, dim: int = 0) -> Array:
        @jax.custom_batching.custom_vmap
        def one(whole: Array, value: Array, at: Array) -> Array:
            return update(whole, value, at, dim)

        @one.def_vmap
        def mapped(size: int, batched: Any, whole: Array, value: Array, at: Array) -> Any:
            assert not batched[2]
            pairs = zip((whole, value), batched, strict=False)
            whole, value = (x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in pairs)
            return at_dim(whole, value, at, dim + 1), True

        return one(whole, value, at)

    return at_dim


@in_place
def put_row(whole: Array, value: Array, at: Array, dim: int) -> Array:
    """`whole` with one row of a dim replaced."""
    return jax.lax.dynamic_update_index_in_dim(whole, value, at, dim)


@in_place
def add_to_row(whole: Array, value: Array, at: Array, dim: int) -> Array:
    """`whole` with `value` added to one row of a dim."""
    new = jax.lax.dynamic_index_in_dim(whole, at, dim) + jnp.expand_dims(value, dim)
    return jax.lax.dynamic_update_index_in_dim(whole, new, at, dim)


class StageLayers:
    """What every stage does with its layers; each is traced once, whatever their number.

    Attributes:
        count: Layers of a chunk.
        layer: One of them.
    """

    def __init__(
        self,
        runs: Sequence[CutRun],
        rows: Sequence[Any],
        stages: int,
        carry: Any,
        side: Any,
    ):
        """Trace a layer.

        Args:
            runs: Of the cut loss, one for each chunk.
            rows: Shapes of the runs' parameters, `[layers, ...]`.
            stages: How many stages share each run.
            carry: Shapes of what goes from layer to layer.
            side: Shapes of what all layers get.

        Raises:
            PlanError: The runs differ, or their layers cannot be shared alike.
        """
        self._runs = [run.layers for run in runs]
        _check(self._runs, rows, stages)
        first = self._runs[0]
        self.count = first.count // stages
        self._origins = jnp.array([run.origin for run in self._runs], jnp.int32)

        def apply(row: Any, carry: Any, side: Any, number: Array) -> Any:
            carry, _, sums = first.apply(row, carry, side, first.state(number))
            return carry, sums

        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows[0])
        self.layer = _traced(lambda: Layer(first.checkpoint(apply), row, carry, side))
        out, _ = self.layer.out
        if jax.tree.map(_form, shapes_of(carry)) != jax.tree.map(_form, shapes_of(out)):
            raise PlanError(
                f"layer stack '{first.key[0]}': its layers give something else than they get, so"
                " they cannot be shared by stages; give mesh axis 'stage' size 1"
            )

    @property
    def carries(self) -> tuple[bool, ...]:
        """Of what forward keeps, which is a part of a layer's input."""
        return tuple(each.carry for each in self.layer.residuals if each.source == "kept")

    def forward(self, rows: Chunks, carry: Any, side: Any, chunk: Array, stage: Array) -> Any:
        """Of one stage: `(carry, (kept, sums))`, kept and sums `[layers, ...]`.

        Args:
            rows: Of each chunk, `[layers, ...]`.
            carry: Input of the chunk.
            side: Of its microbatch.
            chunk: Which.
            stage: Number of the stage.
        """
        numbers = self._first(chunk, stage)

        def body(carry: Any, i: Array) -> Any:
            row = _row(rows, chunk, i)
            (carry, sums), kept = self.layer.forward(row, carry, side, numbers + i)
            return carry, (kept, sums)

        return jax.lax.scan(body, carry, jnp.arange(self.count, dtype=jnp.int32))

    def backward(
        self,
        rows: Chunks,
        grads: Chunks,
        cotangent: tuple[Any, Any],
        side: Any,
        kept: Callable[[Array], Any],
        chunk: Array,
        stage: Array,
        active: Array,
    ) -> tuple[Any, Chunks]:
        """Of one stage: gradient of the chunk's input, and gradients with this one added in place.

        Args:
            rows: As for `forward`.
            grads: Sums of gradients so far, like rows, in the dtype of accumulation.
            cotangent: By `(carry, sums)` of the chunk.
            side: As for `forward`.
            kept: Number of a layer of the chunk to what forward kept of it.
            chunk: Which.
            stage: Number of the stage.
            active: Whether there is anything to do; else nothing is added, and 0 goes on.
        """
        numbers = self._first(chunk, stage)
        after, sums = cotangent

        def body(loop: Any, i: Array) -> Any:
            after, grads = loop
            row, dsums = _row(rows, chunk, i), _at(sums, i)
            found = self.layer.transpose(row, side, numbers + i, kept(i), (after, dsums))
            return (found.carry, _added(grads, found.params, chunk, i, active)), None

        order = jnp.arange(self.count, dtype=jnp.int32)
        (before, grads), _ = jax.lax.scan(body, (after, grads), order, reverse=True)
        return jax.tree.map(lambda x: jnp.where(active, x, jnp.zeros_like(x)), before), grads

    def _first(self, chunk: Array, stage: Array) -> Array:
        """Number of the first layer of a stage's chunk."""
        return self._origins[chunk] + stage * self.count


def _traced(make: Callable[[], Layer]) -> Layer:
    """A layer traced where `stage` is mapped over: what regions keep must not name that axis."""
    made = []
    jax.eval_shape(over_stages(lambda x: made.append(make()) or x), jnp.zeros(1))
    return made[0]


def _form(x: Any) -> tuple[Any, Any]:
    return x.shape, x.dtype


def _at(tree: Any, i: Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def _row(rows: Chunks, chunk: Array, i: Array) -> Any:
    """Parameters of layer i of a chunk: of each chunk's, the one that is meant."""
    found = _at(rows[0], i)
    for number, more in enumerate(rows[1:], 1):
        found = jax.tree.map(
            lambda a, b, n=number: jnp.where(chunk == n, b, a), found, _at(more, i)
        )
    return found


def _added(grads: Chunks, more: Any, chunk: Array, i: Array, active: Array) -> Chunks:
    """Gradients of layer i of a chunk added to theirs."""

    def add(number: int) -> Callable[[Any, Any], Any]:
        meant = active & (chunk == number) if len(grads) > 1 else active

        def one(whole: Array, g: Array) -> Array:
            more = jnp.where(meant, g, jnp.zeros_like(g)).astype(whole.dtype)
            return add_to_row(whole, more, i)

        return one

    return tuple(jax.tree.map(add(number), each, more) for number, each in enumerate(grads))


def _check(runs: Sequence[Any], rows: Sequence[Any], stages: int) -> None:
    path, counts = runs[0].key[0], [run.count for run in runs]
    if any(count % stages or not run.stacked for count, run in zip(counts, runs, strict=True)):
        raise PlanError(
            f"layer stack '{path}': {stages} stages cannot share runs of {counts} layers evenly;"
            f" choose a size of 'stage' that divides each, or layers that it divides"
        )
    forms = [jax.tree.map(_form, shapes_of(each)) for each in rows]
    kinds = [(dataclasses.replace(run.policy, count=-1), run.group) for run in runs]
    if any(form != forms[0] for form in forms) or any(kind != kinds[0] for kind in kinds):
        raise PlanError(
            f"layer stack '{path}': its runs of layers differ, and every stage does the same; give"
            " all layers one policy (plan.segments) and one kind, or mesh axis 'stage' size 1"
        )
    if len(runs) > 1 and runs[0].group != 1:
        raise PlanError(
            f"layer stack '{path}': groups of layers of several kinds cannot be cut into chunks;"
            " give plan.pipeline.chunks 1"
        )
