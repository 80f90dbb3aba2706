"""Passes over a global batch that visit each layer in backward, and how the norm clips them.

A visit is what is done with a layer's gradient there: it is kept, measured, or updates the layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.layerwise import Key, Stacks, Stream, added, nothing, running
from colossax.offload import fetch, store
from colossax.step.gradients.accumulate import objective
from colossax.step.gradients.method import Gradients, clipped
from colossax.step.microbatches import Microbatches
from colossax.step.offloaded.parameter_groups import Part, Update
from colossax.typing import Batch

if TYPE_CHECKING:
    from colossax.step.offloaded.streaming import Streaming

Parts = dict[Key, Part]


class Job:
    """A global batch and the passes over it.

    What a pass gives has in `grads` a list, of what is in no layer stack, and until the last pass
    has ended a `square_norm` of the layers alone.
    """

    def __init__(self, streaming: "Streaming", params: Any, variables: Any, micro: Microbatches):
        self.streaming = streaming
        self.params = params
        self.leaves = jax.tree.leaves(params)
        self.variables = variables
        self.micro = micro

    def gathered(
        self, stacks: dict[Key, Stacks], count: int | None = None
    ) -> tuple[dict[Key, Stacks], Gradients]:
        """Gradients of this many microbatches (default: all) summed into stacks of their own."""
        summed = self.micro.count > 1
        start = {
            key: Stacks(grads=part.gradient_stacks(summed=summed))
            for key, part in self.streaming.parts.items()
        }
        fixed = {key: Stacks(params=each.params) for key, each in stacks.items()}
        visit = functools.partial(_summing, self.streaming.parts)
        if not summed:
            changed, gradients = _Pass(self, start, fixed, *self.micro.first).backward(visit, None)
        else:
            changed, gradients = self._summed(visit, start, fixed, count or self.micro.count)
        return {key: _merged(stacks[key], changed[key]) for key in stacks}, gradients

    def _summed(
        self, visit: Callable, start: dict[Key, Stacks], fixed: dict[Key, Stacks], count: int
    ) -> tuple[dict[Key, Stacks], Gradients]:
        def one(stacks: dict[Key, Stacks], number: Any, microbatch: Batch, key: Array) -> Any:
            return _Pass(self, stacks, fixed, microbatch, key).backward(visit, number > 0)

        def body(loop: Any, xs: Any) -> Any:
            stacks, before = loop
            stacks, gradients = one(stacks, *xs)
            return (stacks, _added(before, gradients)), None

        arrays, keys = jax.tree.map(lambda x: x[:count], (self.micro.arrays, self.micro.keys))
        shapes = jax.eval_shape(lambda: one(start, jnp.int32(0), *self.micro.first)[1])
        zeros = nothing(shapes)
        xs = (jnp.arange(count, dtype=jnp.int32), arrays, keys)
        return jax.lax.scan(body, (start, zeros), xs)[0]

    def before_last(self, stacks: dict[Key, Stacks]) -> tuple[dict[Key, Stacks], Gradients | None]:
        """The stacks with gradients of all microbatches but the last, and what is in no stack.

        None for the latter where there is one microbatch.
        """
        if self.micro.count == 1:
            return stacks, None
        return self.gathered(stacks, self.micro.count - 1)

    def on_last(
        self,
        visit: Callable,
        moving: dict[Key, Stacks],
        fixed: dict[Key, Stacks],
        scalars: Any,
        before: Gradients | None,
    ) -> tuple[dict[Key, Stacks], Gradients]:
        """A pass over the last microbatch, after what `before_last` found."""
        stacks, gradients = _Pass(self, moving, fixed, *self.micro.last).backward(visit, scalars)
        return stacks, _total(self, before, gradients)

    def scale(self, gradients: Gradients) -> tuple[Any, Array]:
        """What gradients of this norm are multiplied by, if at all, and whether all is finite."""
        return _scaling(self.streaming, gradients)


class _Pass:
    """A forward pass over a microbatch, and backward passes after it.

    Cost: where the loss calls a stack inside a transformation of its own, each backward pass runs
    forward anew: JAX traces once what is in there.
    """

    def __init__(
        self,
        job: Job,
        moving: dict[Key, Stacks],
        fixed: dict[Key, Stacks],
        microbatch: Batch,
        key: Array,
    ):
        """Run nothing yet.

        Args:
            job: Of which the microbatch is a part.
            moving: The stacks that any backward pass changes.
            fixed: The others; the parameters, where none changes them.
            microbatch: Its arrays.
            key: Its random key.
        """
        self._job = job
        self._moving, self._fixed = moving, fixed
        self._microbatch, self._key = microbatch, key
        self._stream: Stream | None = None

    def backward(
        self, visit: Callable, scalars: Any, *, changing: tuple[str, ...] | None = None
    ) -> tuple[dict[Key, Stacks], Gradients]:
        """One backward pass.

        Args:
            visit: What to do with a layer's gradient.
            scalars: For `visit`.
            changing: Fields of the moving stacks that it changes; None: all.

        Returns:
            The moving stacks, changed, and the gradients of what is in no layer stack; their
            `square_norm` is that of the layers.
        """
        changing = _names(self._moving) if changing is None else changing
        stream = self._stream
        if stream is None or stream.inside:
            stream = self._stream = self._forward(visit, scalars, changing)
        stream.visit, stream.scalars, stream.changing = visit, scalars, changing
        changed, tap, rest = stream.transposed(self._vjp, jnp.ones_like(self._loss))
        # A stack called in a loop would have been changed as often as the loop turned.
        loss = jnp.where(tap[1] == len(self._moving), self._loss, jnp.nan)
        rest = self._job.streaming.rest.gradients(rest)
        totals, sums = self._sums
        gradients = Gradients(grads=rest, loss=loss, totals=totals, sums=sums, square_norm=tap[0])
        return changed, gradients

    def _forward(self, visit: Callable, scalars: Any, changing: tuple[str, ...]) -> Stream:
        job = self._job
        made: list[Stream] = []
        rest = [job.leaves[i] for i in job.streaming.rest.trained]

        def value(moving: dict[Key, Stacks], tap: Array, rest: list[Array]) -> Any:
            stacks = {name: _merged(moving[name], self._fixed[name]) for name in moving}
            stream = Stream(stacks=stacks, changing=changing, tap=tap, scalars=scalars, visit=visit)
            made.append(stream)
            with running(stream):
                params = job.streaming.params(job.leaves, stacks, rest)
                result = job.streaming.call(params, self._microbatch, job.variables, self._key)
            stream.check()
            loss, sums = objective(*result, job.micro.weighing)
            # Layers are updated before anything else can tell that they should not be.
            sound = jnp.isfinite(jax.lax.stop_gradient(loss))
            return loss * jnp.where(sound, 1.0, jnp.nan), sums

        self._loss, self._vjp, self._sums = jax.vjp(
            value, self._moving, jnp.zeros(2), rest, has_aux=True
        )
        return made[-1]


def _names(stacks: dict[Key, Stacks]) -> tuple[str, ...]:
    """Fields that these have."""
    first = next(iter(stacks.values()))
    names = [field.name for field in dataclasses.fields(Stacks)]
    return tuple(name for name in names if getattr(first, name) is not None)


def _added(before: Gradients, last: Gradients) -> Gradients:
    """Of both; the layers' norm is of the sum so far already, not one to be added."""
    both = added(before, last)
    return dataclasses.replace(both, square_norm=last.square_norm)


def _total(job: Job, before: Gradients | None, last: Gradients) -> Gradients:
    """Of all microbatches, the last one's after the others', with the norm of all gradients."""
    total = last if before is None else _added(before, last)
    return dataclasses.replace(
        total,
        square_norm=total.square_norm + job.streaming.rest.squares(total.grads),
        loss_scale=job.micro.weighing.loss_scale,
    )


def _merged(one: Stacks, other: Stacks) -> Stacks:
    """Fields of the first where it has them, else of the other."""
    names = [field.name for field in dataclasses.fields(Stacks)]
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return Stacks(**{name: b if a is None else a for name, (a, b) in pairs.items()})


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
    return dataclasses.replace(stacks, grads=stored), part.squares(grads)


def _measuring(
    parts: Parts, key: Key, i: Any, stacks: Stacks, row: Any, drow: Any, _: Any
) -> tuple[Stacks, Array]:
    """Only the norm."""
    part = parts[key]
    return stacks, part.squares(_total_gradient(part, i, stacks, drow))


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
    grads = _total_gradient(part, i, stacks, drow)
    square = part.squares(grads)
    if clip_layer is not None:
        update = dataclasses.replace(update, scale=clipped(jnp.sqrt(square), clip_layer))
    update = dataclasses.replace(update, ok=update.ok & jnp.isfinite(square))
    state = fetch(stacks.state, i, stacked=part.stacked)
    moved, new_state, _ = part.update(part.pick(row), state, grads, update, i)
    if stacks.new is None:
        params = part.stored(stacks.params, moved, i)
        state = store(stacks.state, new_state, i, stacked=part.stacked)
        return dataclasses.replace(stacks, params=params, state=state), square
    new = store(stacks.new, (moved, new_state), i, stacked=part.stacked)
    return dataclasses.replace(stacks, new=new), square


def _total_gradient(part: Part, i: Any, stacks: Stacks, drow: Any) -> list[Array]:
    """A layer's gradient, with those of earlier microbatches."""
    grads = part.gradients(part.pick(drow))
    if stacks.grads is None:
        return grads
    sums = fetch(stacks.grads, i, stacked=part.stacked)
    return [s.astype(g.dtype) + g for s, g in zip(sums, grads, strict=True)]


def gathered(job: Job, stacks: dict[Key, Stacks]) -> tuple[dict[Key, Stacks], Gradients]:
    """The stacks with all gradients of their layers, and the others."""
    stacks, gradients = job.gathered(stacks)
    return stacks, _total(job, None, gradients)


def known_norm(job: Job, stacks: dict[Key, Stacks], plain: Update) -> Any:
    """All gradients are kept until their norm is known."""
    stacks, gradients = gathered(job, stacks)
    return stacks, gradients, *job.scale(gradients)


def known_gradients(job: Job, stacks: dict[Key, Stacks], plain: Update) -> Any:
    """All gradients are there, made by a method of their own."""
    assert job.streaming.method is not None
    gradients = job.streaming.method(job.params, job.variables, job.micro)
    return given_gradients(job.streaming, stacks, gradients)


def given_gradients(streaming: "Streaming", stacks: dict[Key, Stacks], gradients: Gradients) -> Any:
    """All gradients are there.

    Args:
        streaming: Whose parameters they are of.
        stacks: Of its layers, without gradients.
        gradients: In their tree or in a list, None for what does not learn.
    """
    leaves = jax.tree.leaves(gradients.grads, is_leaf=lambda leaf: leaf is None)
    stacks = {
        key: dataclasses.replace(stacks[key], grads=[leaves[i] for i in part.trained])
        for key, part in streaming.parts.items()
    }
    rest = [leaves[i] for i in streaming.rest.trained]
    return stacks, dataclasses.replace(gradients, grads=rest), *_scaling(streaming, gradients)


def _scaling(streaming: "Streaming", gradients: Gradients) -> tuple[Any, Array]:
    return gradients.factor(streaming.clip_norm), gradients.finite


def _at_once(job: Job, stacks: dict[Key, Stacks], plain: Update) -> Any:
    """One pass, each layer updated with its gradient as it is, or scaled by its own norm."""
    stacks, before = job.before_last(stacks)
    max_norm = job.streaming.clip_norm
    visit = functools.partial(_updating, job.streaming.parts, max_norm)
    sound = jnp.bool(True)
    if before is not None:
        sound = jnp.isfinite(before.loss) & jnp.isfinite(before.square_norm)
    update = dataclasses.replace(plain, ok=sound)
    moving, fixed = _divided(stacks, "params", "state")
    stacks, gradients = job.on_last(visit, moving, fixed, update, before)
    scale = clipped(jnp.sqrt(job.streaming.rest.squares(gradients.grads)), max_norm)
    return stacks, gradients, scale, gradients.finite


def _two_passes(job: Job, stacks: dict[Key, Stacks], plain: Update) -> Any:
    """One backward pass for the norm, and one that updates."""
    stacks, before = job.before_last(stacks)
    both = _Pass(job, *_divided(stacks, "params", "state"), *job.micro.last)
    measure = functools.partial(_measuring, job.streaming.parts)
    _, gradients = both.backward(measure, None, changing=())
    scale, ok = job.scale(_total(job, before, gradients))
    visit = functools.partial(_updating, job.streaming.parts, None)
    update = dataclasses.replace(plain, scale=scale, ok=ok)
    stacks, gradients = both.backward(visit, update)
    return stacks, _total(job, before, gradients), scale, ok


def _speculating(job: Job, stacks: dict[Key, Stacks], plain: Update) -> Any:
    """One pass into a second copy; a second one from the first copy if gradients must be scaled."""
    stacks, before = job.before_last(stacks)
    visit = functools.partial(_updating, job.streaming.parts, None)
    parts = job.streaming.parts

    def once(new: dict[Key, Stacks], scale: Array, ok: Array) -> Any:
        update = dataclasses.replace(plain, scale=scale, ok=ok)
        return job.on_last(visit, new, stacks, update, before)

    start = {key: Stacks(new=part.copies(stacks[key])) for key, part in parts.items()}
    shapes = jax.eval_shape(lambda: once(start, jnp.float32(1), jnp.bool(True))[1])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(loop: Any) -> Any:
        turn, new, _, scale, ok = loop
        new, gradients = once(new, scale, ok)
        return turn + 1, new, gradients, *job.scale(gradients)

    loss_scale = job.micro.weighing.loss_scale
    unclipped = jnp.float32(1) if loss_scale is None else 1.0 / loss_scale

    def again(loop: Any) -> Array:
        turn, _, _, scale, ok = loop
        return (turn == 0) | ((turn == 1) & ((scale < unclipped) | ~ok))

    first = (jnp.int32(0), start, zeros, unclipped, jnp.bool(True))
    _, new, gradients, scale, ok = jax.lax.while_loop(again, body, first)
    changed = {key: Stacks(params=each.new[0], state=each.new[1]) for key, each in new.items()}
    return changed, gradients, scale, ok


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


HOW: dict[str, Callable] = {
    "none": _at_once,
    "layer": _at_once,
    "stack": known_norm,
    "known": known_gradients,
    "two_pass": _two_passes,
    "speculate": _speculating,
}
"""By `OffloadConfig.clipping`."""
