"""How chunks of a stage get weights and give gradients: for each microbatch, or once a step."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from colossax.config import BoundPlan
from colossax.sharding import batch_axes, param_sharding
from colossax.step.gradients.shards import Shards
from colossax.step.gradients.sums import accumulable
from colossax.step.microbatches import Microbatches
from colossax.step.programs.numbered import Leaves, Numbered
from colossax.step.stages.gathered import gathered_params, whole
from colossax.step.stages.travel import stream_spec
from colossax.typing import ParamInfo


class Weights:
    """How the chunks of a stage get weights and give gradients.

    Attributes:
        here: The plan on the stage's devices.
        inside: That under which its chunks are computed.
        shards: The devices along the batch, where each adds up gradients of its own rows; all that
            goes from chunk to chunk has a dim of them in front. None: gradients are reduced for
            each microbatch.
    """

    def __init__(self, here: BoundPlan, *, differentiates: bool = True):
        """Read the plan.

        Args:
            here: The plan on the stage's devices.
            differentiates: Whether there are gradients.
        """
        self.here, self.inside = here, here
        self.shards: Shards | None = None
        if differentiates and here.plan.batch.reduce_once and batch_axes(here):
            self.shards = Shards(here)
            self.inside = self.shards.inside
        self.gathers = here.plan.pipeline.gather == "step"
        if self.gathers:
            self.inside = whole(self.inside)

    def gathered(self, infos: Any, leaves: Leaves) -> Leaves:
        """Parameters as chunks get them, gathered now if they are once a step.

        Args:
            infos: Theirs.
            leaves: As they are kept.

        Cost: each is sent once; of what is gathered a device holds the bytes whole along the
        axes that split tokens, until the step ends.
        """
        if not self.gathers:
            return leaves
        return gathered_params(self.here, leaves, {at: infos[at] for at in leaves})

    def shapes(self, numbered: Numbered) -> Numbered:
        """All parameters, as chunks get them."""
        infos, leaves = dict(enumerate(numbered.infos)), dict(enumerate(numbered.shapes))
        found = jax.eval_shape(functools.partial(self.gathered, infos), leaves)
        return dataclasses.replace(numbered, shapes=[found[at] for at in leaves])

    def cut(self, micro: Microbatches) -> tuple[Any, Any]:
        """Arrays and keys of the microbatches, `[microbatches, shards, rows, ...]`."""
        if self.shards is None:
            return micro.arrays, micro.keys
        return self.shards.cut(micro), jax.vmap(self.shards.keys)(micro.keys)

    def spread(self, infos: Any, leaves: Leaves) -> Leaves:
        """Parameters as `each` wants them: of every device its own, which are no copies.

        Args:
            infos: Theirs.
            leaves: As chunks get them.
        """
        if self.shards is None:
            return leaves
        places = self.places(infos, leaves)
        return {at: _repeated(x, places[at], self.shards.count) for at, x in leaves.items()}

    def places(self, infos: Any, numbers: Iterable[int]) -> dict[int, int]:
        """Of the dim of devices in parameters: behind that of layers.

        A loop over layers wants theirs in front, and what it turned round would be kept for
        backward, a whole stack for each microbatch that waits.
        """
        return {at: int(infos[at].dims[:1] == ("layers",)) for at in numbers}

    def each(self, fn: Callable, in_axes: Any = 0) -> Callable:
        """`fn` of one device along the batch made one of all.

        Args:
            fn: It knows nothing of the others.
            in_axes: Where its arguments have the dim of devices.
        """
        if self.shards is None:
            return fn
        return jax.vmap(fn, in_axes=in_axes, spmd_axis_name=self.shards.axes)

    def of_one(self, shapes: Any, axis: int = 0) -> Any:
        """Shapes of one device's, of those that have a dim of devices."""
        if self.shards is None:
            return shapes

        def one(x: Any) -> Any:
            return jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)

        return jax.tree.map(one, shapes)

    def laid_out(self, tree: Any) -> Any:
        """What goes from chunk to chunk, as it lies on the stage's devices."""

        def one(x: Any, spec: PartitionSpec) -> Any:
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.here.mesh, spec))

        return jax.tree.map(one, tree, self.specs(tree))

    def specs(self, tree: Any) -> Any:
        """How what goes from chunk to chunk is split."""

        def one(x: Any) -> PartitionSpec:
            if self.shards is None:
                return stream_spec(self.inside, x)
            spec = stream_spec(self.inside, jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
            return PartitionSpec(self.shards.axes, *spec)

        return jax.tree.map(one, tree)

    def gradient_spec(self, info: ParamInfo) -> PartitionSpec:
        """How a gradient lies while it is added up."""
        if self.shards is None:
            return param_sharding(self.here, "gradients", info).spec
        return PartitionSpec(self.shards.axes, *param_sharding(self.here, "weights", info).spec)

    def accumulable(self, infos: Any, grads: Leaves) -> Leaves:
        """Gradients in the dtype and the layout in which they are added up.

        Args:
            infos: Of the parameters.
            grads: With the dim of devices where `spread` puts it; the result has it in front.
        """
        if self.shards is None:
            return accumulable(self.here, infos, grads)
        places = self.places(infos, grads)
        grads = {at: jnp.moveaxis(x, places[at], 0) for at, x in grads.items()}
        wide = accumulable(self.here, infos, grads, constrain=False)
        return self.shards.unreduced(wide, infos)

    def reduced(self, infos: Any, grads: Mapping[int, Sequence[Any]]) -> Leaves:
        """Gradients as the plan wants them: of each parameter those of all chunks, added up.

        Cost: each is sent once.
        """
        assert self.shards is not None
        found = {at: functools.reduce(jnp.add, each) for at, each in grads.items()}
        return self.shards.reduced(found, {at: infos[at] for at in found})


def _repeated(x: Any, place: int, count: int) -> Any:
    wide = jnp.expand_dims(x, place)
    return jnp.broadcast_to(wide, (*x.shape[:place], count, *x.shape[place:]))
