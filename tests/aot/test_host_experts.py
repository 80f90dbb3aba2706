"""Experts that rest in host memory, trained on GPUs that are not there."""

import dataclasses
import functools

import pytest

from colossax.aot import (
    full_stack_copies,
    host_compute,
    parse_module,
    parse_target,
    transfers,
)
from colossax.aot.transfers import TO_DEVICE, TO_HOST
from colossax.config import OffloadConfig
from colossax.planner import inspect_run
from colossax.recipes import recipe

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

LAYERS, DEVICES = 6, 8
NUMBERS = 128 // DEVICES * 2048 * 768
"""Of one of the three arrays of a layer's experts, on a device."""


@functools.cache
def inspected():
    config = recipe("qwen3_30b_a3b")
    offload = OffloadConfig(experts=1.0)
    return inspect_run(
        config.replace(
            plan=config.plan.replace(mesh={"expert": DEVICES}, offload=offload),
            model=dataclasses.replace(config.model, layers=LAYERS),
            data=dataclasses.replace(config.data, global_batch=DEVICES),
        ),
        parse_target("h100:1x8"),
    )


@pytest.mark.catches("experts-fetched-in-turn")
def test_experts_come_and_their_gradients_go_beside_a_whole_layer():
    """Each array beside what multiplies in the layer before, forward and backward."""
    moved = [t for t in transfers(inspected().program.hlo) if t.in_loop and "jvp" in t.op_name]
    for direction, count in ((TO_DEVICE, 6), (TO_HOST, 3)):
        found = [t for t in moved if t.direction == direction]
        assert len(found) == count and all(t.times == LAYERS for t in found)
        assert all(t.asynchronous and t.matmuls >= 3 for t in found)


def test_two_layers_experts_are_on_the_device_and_all_others_in_host_memory():
    one = inspected()
    # Parameters and two moments in float32, gradients in bfloat16 until they are clipped.
    assert one.memory.host_bytes == 3 * LAYERS * NUMBERS * (3 * 4 + 2)
    module = parse_module(one.program.hlo)
    assert not full_stack_copies(module) and not host_compute(module)
