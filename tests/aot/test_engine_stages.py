"""Steps of an engine through stages, compiled for GPUs that are not there."""

import jax
import numpy as np
import pytest

import colossax
from colossax.aot import collectives, compile_program, parse_target, target_devices
from colossax.config import Plan, Precision
from colossax.inference.engine.sizing import layout_bytes
from colossax.inference.engine.staged import StagedSteps
from colossax.inference.plan import unrolled, with_stage_programs
from colossax.models import maker
from colossax.nn import describe
from colossax.pallas.target import target
from colossax.sharding import param_sharding
from tests.aot.test_engine import GIB, LLAMA_8B, SIZES

pytestmark = [pytest.mark.aot, pytest.mark.slow]


def _program(config, mesh, sizes, on):
    """The program and its parameters as shapes."""
    bf16 = Precision(params="bfloat16", compute="bfloat16", cache="bfloat16")
    devices, plan = target_devices(parse_target(on)), Plan(mesh=mesh, precision=bf16)
    bound = plan.bind(devices)
    with colossax.use(bound):
        spec = describe(maker(config))
    bound = with_stage_programs(unrolled(plan, spec), bound, config.layers).bind(devices)
    with colossax.use(bound):
        spec = describe(maker(config))
    params = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(
            info.shape, np.dtype("bfloat16"), sharding=param_sharding(bound, "params", info)
        ),
        spec.infos,
    )
    return StagedSteps(spec, bound, sizes), params


def test_8b_on_four_h100():
    """Of each stage eight layers and their cache, the table or the head, and 0.6 GiB; no weight
    goes between devices."""
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(LLAMA_8B, {"stage": 4}, SIZES, "h100:1x4")
        lowered = program.lowered("decode", params)
        compiled = [compile_program(one) for one in lowered]
    layer, table = 2 * 218_112_000, 2 * 128256 * 4096
    for number, (stage, found) in enumerate(zip(program.stages, compiled, strict=True)):
        cache = layout_bytes(stage.cache)
        assert cache == 10 * GIB
        spare = found.device_bytes - cache - 8 * layer - table * (number in (0, 3))
        print(f"stage {number}: {found.device_bytes / GIB:.2f} GiB, {spare / GIB:.3f} beside")
        assert 0 < spare < 0.6 * GIB
        assert not collectives(found.hlo, stage.bound.mesh)
