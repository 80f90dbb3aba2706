"""What forward passes keep for backward: a ring on the devices, or one in host memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.layerwise import kept_sharding
from colossax.offload import new_stack, store, to_device
from colossax.step.stages import rings
from colossax.step.stages.forward import Stages

_STAGE = MeshAxis.STAGE.value


class Kept:
    """Rings `[slots, stages, layers, ...]` of what a stage's layers keep, a list of them.

    Cost: of what is in host memory a device holds what one pass keeps, on its way there, and what
    one takes back; both cross the bus once a pass. Room for all slots is taken there.
    """

    def __init__(self, stages: Stages, bound: BoundPlan, slots: int):
        """Find where each lies; nothing is made.

        Args:
            stages: The loss, cut.
            bound: Plan and devices.
            slots: Of a ring.
        """
        self._travel, self._bound, self._slots = stages.travel, bound, slots
        self._carries, self._lead = stages.layers.carries, (stages.count,)
        self._shapes = stages.kept_shapes()[0]
        self._specs = [
            self._spec(x, carry) if host and jnp.issubdtype(x.dtype, jnp.floating) else None
            for x, carry, host in zip(self._shapes, self._carries, stages.layers.hosts, strict=True)
        ]

    def _spec(self, x: Any, carry: bool) -> PartitionSpec:
        """Of what the stages keep in a pass, `[stages, layers, ...]`."""
        spec = self._travel.spec_of(x.shape[1:], x.dtype) if carry else None
        if spec is None:
            where = kept_sharding(jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
            spec = PartitionSpec() if where is None else where.spec
        return PartitionSpec(_STAGE, None, *spec)

    def start(self) -> list[Array]:
        """Rings in which nothing was put: zeros; what is undefined, in host memory."""
        out = []
        for x, spec in zip(self._shapes, self._specs, strict=True):
            if spec is None:
                out.append(rings.empty(x, self._slots, lead=self._lead))
            else:
                row = jax.ShapeDtypeStruct((*self._lead, *x.shape), x.dtype)
                where = NamedSharding(self._bound.mesh, spec)
                out.append(new_stack(self._slots, row, host=True, sharding=where))
        return self.laid_out(out)

    def put(self, ring: Sequence[Array], tick: Array, values: Sequence[Array]) -> list[Array]:
        """With what the stages keep of this tick."""
        out = []
        for x, value, spec in zip(ring, values, self._specs, strict=True):
            if spec is None:
                out.append(rings.put(x, tick, value))
            else:
                where = NamedSharding(self._bound.mesh, spec)
                value = jax.lax.with_sharding_constraint(value, where)
                out.append(store(x, value, tick % self._slots))
        return self.laid_out(out)

    def of(self, ring: Sequence[Array], ticks: Array) -> list[Array]:
        """Of each stage what it put there in a tick of its own, on the devices.

        Args:
            ring: As `laid_out` gave it.
            ticks: `[stages]`.
        """
        pairs = zip(ring, self._specs, strict=True)
        return [
            rings.slots(x, ticks) if spec is None else self._fetched(x, ticks, spec)
            for x, spec in pairs
        ]

    def readable(self, ring: Sequence[Array], ticks: Array) -> tuple[list[Array], list[Array]]:
        """What `layer` reads: rings on the devices; of those in host memory, `of`.

        Args:
            ring: As `laid_out` gave it.
            ticks: `[stages]`.
        """
        pairs = list(zip(ring, self._specs, strict=True))
        here = [x for x, spec in pairs if spec is None]
        return here, [self._fetched(x, ticks, spec) for x, spec in pairs if spec is not None]

    def layer(
        self, here: Sequence[Array], fetched: Sequence[Array], tick: Array, number: Array
    ) -> list[Array]:
        """Of one stage, where stages are mapped over: what it kept of one layer in a tick.

        Args:
            here: Rings on the devices, `[slots, layers, ...]`.
            fetched: What is in host memory, `[layers, ...]`.
            tick: That of the forward pass.
            number: Of the layer.
        """
        held = rings.layer(list(here), tick, number)
        pairs = zip(self._carries, self._specs, strict=True)
        laid = iter(self._travel.kept_layer(held, [carry for carry, spec in pairs if spec is None]))
        others = iter(rings.slot(list(fetched), number))
        return [next(laid if spec is None else others) for spec in self._specs]

    def _fetched(self, ring: Array, ticks: Array, spec: PartitionSpec) -> Array:
        # In a region: each device copies the slot of its stage, of its part alone.
        return jax.shard_map(
            lambda x, at: to_device(jax.lax.dynamic_index_in_dim(x, at[0], 0, keepdims=False)),
            mesh=self._bound.mesh,
            in_specs=(PartitionSpec(None, *spec), PartitionSpec(_STAGE)),
            out_specs=spec,
            check_vma=False,
        )(ring, ticks % self._slots)

    def laid_out(self, ring: Sequence[Array]) -> list[Array]:
        """What is on the devices in the order in memory in which it is read."""
        here = [spec is None for spec in self._specs]
        on_devices = [x for x, device in zip(ring, here, strict=True) if device]
        carries = [carry for carry, device in zip(self._carries, here, strict=True) if device]
        laid = iter(self._travel.kept(on_devices, carries))
        return [next(laid) if device else x for x, device in zip(ring, here, strict=True)]
