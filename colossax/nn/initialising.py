"""A model's parameters, drawn: by one program, or one per stage."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.nn.module import ModelSpec, pure
from colossax.nn.rngs import fresh_rngs
from colossax.nn.stack.kinds import counting_layers
from colossax.sharding import param_sharding, use, validate, without_shards
from colossax.sharding.rules import home_stage
from colossax.typing import ParamInfo, Params


def initialise(
    spec: ModelSpec,
    bound: BoundPlan,
    key: Array,
    *,
    only: Callable[[ParamInfo], bool] | None = None,
) -> Params:
    """Fresh parameters, each made where it lives: no device holds a whole sharded one.

    The values do not depend on the mesh.

    Args:
        spec: The model.
        bound: Plan and devices.
        key: A random key.
        only: Which to make, None in place of the others; default all.

    Raises:
        PlanError: A parameter does not fit the plan.
    """
    validate(bound, spec.infos)
    if bound.stage_programs:
        return _initialised_by_stage(spec, bound, key, only)
    made = jax.tree.map(lambda info: only is None or only(info), spec.infos)
    shardings = jax.tree.map(
        lambda info, make: param_sharding(bound, "params", info) if make else None, spec.infos, made
    )
    dtype = bound.plan.precision.params

    def init(key: Array) -> Params:
        with use(bound), nnx.use_eager_sharding(False), counting_layers():
            model = spec.make_model(fresh_rngs(key))
        return jax.tree.map(
            lambda leaf, info, make: leaf.astype(info.at_rest(dtype)) if make else None,
            pure(model),
            spec.infos,
            made,
        )

    return jax.jit(init, out_shardings=shardings, compiler_options=_quick_compile(bound))(key)


def _initialised_by_stage(
    spec: ModelSpec, bound: BoundPlan, key: Array, only: Callable[[ParamInfo], bool] | None
) -> Params:
    """Each stage's parameters by a program of its own."""

    def of_stage(number: int) -> Params:
        def here(info: ParamInfo) -> bool:
            return home_stage(bound, info) == number and (only is None or only(info))

        return initialise(spec, bound.stage(number), key, only=here)

    def made(info: ParamInfo, *leaves: Array | None) -> Array | None:
        found = next((leaf for leaf in leaves if leaf is not None), None)
        if found is not None or (only is not None and not only(info)):
            return found
        shape = jax.ShapeDtypeStruct(info.shape, info.at_rest(bound.plan.precision.params))
        return without_shards(shape, param_sharding(bound, "params", info))

    stages = range(bound.mesh.shape[MeshAxis.STAGE])
    parts = [of_stage(at) for at in stages if bound.stage(at).mesh.local_devices]
    return jax.tree.map(made, spec.infos, *parts, is_leaf=lambda leaf: leaf is None)


def _quick_compile(bound: BoundPlan) -> dict[str, int] | None:
    """Options for a program that runs once: on CPUs, compiling random draws is most of its cost.

    Level 1 takes a quarter of the time and gives the same bits; level 0 does not.
    """
    on_cpu = bound.mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 1} if on_cpu else None
