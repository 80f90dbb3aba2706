"""A mesh in parts, each with parameters of its own: the same memory where they lie alike."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.nn import ModelSpec
from colossax.sharding import param_sharding
from colossax.typing import Params


def replicas_of(bound: BoundPlan) -> list[BoundPlan]:
    """The devices of each place along `data`.

    Of a mesh that several processes share there is one, whose steps all of them run alike: nobody
    can wait for devices of another.
    """
    count = bound.mesh.shape[MeshAxis.DATA]
    if count == 1 or len(bound.mesh.local_devices) < bound.mesh.size:
        return [bound]
    return [bound.part(MeshAxis.DATA, number) for number in range(count)]


def params_on(spec: ModelSpec, bound: BoundPlan, params: Params) -> Params:
    """Parameters of a larger mesh as a part of it has them; shapes with shardings do.

    Cost: none for arrays of which the part's devices hold what they need; others are copied.
    """

    def one(info: Any, x: Any) -> Any:
        return array_on(x, param_sharding(bound, "params", info))

    return jax.tree.map(one, spec.infos, params)


def array_on(x: Any, sharding: NamedSharding) -> Any:
    """An array on these devices: the same memory where they have it, else a copy."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if not isinstance(x, jax.Array) or x.sharding.memory_kind != sharding.memory_kind:
        return jax.device_put(x, sharding)
    wanted = sharding.devices_indices_map(x.shape)
    there = {s.device: s.data for s in x.addressable_shards if wanted.get(s.device) == s.index}
    if len(there) < len(wanted):
        return jax.device_put(x, sharding)
    return jax.make_array_from_single_device_arrays(
        x.shape, sharding, list(there.values()), dtype=x.dtype
    )


def check_served(spec: ModelSpec, bound: BoundPlan) -> None:
    """Refuse meshes that an engine does not run on.

    Raises:
        PlanError: There are stages.
    """
    stages = bound.mesh.shape[MeshAxis.STAGE]
    if stages > 1:
        raise PlanError(
            f"mesh axis 'stage': an engine runs all layers in one program, and the plan has"
            f" {stages} stages; use make_engine (LoadedModel.engine), which gives each its own"
        )
