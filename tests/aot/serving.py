"""Engines of models that are not there, as programs and parameters."""

import jax

import colossax
from colossax.aot import parse_target, target_devices
from colossax.config import Precision
from colossax.inference.engine.program import EngineProgram
from colossax.inference.plan import parameters_alone, unrolled
from colossax.models import maker
from colossax.nn import describe
from colossax.nn.quantised.serving import with_served
from colossax.sharding import param_sharding


def engine_program(config, plan, sizes, on, *, form="own", stacked=False):
    """The program in bfloat16, and its parameters as shapes, matrices in a form."""
    make = with_served(maker(config), form)
    bf16 = Precision(params="bfloat16", compute="bfloat16", cache="bfloat16")
    plan = parameters_alone(plan.replace(precision=bf16))
    devices = target_devices(parse_target(on))
    bound = plan.bind(devices)
    with colossax.use(bound):
        spec = describe(make)
    if not stacked:
        bound = unrolled(plan, spec).bind(devices)
        with colossax.use(bound):
            spec = describe(make)
    params = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(
            info.shape, info.at_rest("bfloat16"), sharding=param_sharding(bound, "params", info)
        ),
        spec.infos,
    )
    return EngineProgram(spec, bound, sizes), params
