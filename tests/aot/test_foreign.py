"""Plain Flax modules with names of dims send and hold what our own operations do."""

import jax
import optax
import pytest

from colossax.aot import collectives, compile_program, parse_target, target_devices
from colossax.config import AttentionConfig, Plan
from colossax.pallas.target import target
from colossax.planner import build_step
from colossax.sharding import compiler_options
from tests import side_by_side

pytestmark = pytest.mark.aot

MIXED, FSDP = {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}
SENT, HELD = 1.1, 1.15


def counted(mesh, *, own, layers, remat):
    """Bytes that a step of 64 rows sends in rings, and holds, per device."""
    devices = target_devices(parse_target("h100:1x8"))
    with target("gpu", compute_capability=(9, 0)):
        step = build_step(
            side_by_side.maker(own=own, layers=layers, remat=remat),
            optax.adamw(1e-3),
            side_by_side.loss,
            Plan(mesh=mesh, attention=AttentionConfig(kernel="xla")),
            devices=devices,
            batch_dims=side_by_side.DIMS,
        )
        batch = side_by_side.batch(64)
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
        lowered = step.lower(step.abstract, step.abstract_batch(shapes))
    program = compile_program(lowered, options=compiler_options(step.bound))
    sent = sum(one.ring_bytes for one in collectives(program.hlo, step.bound.mesh))
    return sent, program.device_bytes


@pytest.mark.parametrize(
    "layers, remat",
    [(2, False), pytest.param(12, True, marks=pytest.mark.slow)],
    ids=["kept", "24-under-remat"],
)
@pytest.mark.parametrize("mesh", [MIXED, FSDP], ids=["mixed", "fsdp"])
def test_a_plain_model_sends_and_holds_what_our_operations_do(mesh, layers, remat):
    """Of an encoder-decoder with as many layers in each."""
    ours, plain = (counted(mesh, own=own, layers=layers, remat=remat) for own in (True, False))
    assert plain[0] <= SENT * ours[0]
    assert plain[1] <= HELD * ours[1]
