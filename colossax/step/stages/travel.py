"""What goes from stage to stage, and how it lies on the devices."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.sharding import activation_sharding
from colossax.sharding.row_major import row_major
from colossax.step.stages.rings import empty

STAGE = MeshAxis.STAGE.value


def stream_spec(bound: BoundPlan, x: Any) -> PartitionSpec:
    """How a part of a stack's carry lies: as the residual stream between blocks; else the batch
    first, of rows that devices do not share alone."""
    for dims in (("batch", "seq:residual", "embed"), ("batch", "seq"), ("batch", None)):
        if len(dims) > x.ndim:
            continue
        named = (*dims, *[None] * (x.ndim - len(dims)))
        try:
            return activation_sharding(bound, named, x.shape).spec
        except PlanError:
            continue
    return PartitionSpec(*[None] * x.ndim)


class Travel:
    """The carry of a layer stack on its way, `[stages, ...]`.

    Attributes:
        shapes: Of one stage's.
    """

    def __init__(self, bound: BoundPlan, shapes: Any):
        """Bind.

        Args:
            bound: Plan and devices.
            shapes: Of the carry.
        """
        self.shapes = shapes
        self._bound = bound
        self._specs = jax.tree.map(lambda x: stream_spec(bound, x), shapes)

    def _laid(self, tree: Any, *lead: Any) -> Any:
        mesh = self._bound.mesh

        def one(x: Array, spec: PartitionSpec) -> Array:
            sharding = NamedSharding(mesh, PartitionSpec(*lead, *spec))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(one, tree, self._specs)

    def laid_out(self, tree: Any) -> Any:
        """`[stages, ...]`, each stage's on its devices."""
        return self._laid(tree, STAGE)

    def rings(self, slots: Sequence[int], stages: int) -> tuple[Any, ...]:
        """Empty ones of so many slots, `[slots, stages, ...]`, likewise."""
        return tuple(
            self._laid(empty(self.shapes, count, lead=(stages,)), None, STAGE) for count in slots
        )

    def kept(self, ring: Any, carries: Sequence[bool]) -> Any:
        """What layers keep, `[slots, stages, layers, ...]`: inputs of layers lie as they travel."""
        return self._row_major(ring, carries, None, STAGE, None)

    def kept_layer(self, held: Any, carries: Sequence[bool]) -> Any:
        """Of one layer and stage, read out of there: likewise."""
        return self._row_major(held, carries)

    def _row_major(self, arrays: Any, carries: Sequence[bool], *lead: Any) -> Any:
        """Inputs of layers as they travel, what else is kept as it is.

        Row by row in memory too, said in a region of its own: left to choose, the compiler lays
        them out one way while the pipeline fills and another way then, and holds both.

        Args:
            arrays: List of arrays.
            carries: Of each, whether it is (a part of) a layer's input.
            lead: Mesh axes of their first dims.
        """
        out = []
        for x, carry in zip(arrays, carries, strict=True):
            spec = self.spec_of(x.shape[len(lead) :], x.dtype) if carry else None
            if spec is not None:
                x = row_major(self._bound, PartitionSpec(*lead, *spec), x)
            out.append(x)
        return type(arrays)(out)

    def spec_of(self, shape: tuple[int, ...], dtype: Any) -> PartitionSpec | None:
        """How what travels in this form lies; None where nothing does."""
        forms = {(x.shape, x.dtype): spec for x, spec in self._leaves()}
        return forms.get((shape, dtype))

    def _leaves(self) -> Iterable[tuple[Any, PartitionSpec]]:
        return zip(jax.tree.leaves(self.shapes), jax.tree.leaves(self._specs), strict=True)

    def rolled(self, tree: Any, by: int) -> Any:
        """Each stage's sent on by so many stages, 1, -1 or 0: a collective permute, or nothing."""
        if not by:
            return self.laid_out(tree)
        return self.laid_out(jax.tree.map(lambda x: jnp.roll(x, by, axis=0), tree))

    def of_stage(self, tree: Any, number: int) -> Any:
        """One stage's, whole along `stage`: sent to all others.

        A broadcast sends its bytes once, a sum in which those of the others are 0 sends them
        `2 (n - 1) / n` times. But XLA does not tell how long a broadcast takes, and puts less of
        all else that a program sends beside what it computes (tests/aot/test_overlap.py): so it is
        a sum where other axes send too, and where JAX has no broadcast, which is on CPUs.
        """

        alone = self._bound.mesh.size == self._bound.mesh.shape[STAGE]

        def one(x: Array, spec: PartitionSpec) -> Array:
            return jax.shard_map(
                lambda x: (_broadcast if alone else _summed)(x[0], number),
                mesh=self._bound.mesh,
                in_specs=PartitionSpec(STAGE, *spec),
                out_specs=spec,
                check_vma=False,
            )(x)

        return jax.tree.map(one, tree, self._specs)


def _broadcast(x: Array, number: int) -> Array:
    return jax.lax.platform_dependent(
        x,
        cuda=lambda x: jax.lax.pbroadcast(x, (STAGE,), number),
        default=lambda x: _summed(x, number),
    )


def _summed(x: Array, number: int) -> Array:
    mine = jax.lax.axis_index(STAGE) == number
    return jax.lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), STAGE)
