"""The layers of a stage: forward, and backward from what forward kept, on all stages at once."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import MeshAxis, Segment
from colossax.errors import PlanError
from colossax.layerwise.cut import CutRun
from colossax.layerwise.in_place import add_to_row, raise_row
from colossax.layerwise.layer import Apart, Layer, shapes_of
from colossax.layerwise.sums import Maximum
from colossax.offload import fetch

Chunks = tuple[Any, ...]
"""Of each chunk of a stage, a tree of arrays `[stages, layers of a chunk, ...]`."""


def over_stages(fn: Callable, in_axes: Any = 0) -> Callable:
    """`fn` of one stage made one of all, whose arrays have a dim of stages in front."""
    return jax.vmap(fn, in_axes=in_axes, spmd_axis_name=MeshAxis.STAGE.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive layers of every chunk.

    Attributes:
        start: Number of the first one in its chunk.
        policy: What they keep and recompute; its count is theirs.
    """

    start: int
    policy: Segment


class StageLayers:
    """What every stage does with its layers; each is traced once, whatever their number.

    Attributes:
        count: Layers of a chunk, or those of them that it is for.
        layer: One of them.
    """

    def __init__(
        self,
        runs: Sequence[CutRun],
        rows: Sequence[Any],
        stages: int,
        carry: Any,
        side: Any,
        part: Part | None = None,
    ):
        """Trace a layer.

        Args:
            runs: Of the cut loss, one for each chunk.
            rows: Shapes of the runs' parameters, `[layers, ...]`.
            stages: How many stages share each run.
            carry: Shapes of what goes from layer to layer.
            side: Shapes of what all layers get.
            part: Of a chunk's layers, those that it is for; None: all.

        Raises:
            PlanError: The runs differ, or their layers cannot be shared alike.
        """
        self._runs = [run.layers for run in runs]
        _check(self._runs, rows, stages)
        first = self._runs[0]
        self._each = self.count = first.count // stages
        self._start = 0
        if part is not None:
            self._start, self.count = part.start, part.policy.count
            first = dataclasses.replace(first, policy=part.policy)
        self._origins = jnp.array([run.origin for run in self._runs], jnp.int32)

        def apply(row: Any, carry: Any, side: Any, number: Array) -> Any:
            carry, _, sums = first.apply(row, carry, side, first.state(number))
            return carry, sums

        _check_carry(first.key[0], carry)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows[0])
        self.layer: Layer = _traced(lambda: Layer(first.checkpoint(apply), row, carry, side))
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

    @functools.cached_property
    def apart(self) -> Apart:
        """The layer's backward pass in two parts."""
        return _traced(self.layer.apart)

    @property
    def pending(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what input gradients of a chunk leave for its weight gradients."""
        return [jax.ShapeDtypeStruct((self.count, *x.shape), x.dtype) for x in self.apart.pending]

    @property
    def hosts(self) -> tuple[bool, ...]:
        """Of what forward keeps, which the plan puts into host memory."""
        placement = self._runs[0].policy.placement
        where = {True: placement.input_on_host, False: placement.activations_on_host}
        return tuple(where[carry] for carry in self.carries)

    @property
    def fetches(self) -> bool:
        """Whether parameters are in host memory, so that stages run layers of all at a time."""
        return self._runs[0].policy.placement.params_on_host

    def forward(self, rows: Chunks, carry: Any, side: Any, chunk: Array, part: Array) -> Any:
        """Of one stage: `(carry, (kept, sums))`, kept and sums `[layers, ...]`.

        Args:
            rows: Of each chunk, `[layers, ...]`.
            carry: Input of the chunk.
            side: Of its microbatch.
            chunk: Which.
            part: Of the chunk's layers, as many parts as stages, which the stage has.
        """
        numbers = self._first(chunk, part)

        def body(carry: Any, i: Array) -> Any:
            at = self._at(i)
            row = _row(rows, chunk, at)
            (carry, sums), kept = self.layer.forward(row, carry, side, numbers + at)
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
        part: Array,
        active: Array,
    ) -> tuple[Any, Chunks]:
        """Of one stage: gradient of the chunk's input, and gradients with this one added in place.

        Args:
            rows: As for `forward`.
            grads: Sums of gradients so far, like rows, in the dtype of accumulation; None of what
                does not learn, and of a `Maximum` the largest so far, none below 0.
            cotangent: By `(carry, sums)` of the chunk.
            side: As for `forward`.
            kept: Number of a layer of the chunk to what forward kept of it.
            chunk: Which.
            part: As for `forward`.
            active: Whether there is anything to do; else nothing is added, and 0 goes on.
        """
        numbers = self._first(chunk, part)
        after, sums = cotangent

        def body(loop: Any, i: Array) -> Any:
            after, grads = loop
            at = self._at(i)
            row, dsums = _row(rows, chunk, at), _at(sums, at)
            found = self.layer.transpose(row, side, numbers + at, kept(i), (after, dsums))
            return (found.carry, _added(grads, found.params, chunk, at, active)), None

        order = jnp.arange(self.count, dtype=jnp.int32)
        (before, grads), _ = jax.lax.scan(body, (after, grads), order, reverse=True)
        return _only(active, before), grads

    def forward_fetching(
        self, rows: Chunks, carry: Any, side: Any, chunk: Array, part: Array
    ) -> Any:
        """`forward` of all stages, `[stages, ...]` each, from parameters in host memory.

        Cost: on a device one layer's parameters, which are fetched outside of the map over stages.
        """

        def body(carry: Any, i: Array) -> Any:
            def one(row: Any, carry: Any, side: Any, chunk: Array, part: Array) -> Any:
                numbers = self._first(chunk, part)
                (carry, sums), kept = self.layer.forward(row, carry, side, numbers + at)
                return carry, (kept, sums)

            at = self._at(i)
            row = fetch(rows[0], at, axis=1)
            return over_stages(one)(row, carry, side, chunk, part)

        numbers = jnp.arange(self.count, dtype=jnp.int32)
        carry, found = jax.lax.scan(body, carry, numbers)
        return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)

    def backward_fetching(
        self,
        rows: Chunks,
        grads: Chunks,
        cotangent: tuple[Any, Any],
        side: Any,
        kept: Any,
        chunk: Array,
        part: Array,
        active: Array,
    ) -> tuple[Any, Chunks]:
        """`backward` of all stages, likewise."""
        after, sums = cotangent

        def body(loop: Any, i: Array) -> Any:
            def one(row: Any, loop: Any, side: Any, kept: Any, sums: Any, *cell: Array) -> Any:
                chunk, part, active = cell
                after, grads = loop
                number, by = self._first(chunk, part) + at, (after, _at(sums, at))
                found = self.layer.transpose(row, side, number, _at(kept, i), by)
                return found.carry, _added(grads, found.params, chunk, at, active)

            at = self._at(i)
            row = fetch(rows[0], at, axis=1)
            return over_stages(one)(row, loop, side, kept, sums, chunk, part, active), None

        order = jnp.arange(self.count, dtype=jnp.int32)
        (before, grads), _ = jax.lax.scan(body, (after, grads), order, reverse=True)
        return over_stages(_only)(active, before), grads

    def input_gradients(
        self,
        rows: Chunks,
        cotangent: tuple[Any, Any],
        side: Any,
        kept: Any,
        chunk: Array,
        part: Array,
        active: Array,
    ) -> tuple[Any, list[Array]]:
        """Of one stage: gradient of the chunk's input, and what its weights' wait for.

        Args:
            rows: As for `backward`; all others likewise.
            cotangent: By `(carry, sums)` of the chunk.
            side: Of its microbatch.
            kept: What forward kept.
            chunk: Which.
            part: Of its layers.
            active: Whether there is anything to do; else 0 goes on.
        """
        numbers = self._first(chunk, part)
        after, sums = cotangent

        def body(after: Any, i: Array) -> Any:
            given = _row(rows, chunk, i), side, numbers + i, _at(kept, i)
            before, _, pending = self.apart.input_gradient(*given, (after, _at(sums, i)))
            return before, pending

        order = jnp.arange(self.count, dtype=jnp.int32)
        before, pending = jax.lax.scan(body, after, order, reverse=True)
        return _only(active, before), pending

    def weight_gradients(
        self,
        rows: Chunks,
        grads: Chunks,
        side: Any,
        kept: Any,
        pending: list[Array],
        chunk: Array,
        part: Array,
        active: Array,
    ) -> Chunks:
        """Of one stage: sums of gradients with those of a chunk's weights added in place.

        Args:
            rows: As for `backward`; all others likewise.
            grads: Sums so far.
            side: Of the chunk's microbatch.
            kept: What forward kept; None where the layer's weight gradients do not read it.
            pending: What `input_gradients` left.
            chunk: Which.
            part: Of its layers.
            active: Whether there is anything to do; else nothing is added.
        """
        numbers = self._first(chunk, part)

        def body(grads: Chunks, i: Array) -> Any:
            held = self.layer.kept if kept is None else _at(kept, i)
            given = _row(rows, chunk, i), side, numbers + i, held
            found = self.apart.weight_gradient(*given, _at(pending, i))
            return _added(grads, found, chunk, i, active), None

        return jax.lax.scan(body, grads, jnp.arange(self.count, dtype=jnp.int32))[0]

    def _first(self, chunk: Array, part: Array) -> Array:
        """Number of the first layer of a stage's chunk."""
        return self._origins[chunk] + part * self._each

    def _at(self, i: Array) -> Array:
        """Number in its chunk, of a layer of the part."""
        return i + self._start if self._start else i


def _only(active: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(active, x, jnp.zeros_like(x)), tree)


def _traced(make: Callable[[], Any]) -> Any:
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
    """Gradients of layer i of a chunk added to theirs; None of what does not learn."""

    def add(number: int) -> Callable[[Any, Any], Any]:
        meant = active & (chunk == number) if len(grads) > 1 else active

        def one(whole: Any, g: Array) -> Any:
            if whole is None:
                return None
            more = jnp.where(meant, g, jnp.zeros_like(g))
            if isinstance(whole, Maximum):
                return Maximum(raise_row(whole.value, more.astype(whole.value.dtype), i))
            return add_to_row(whole, more.astype(whole.dtype), i)

        return one

    def is_whole(x: Any) -> bool:
        return x is None or isinstance(x, Maximum)

    return tuple(
        jax.tree.map(add(number), each, more, is_leaf=is_whole) for number, each in enumerate(grads)
    )


def _check_carry(path: str, carry: Any) -> None:
    """Refuse what has no gradient, which stages would have to send back."""
    for x in jax.tree.leaves(carry):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise PlanError(
                f"layer stack '{path}': its layers hand on {x.dtype}{list(x.shape)}, and stages"
                " send gradients of all that is handed on; give it as side input, or mesh axis"
                " 'stage' size 1"
            )


def _check(runs: Sequence[Any], rows: Sequence[Any], stages: int) -> None:
    path, counts = runs[0].key[0], [run.count for run in runs]
    if any(count % stages or not run.stacked for count, run in zip(counts, runs, strict=True)):
        raise PlanError(
            f"layer stack '{path}': {stages} stages cannot share runs of {counts} layers evenly;"
            f" choose a size of 'stage' that divides each, or layers that it divides"
        )
    forms = [jax.tree.map(_form, shapes_of(each)) for each in rows]
    # Layers of another kind are counted from another row, where those before are of the first.
    kinds = [(dataclasses.replace(run.policy, count=-1), run.first - run.first_row) for run in runs]
    if any(form != forms[0] for form in forms) or any(kind != kinds[0] for kind in kinds):
        raise PlanError(
            f"layer stack '{path}': its runs of layers differ, and every stage does the same; give"
            " all layers one policy (plan.segments) and one kind, or mesh axis 'stage' size 1"
        )
