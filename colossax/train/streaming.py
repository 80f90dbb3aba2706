"""The training step of a model whose layers are updated during backward, one after another.

Stacked parameters and their optimizer state are rows in host or device memory, which
`colossax.offload` brings to the device layer by layer; what is in no layer stack is updated as in
the ordinary step. Losses, metrics and states are those of the ordinary step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.offload import Key, Stacks, Stream, fetch, store, streaming
from colossax.optim import DimsOptimizer, is_layerwise
from colossax.sharding import batch_axes
from colossax.train.gradients import (
    LossCall,
    checked_weights,
    cut_up,
    microbatches,
    objective,
    whole_weights,
)
from colossax.train.parts import SHARED, Part, Update, squares
from colossax.typing import Batch, Dims, ParamInfo, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What passes over a batch found.

    Attributes:
        loss: Of the batch.
        totals: Terms as (total, weight).
        sums: Metrics as (total, weight).
        norm: Of all gradients; squared, and without what is in no layer stack, of a single pass.
    """

    # While JAX takes it apart, its leaves are other things than arrays.
    loss: Any
    totals: Any
    sums: Any
    norm: Any


jax.tree_util.register_dataclass(Found, ["loss", "totals", "sums", "norm"], [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """Updates that are left to do once a step's program has ended.

    Attributes:
        grads: Of `Streaming.later`, stacks of all layers' gradients.
        update: What every update needs.
    """

    grads: dict[Key, list[Any]]
    update: Update


jax.tree_util.register_dataclass(Pending, ["grads", "update"], [])


@dataclasses.dataclass(frozen=True)
class _Owner:
    """The parameter that a leaf of the optimizer's state mirrors, or `SHARED`."""

    number: int


def check_streamable(bound: BoundPlan, infos: Any, learning: Any, optimizer: Any) -> None:
    """Refuse what cannot be updated layer by layer.

    Args:
        bound: Plan and devices.
        infos: Of all parameters.
        learning: Of those that learn, None elsewhere.
        optimizer: As it was given.

    Raises:
        PlanError: With the reason and a remedy.
    """
    segments = {info.segment for info in jax.tree.leaves(infos)} - {None}
    if not segments:
        raise PlanError(
            "plan.offload: the model has no layer stack, and only stacked layers can be moved one"
            " by one; build its repeated layers with colossax.nn.LayerStack, or drop the offload"
        )
    for segment in sorted(segments - {info.segment for info in jax.tree.leaves(learning)}):
        raise PlanError(
            f"plan.offload: no parameter in segment {segment[1]} of the layer stack"
            f" '{segment[0]}' learns; let the filter accept some, or drop the offload"
        )
    if not is_layerwise(optimizer):
        raise PlanError(
            "plan.offload: layers are updated one by one, and this optimizer does not say that it"
            " can be; give one of colossax.optim, or mark your `dims -> transformation` with"
            " colossax.optim.layerwise"
        )
    cut = bound.plan.batch
    several = cut.accumulation > 1 or cut.microbatch is not None
    if cut.reduce_once and several and batch_axes(bound):
        raise PlanError(
            "plan.batch.reduce_once: whole gradients cannot be kept while layers are updated one"
            " by one; switch it off, as preset zero2 does"
        )


class Streaming:
    """How a step visits its parameters: the layers' in backward, all others afterwards."""

    def __init__(
        self,
        call: LossCall,
        bound: BoundPlan,
        infos: Any,
        trainable: Any,
        optimizer: DimsOptimizer,
        map_moments: Callable,
        clip_norm: float | None,
    ):
        """Divide the parameters.

        Args:
            call: The loss.
            bound: Plan and devices.
            infos: Of all parameters.
            trainable: Tree of booleans.
            optimizer: For dims of any of them.
            map_moments: See `Step.map_moments`.
            clip_norm: Global norm that gradients are scaled down to, or None.
        """
        self.call = call
        self.bound = bound
        self.clip_norm = clip_norm
        leaves, self._structure = jax.tree.flatten(infos)
        learns = jax.tree.leaves(trainable)
        owners = _owners(leaves, map_moments)

        def part(key: Key | None, bound: BoundPlan = bound) -> Part:
            return Part(key, leaves, learns, owners, bound, optimizer)

        self._part = part
        keys = dict.fromkeys(info.segment for info in leaves if info.segment is not None)
        self.parts = {key: part(key) for key in keys}
        self.rest = part(None)
        self._shared = [j for j, owner in enumerate(owners) if owner == SHARED]
        away = {j for each in self.parts.values() if each.on_disk for j in each.slots}
        self._present = [j for j in range(len(owners)) if j not in away]
        self.clipping = "none" if clip_norm is None else bound.plan.offload.clipping
        if self.later:
            self.clipping = self._clipping_of_kept(self.clipping)

    @staticmethod
    def _clipping_of_kept(wanted: str) -> str:
        """How gradients are clipped that are kept anyway."""
        if wanted == "layer":
            raise PlanError(
                "plan.offload.clipping 'layer': layers on disk, or that the CPU updates, are"
                " updated after backward, from gradients that are kept; give clipping stack"
            )
        return "stack"

    @property
    def on_disk(self) -> dict[Key, Part]:
        """The parts whose optimizer state is in a file."""
        return {key: part for key, part in self.parts.items() if part.on_disk}

    @property
    def on_cpu(self) -> dict[Key, Part]:
        """The parts that the CPU updates."""
        return {key: part for key, part in self.parts.items() if part.on_cpu}

    @property
    def beside_cpu(self) -> dict[Key, Part]:
        """The parts that devices update meanwhile: those of the others that take long."""
        away = {**self.on_disk, **self.on_cpu}
        return {
            key: part
            for key, part in self.parts.items()
            if self.on_cpu and part.state_on_host and key not in away
        }

    @property
    def later(self) -> dict[Key, Part]:
        """The parts that are updated once a step's program has ended."""
        return {**self.on_disk, **self.on_cpu, **self.beside_cpu}

    def parts_for(self, keys: Iterable[Key], bound: BoundPlan) -> dict[Key, Part]:
        """These parts, as updated on other devices than the step's."""
        return {key: self._part(key, bound) for key in keys}

    # Between the state's trees and the parts' lists

    def stacks(self, params: Any, opt_state: Any) -> dict[Key, Stacks]:
        """Of every run: its trained parameters and their optimizer state."""
        leaves, moments = jax.tree.leaves(params), self.moments(opt_state)

        def state(part: Part) -> list[Any] | None:
            return None if part.on_disk else [moments[j] for j in part.slots]

        return {
            key: Stacks(params=[leaves[i] for i in part.trained], state=state(part))
            for key, part in self.parts.items()
        }

    def with_stacks(self, state: TrainState, changed: dict[Key, Stacks]) -> TrainState:
        """The state with parameters and optimizer state of these runs."""
        leaves, structure = jax.tree.flatten(state["params"])
        moments = self.moments(state["opt_state"])
        for key, stacks in changed.items():
            for i, stack in zip(self.parts[key].trained, stacks.params, strict=True):
                leaves[i] = stack
            moments.update(zip(self.parts[key].slots, stacks.state, strict=True))
        own = [moments[j] for j in self._present]
        return {
            **state,
            "params": jax.tree.unflatten(structure, leaves),
            "opt_state": jax.tree.unflatten(jax.tree.structure(state["opt_state"]), own),
        }

    def pending_shardings(self, whole: NamedSharding) -> Pending:
        """Where what is left to do lies.

        Args:
            whole: Of what every device has.
        """
        shared = [whole for _ in self._shared]
        scale = None if self.clip_norm is None else whole
        return Pending(
            grads={key: part.gradient_shardings() for key, part in self.later.items()},
            update=Update(shared=shared, scale=scale, ok=whole),
        )

    def moments(self, opt_state: Any) -> dict[int, Any]:
        """Leaves of the optimizer's state by number; those on disk are not there."""
        return dict(zip(self._present, jax.tree.leaves(opt_state), strict=True))

    def params(self, old: Any, stacks: dict[Key, Stacks], rest: list[Array]) -> Any:
        """The tree of all parameters with these in it."""
        leaves = jax.tree.leaves(old)
        for part, values in self._values(stacks, rest, "params"):
            for i, value in zip(part.trained, values, strict=True):
                leaves[i] = value
        return jax.tree.unflatten(self._structure, leaves)

    def opt_state(
        self, old: Any, stacks: dict[Key, Stacks], rest: list[Array], shared: list[Array]
    ) -> Any:
        """The optimizer's state with these in it."""
        moments = self.moments(old)
        for part, values in self._values(stacks, rest, "state"):
            moments.update(zip(part.slots, values or (), strict=values is not None))
        moments.update(zip(self._shared, shared, strict=True))
        return jax.tree.unflatten(jax.tree.structure(old), [moments[j] for j in self._present])

    def _values(self, stacks: dict[Key, Stacks], rest: list[Array], field: str) -> Any:
        yield self.rest, rest
        for key, part in self.parts.items():
            yield part, getattr(stacks[key], field)

    def init_state(self, params: Any, shardings: Any) -> Any:
        """Optimizer state, each array made where it lives.

        Args:
            params: Parameters, laid out by the plan.
            shardings: Of the optimizer's state.
        """
        dtype = jax.tree.leaves(params)[0].dtype
        where = self.moments(shardings)
        found: dict[int, Array] = {}
        jobs: list[tuple[list[int], Callable]] = [
            (self.rest.slots, functools.partial(self.rest.init, dtype)),
            (self._shared, functools.partial(self.rest.init_shared, dtype)),
        ]
        for part in self.parts.values():
            if part.on_disk:
                continue
            own = [where[j] for j in part.slots]
            jobs.append((part.slots, functools.partial(part.init_stacks, dtype, own)))
        for slots, make in jobs:
            leaves = jax.jit(make, out_shardings=[where[j] for j in slots])() if slots else []
            found.update(zip(slots, leaves, strict=True))
        return jax.tree.unflatten(jax.tree.structure(shardings), [found[j] for j in self._present])

    # A step

    def step(
        self, state: TrainState, batch: Batch, dims: dict[str, Dims], key: Array
    ) -> tuple[Any, Any, Found, Array, Pending | None]:
        """New parameters and optimizer state, what was found, and whether all of it was finite.

        Last, what is left to do for `later`.
        """
        params, opt_state = state["params"], state["opt_state"]
        pieces = microbatches(self.bound, batch, dims)
        job = _Job(self, params, state["variables"], *cut_up(batch, dims, key, pieces), pieces)
        stacks = self.stacks(params, opt_state)
        moments = self.moments(opt_state)
        shared = [moments[j] for j in self._shared]
        how = _HOW[self.clipping]
        stacks, rest_grads, found, scale, ok = how(job, stacks, shared)
        update = Update(shared=shared, scale=scale, ok=ok)
        leaves = jax.tree.leaves(params)
        moved, own, new_shared = self.rest.update(
            [leaves[i] for i in self.rest.trained],
            [moments[j] for j in self.rest.slots],
            rest_grads,
            update,
        )
        if how is _known_norm:
            # Only then: or the others' gradients are there while layers' states come and go.
            moved, own, update = jax.lax.optimization_barrier((moved, own, update))
            stacks = {
                key: stacks[key] if key in self.later else part.visit_all(stacks[key], update)
                for key, part in self.parts.items()
            }
        new_params = self.params(params, stacks, moved)
        new_state = self.opt_state(opt_state, stacks, own, new_shared)
        pending = None
        if self.later:
            grads = {key: stacks[key].grads for key in self.later}
            pending = Pending(grads=grads, update=update)
        return new_params, new_state, found, ok, pending

    def gradients(
        self, state: TrainState, batch: Batch, dims: dict[str, Dims], key: Array
    ) -> tuple[list[Any], Found]:
        """Gradients of all parameters as a list (None of those that do not learn), whole."""
        pieces = microbatches(self.bound, batch, dims)
        job = _Job(
            self, state["params"], state["variables"], *cut_up(batch, dims, key, pieces), pieces
        )
        stacks, rest, found = job.gathered(self.stacks(state["params"], state["opt_state"]))
        grads: list[Any] = [None] * self._structure.num_leaves
        for part, values in self._values(stacks, rest, "grads"):
            for i, value in zip(part.trained, values, strict=True):
                grads[i] = value
        return grads, found


def _owners(infos: Sequence[ParamInfo], map_moments: Callable) -> list[int]:
    """Number of the parameter that each leaf of the optimizer's state mirrors, or `SHARED`."""
    numbers = {(info.path, info.first_layer): i for i, info in enumerate(infos)}
    marks = map_moments(
        lambda leaf, info: _Owner(numbers[info.path, info.first_layer]),
        lambda leaf: _Owner(SHARED),
        on_disk=True,
    )
    leaves = jax.tree.leaves(marks, is_leaf=lambda leaf: isinstance(leaf, _Owner))
    return [mark.number for mark in leaves]


class _Job:
    """A global batch and the passes over it."""

    def __init__(
        self,
        streaming: Streaming,
        params: Any,
        variables: Any,
        micro: Batch,
        keys: Array,
        first: Batch,
        pieces: int,
    ):
        self.all = streaming
        self.leaves = jax.tree.leaves(params)
        self.variables = variables
        self.micro, self.keys, self.first, self.pieces = micro, keys, first, pieces
        nothing = jax.tree.map(lambda _: None, params)
        weigh = checked_weights(streaming.call, params, nothing, variables, first, keys[0])
        self.over = whole_weights(weigh, micro, keys) if pieces > 1 else None

    @property
    def last(self) -> tuple[Batch, Array]:
        """The last microbatch and its key."""
        return jax.tree.map(lambda x: x[-1], (self.micro, self.keys))

    def backward(
        self,
        visit: Callable,
        moving: dict[Key, Stacks],
        fixed: dict[Key, Stacks],
        scalars: Any,
        piece: Batch,
        key: Array,
    ) -> tuple[dict[Key, Stacks], list[Array], Found]:
        """One pass over a microbatch.

        Args:
            visit: What to do with a layer's gradient.
            moving: The stacks that it changes.
            fixed: The others; the parameters, where it changes them not.
            scalars: For `visit`.
            piece: The microbatch.
            key: Its random key.

        Returns:
            The changed stacks, gradients of what is in no layer stack, and what was found; the norm
            squared.
        """
        return _Pass(self, moving, fixed, piece, key).backward(visit, scalars)

    def gathered(
        self, stacks: dict[Key, Stacks], pieces: int | None = None
    ) -> tuple[dict[Key, Stacks], list[Array], Found]:
        """Gradients of this many microbatches (default: all) summed into stacks of their own."""
        pieces = self.pieces if pieces is None else pieces
        summed = self.pieces > 1
        start = {
            key: Stacks(grads=part.gradient_stacks(summed=summed))
            for key, part in self.all.parts.items()
        }
        fixed = {key: Stacks(params=each.params) for key, each in stacks.items()}
        visit = functools.partial(_summing, self.all.parts)
        if not summed:
            grads, rest, found = self.backward(visit, start, fixed, None, self.first, self.keys[0])
        else:
            grads, rest, found = self._summed(visit, start, fixed, pieces)
        joined = {key: _merged(stacks[key], grads[key]) for key in stacks}
        return joined, rest, found

    def _summed(
        self, visit: Callable, start: dict[Key, Stacks], fixed: dict[Key, Stacks], pieces: int
    ) -> tuple[dict[Key, Stacks], list[Array], Found]:
        def one(grads: dict[Key, Stacks], number: Any, piece: Batch, key: Array) -> Any:
            grads, rest, found = self.backward(visit, grads, fixed, number > 0, piece, key)
            return grads, (rest, found)

        def body(loop: Any, xs: Any) -> Any:
            grads, sums = loop
            grads, (rest, found) = one(grads, *xs)
            before, (rest_before, found_before) = found.norm, sums
            total = jax.tree.map(jnp.add, (rest_before, found_before), (rest, found))
            # The norm is of the sum so far, not a sum of norms.
            return (grads, (total[0], dataclasses.replace(total[1], norm=before))), None

        micro, keys = jax.tree.map(lambda x: x[:pieces], (self.micro, self.keys))
        shapes = jax.eval_shape(lambda: one(start, jnp.int32(0), self.first, self.keys[0])[1])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        xs = (jnp.arange(pieces, dtype=jnp.int32), micro, keys)
        (grads, (rest, found)), _ = jax.lax.scan(body, (start, zeros), xs)
        return grads, rest, found

    def before_last(self, stacks: dict[Key, Stacks]) -> tuple[dict[Key, Stacks], Any]:
        """The stacks with gradients of all microbatches but the last; their rest, what was found.

        None for both of the latter where there is one microbatch.
        """
        if self.pieces == 1:
            return stacks, None
        stacks, rest, found = self.gathered(stacks, self.pieces - 1)
        return stacks, (rest, found)

    def on_last(
        self,
        visit: Callable,
        moving: dict[Key, Stacks],
        fixed: dict[Key, Stacks],
        scalars: Any,
        before: Any,
    ) -> tuple[dict[Key, Stacks], list[Array], Found]:
        """A pass over the last microbatch, after what `before_last` found."""
        return _with_earlier(*self.backward(visit, moving, fixed, scalars, *self.last), before)

    def scale(self, found: Found) -> tuple[Any, Array]:
        """What gradients of this norm are multiplied by, if at all, and whether all is finite."""
        ok = jnp.isfinite(found.loss) & jnp.isfinite(found.norm)
        most = self.all.clip_norm
        return None if most is None else _scale(found.norm, most), ok


class _Pass:
    """A forward pass over a microbatch, and backward passes after it.

    Cost: where the loss calls a stack inside a transformation of its own, each backward pass runs
    forward anew: JAX traces once what is in there.
    """

    def __init__(
        self,
        job: _Job,
        moving: dict[Key, Stacks],
        fixed: dict[Key, Stacks],
        piece: Batch,
        key: Array,
    ):
        """Run nothing yet.

        Args:
            job: Of which the microbatch is a part.
            moving: The stacks that any backward pass changes.
            fixed: The others; the parameters, where none changes them.
            piece: The microbatch.
            key: Its random key.
        """
        self._job = job
        self._moving, self._fixed = moving, fixed
        self._piece, self._key = piece, key
        self._stream: Stream | None = None

    def backward(
        self, visit: Callable, scalars: Any, *, changing: tuple[str, ...] | None = None
    ) -> tuple[dict[Key, Stacks], list[Array], Found]:
        """One backward pass.

        Args:
            visit: What to do with a layer's gradient.
            scalars: For `visit`.
            changing: Fields of the moving stacks that it changes; None: all.

        Returns:
            The moving stacks, changed, gradients of what is in no layer stack, and what was found;
            the norm squared.
        """
        changing = _names(self._moving) if changing is None else changing
        stream = self._stream
        if stream is None or stream.inside:
            stream = self._stream = self._forward(visit, scalars, changing)
        stream.visit, stream.scalars, stream.changing = visit, scalars, changing
        changed, tap, rest = stream.transposed(self._vjp, jnp.ones_like(self._loss))
        # A stack called in a loop would have been changed as often as the loop turned.
        loss = jnp.where(tap[1] == len(self._moving), self._loss, jnp.nan)
        rest = self._job.all.rest.gradients(rest)
        totals, sums = self._sums
        return changed, rest, Found(loss=loss, totals=totals, sums=sums, norm=tap[0])

    def _forward(self, visit: Callable, scalars: Any, changing: tuple[str, ...]) -> Stream:
        job = self._job
        made: list[Stream] = []
        rest = [job.leaves[i] for i in job.all.rest.trained]

        def value(moving: dict[Key, Stacks], tap: Array, rest: list[Array]) -> Any:
            stacks = {name: _merged(moving[name], self._fixed[name]) for name in moving}
            stream = Stream(stacks=stacks, changing=changing, tap=tap, scalars=scalars, visit=visit)
            made.append(stream)
            with streaming(stream):
                params = job.all.params(job.leaves, stacks, rest)
                result = job.all.call(params, self._piece, job.variables, self._key)
            stream.check()
            loss, found = objective(*result, job.over)
            # Layers are updated before anything else can tell that they should not be.
            sound = jnp.isfinite(jax.lax.stop_gradient(loss))
            return loss * jnp.where(sound, 1.0, jnp.nan), found

        self._loss, self._vjp, self._sums = jax.vjp(
            value, self._moving, jnp.zeros(2), rest, has_aux=True
        )
        return made[-1]


def _names(stacks: dict[Key, Stacks]) -> tuple[str, ...]:
    """Fields that these have."""
    first = next(iter(stacks.values()))
    names = [field.name for field in dataclasses.fields(Stacks)]
    return tuple(name for name in names if getattr(first, name) is not None)


def _with_earlier(
    changed: dict[Key, Stacks], rest: list[Array], found: Found, before: Any
) -> tuple[dict[Key, Stacks], list[Array], Found]:
    """What the last microbatch's pass found, after what `before_last` did; the norm of all."""
    if before is not None:
        rest, sums = jax.tree.map(jnp.add, (rest, found), before)
        found = dataclasses.replace(sums, norm=found.norm)
    norm = jnp.sqrt(found.norm + squares(rest))
    return changed, rest, dataclasses.replace(found, norm=norm)


def _scale(norm: Float[Array, ""], most: float) -> Float[Array, ""]:
    return jnp.minimum(1.0, most / jnp.maximum(norm, 1e-12))


def _merged(one: Stacks, other: Stacks) -> Stacks:
    """Fields of the first where it has them, else of the other."""
    names = [field.name for field in dataclasses.fields(Stacks)]
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return Stacks(**{name: b if a is None else a for name, (a, b) in pairs.items()})


Parts = dict[Key, Part]


def _summing(
    parts: Parts, key: Key, i: Any, stacks: Stacks, row: Any, drow: Any, more: Any
) -> tuple[Stacks, Array]:
    """Store a layer's gradient, added to what is there where `more` is not None and true."""
    part = parts[key]
    grads = part.gradients(part.pick(drow))
    if more is not None:
        # Before the first one the stacks hold anything.
        sums = fetch(stacks.grads, i, stacked=part.stacked)
        grads = [jnp.where(more, s, 0) + g for s, g in zip(sums, grads, strict=True)]
    rows = [g.astype(stack.dtype) for g, stack in zip(grads, stacks.grads, strict=True)]
    stored = store(stacks.grads, rows, i, stacked=part.stacked)
    return dataclasses.replace(stacks, grads=stored), squares(grads)


def _measuring(
    parts: Parts, key: Key, i: Any, stacks: Stacks, row: Any, drow: Any, _: Any
) -> tuple[Stacks, Array]:
    """Only the norm."""
    return stacks, squares(_whole_gradient(parts[key], i, stacks, drow))


def _updating(
    parts: Parts,
    clip_layer: float | None,
    key: Key,
    i: Any,
    stacks: Stacks,
    row: Any,
    drow: Any,
    update: Update,
) -> tuple[Stacks, Array]:
    """Update a layer where all of its gradient is finite."""
    part = parts[key]
    grads = _whole_gradient(part, i, stacks, drow)
    square = squares(grads)
    if clip_layer is not None:
        update = dataclasses.replace(update, scale=_scale(jnp.sqrt(square), clip_layer))
    update = dataclasses.replace(update, ok=update.ok & jnp.isfinite(square))
    state = fetch(stacks.state, i, stacked=part.stacked)
    moved, own, _ = part.update(part.pick(row), state, grads, update)
    if stacks.new is None:
        params = part.stored(stacks.params, moved, i)
        state = store(stacks.state, own, i, stacked=part.stacked)
        return dataclasses.replace(stacks, params=params, state=state), square
    new = store(stacks.new, (moved, own), i, stacked=part.stacked)
    return dataclasses.replace(stacks, new=new), square


def _whole_gradient(part: Part, i: Any, stacks: Stacks, drow: Any) -> list[Array]:
    """A layer's gradient, with those of earlier microbatches."""
    grads = part.gradients(part.pick(drow))
    if stacks.grads is None:
        return grads
    sums = fetch(stacks.grads, i, stacked=part.stacked)
    return [s.astype(g.dtype) + g for s, g in zip(sums, grads, strict=True)]


def _known_norm(job: _Job, stacks: dict[Key, Stacks], shared: list[Array]) -> Any:
    """All gradients are kept until their norm is known."""
    stacks, rest, found = job.gathered(stacks)
    found = dataclasses.replace(found, norm=jnp.sqrt(found.norm + squares(rest)))
    scale, ok = job.scale(found)
    return stacks, rest, found, scale, ok


def _at_once(job: _Job, stacks: dict[Key, Stacks], shared: list[Array]) -> Any:
    """One pass, each layer updated with its gradient as it is, or scaled by its own norm."""
    stacks, before = job.before_last(stacks)
    most = job.all.clip_norm
    visit = functools.partial(_updating, job.all.parts, most)
    sound = jnp.bool(True)
    if before is not None:
        sound = jnp.isfinite(before[1].loss) & jnp.isfinite(before[1].norm)
    update = Update(shared=shared, scale=None, ok=sound)
    moving, fixed = _divided(stacks, "params", "state")
    stacks, rest, found = job.on_last(visit, moving, fixed, update, before)
    ok = jnp.isfinite(found.loss) & jnp.isfinite(found.norm)
    scale = None if most is None else _scale(jnp.sqrt(squares(rest)), most)
    return stacks, rest, found, scale, ok


def _two_passes(job: _Job, stacks: dict[Key, Stacks], shared: list[Array]) -> Any:
    """One backward pass for the norm, and one that updates."""
    stacks, before = job.before_last(stacks)
    both = _Pass(job, *_divided(stacks, "params", "state"), *job.last)
    measure = functools.partial(_measuring, job.all.parts)
    _, _, found = _with_earlier(*both.backward(measure, None, changing=()), before)
    scale, ok = job.scale(found)
    visit = functools.partial(_updating, job.all.parts, None)
    update = Update(shared=shared, scale=scale, ok=ok)
    stacks, rest, found = _with_earlier(*both.backward(visit, update), before)
    return stacks, rest, found, scale, ok


def _speculating(job: _Job, stacks: dict[Key, Stacks], shared: list[Array]) -> Any:
    """One pass into a second copy; a second one from the first copy if gradients must be scaled."""
    stacks, before = job.before_last(stacks)
    visit = functools.partial(_updating, job.all.parts, None)
    parts = job.all.parts

    def once(new: dict[Key, Stacks], scale: Array, ok: Array) -> Any:
        update = Update(shared=shared, scale=scale, ok=ok)
        return job.on_last(visit, new, stacks, update, before)

    start = {key: Stacks(new=part.copies(stacks[key])) for key, part in parts.items()}
    shapes = jax.eval_shape(lambda: once(start, jnp.float32(1), jnp.bool(True))[1:])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(loop: Any) -> Any:
        turn, new, _, scale, ok = loop
        new, rest, found = once(new, scale, ok)
        scale, ok = job.scale(found)
        return turn + 1, new, (rest, found), scale, ok

    def again(loop: Any) -> Array:
        turn, _, _, scale, ok = loop
        return (turn == 0) | ((turn == 1) & ((scale < 1) | ~ok))

    first = (jnp.int32(0), start, zeros, jnp.float32(1), jnp.bool(True))
    _, new, (rest, found), scale, ok = jax.lax.while_loop(again, body, first)
    changed = {key: Stacks(params=each.new[0], state=each.new[1]) for key, each in new.items()}
    return changed, rest, found, scale, ok


def _divided(
    stacks: dict[Key, Stacks], *moving: str
) -> tuple[dict[Key, Stacks], dict[Key, Stacks]]:
    """The stacks with these fields, and with the others."""
    names = [field.name for field in dataclasses.fields(Stacks)]

    def only(chosen: Sequence[str]) -> dict[Key, Stacks]:
        return {
            key: Stacks(**{name: getattr(each, name) for name in chosen})
            for key, each in stacks.items()
        }

    return only(moving), only([name for name in names if name not in moving])


_HOW: dict[str, Callable] = {
    "none": _at_once,
    "layer": _at_once,
    "stack": _known_norm,
    "two_pass": _two_passes,
    "speculate": _speculating,
}
"""By `OffloadConfig.clipping`."""
