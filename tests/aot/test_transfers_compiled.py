"""Transfers of programs compiled for GPUs that are not there, against formulas."""

import functools

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import (
    full_stack_copies,
    host_arguments,
    host_arithmetic,
    host_compute,
    parse_module,
    sync_transfers_in_loops,
    transfer_totals,
    transfers,
)
from tests.aot import offloaded
from tests.aot.offloaded import (
    INPUTS_BYTES,
    LAYERS,
    MICROBATCHES,
    PARAMETERS,
    STACK_BYTES,
    TOKENS,
    WIDTH,
)

pytestmark = pytest.mark.aot

UPDATES = (
    offloaded.whole,
    offloaded.scanned,
    offloaded.double_buffered,
    offloaded.streamed,
    offloaded.decayed_on_host,
)
"""Steps that get gradients."""


@functools.cache
def compiled(make, target="h200:1x1"):
    return offloaded.compiled(make, target, gradients=make in UPDATES)


def totals_of(make, target="h200:1x1"):
    program, _ = compiled(make, target)
    return {one.direction: one for one in transfer_totals(transfers(program.hlo))}


def module_of(make, target="h200:1x1"):
    return parse_module(compiled(make, target)[0].hlo)


@pytest.mark.parametrize(("target", "devices"), [("h200:1x1", 1), ("h200:1x8", 8)])
def test_the_fused_step_moves_what_the_formula_says(target, devices):
    """Up: w forward, w, m, v backward, the layers' inputs; down: w, m, v and the inputs."""
    found = totals_of(offloaded.fused, target)
    assert set(found) == {"to_device", "to_host"}
    up, down = found["to_device"], found["to_host"]
    assert up.bytes == (16 * PARAMETERS + INPUTS_BYTES) // devices
    assert down.bytes == (12 * PARAMETERS + INPUTS_BYTES) // devices
    assert up.executions == LAYERS * (2 + 6 + 1)
    assert down.executions == LAYERS * (6 + 1)
    assert (up.sync_in_loops, down.sync_in_loops) == (0, 0)
    assert up.beside_matmul >= 2 * LAYERS
    assert down.beside_matmul >= 3 * LAYERS
    assert 0 < up.exposed_bytes < up.bytes


@pytest.mark.parametrize("make", [offloaded.fused, offloaded.overwriting])
@pytest.mark.parametrize("target", ["h200:1x1", "h200:1x8"])
def test_the_fused_step_is_clean(make, target):
    program, jaxpr = compiled(make, target)
    module = parse_module(program.hlo)
    devices = offloaded.mesh_of(target).size
    assert host_arguments(module) == (STACK_BYTES // devices,) * 6
    assert full_stack_copies(module) == []
    assert full_stack_copies(module, [INPUTS_BYTES // devices]) == []
    assert host_compute(module) == []
    assert sync_transfers_in_loops(module) == []
    assert host_arithmetic(jaxpr) == []
    assert program.host_bytes == (6 * STACK_BYTES + INPUTS_BYTES) // devices


@pytest.mark.parametrize("target", ["h200:1x1", "h200:1x8"])
def test_new_state_in_the_place_of_gradients_compiles_to_the_same_program(target):
    def instructions(make):
        found = module_of(make, target).computations.values()
        return [[(one.opcode, one.shape) for one in body] for body in found]

    assert instructions(offloaded.overwriting) == instructions(offloaded.fused)


@pytest.mark.parametrize(("target", "devices"), [("h200:1x1", 1), ("h200:1x8", 8)])
def test_microbatches_add_up_on_the_host(target, devices):
    """Each fetches w twice, stores 2 bytes per gradient, and all but the first fetch those."""
    program, jaxpr = compiled(offloaded.accumulated, target)
    found = totals_of(offloaded.accumulated, target)
    inputs = MICROBATCHES * INPUTS_BYTES
    up = 8 * MICROBATCHES + 2 * (MICROBATCHES - 1) + 12 + 2
    down = 2 * MICROBATCHES + 12
    assert {name: one.bytes for name, one in found.items()} == {
        "to_device": (up * PARAMETERS + inputs) // devices,
        "to_host": (down * PARAMETERS + inputs) // devices,
    }
    assert all(one.sync_in_loops == 0 for one in found.values())
    module = parse_module(program.hlo)
    stacks = [*host_arguments(module), INPUTS_BYTES // devices, STACK_BYTES // 2 // devices]
    assert full_stack_copies(module, stacks) == []
    assert host_compute(module) == host_arithmetic(jaxpr) == []
    host_bytes = 6 * STACK_BYTES + INPUTS_BYTES + 2 * PARAMETERS
    assert program.host_bytes == host_bytes // devices


SHAPE = (LAYERS, TOKENS, WIDTH)


def _empty():
    return offloaded.to_host(jax.lax.empty(SHAPE, jnp.bfloat16))


def _zeros():
    return offloaded.to_host(jnp.zeros(SHAPE, jnp.bfloat16))


def _broadcast():
    return jnp.broadcast_to(offloaded.to_host(jnp.zeros((), jnp.bfloat16)), SHAPE)


@pytest.mark.parametrize(
    ("make", "whole_copies", "arithmetic"), [(_empty, 0, 0), (_zeros, 1, 0), (_broadcast, 0, 1)]
)
def test_host_stacks_made_inside_a_program(make, whole_copies, arithmetic):
    """Only zeros of the device arrive: a broadcast on the host is compiled to no fill at all."""
    program, jaxpr = compiled(offloaded.made(make))
    module = parse_module(program.hlo)
    assert len(full_stack_copies(module, [INPUTS_BYTES])) == whole_copies
    assert (program.stats.temp_size_in_bytes >= INPUTS_BYTES) == bool(whole_copies)
    assert program.hlo.count('custom_call_target="AllocateBuffer"') == 1 - whole_copies
    assert len(host_arithmetic(jaxpr)) == arithmetic


def test_the_streamed_update_moves_each_state_once():
    found = totals_of(offloaded.streamed)
    assert {name: one.bytes for name, one in found.items()} == {
        "to_device": 12 * PARAMETERS,
        "to_host": 12 * PARAMETERS,
    }
    assert full_stack_copies(module_of(offloaded.streamed)) == []


def test_whole_stacks_on_the_device_are_found():
    found = totals_of(offloaded.whole)
    assert {name: (one.executions, one.bytes) for name, one in found.items()} == {
        "to_device": (6, 12 * PARAMETERS),
        "to_host": (6, 12 * PARAMETERS),
    }
    copies = full_stack_copies(module_of(offloaded.whole))
    assert sum("to device, 1 times" in one for one in copies) == 6
    assert all(f"a whole stack of {STACK_BYTES:,} bytes" in one for one in copies)


def test_what_a_scan_makes_is_copied_within_the_host():
    within = totals_of(offloaded.scanned)["host_to_host"]
    assert (within.executions, within.bytes) == (6, 12 * PARAMETERS)
    assert len(full_stack_copies(module_of(offloaded.scanned))) == 6


def test_a_double_buffer_copies_stacks_in_every_iteration():
    within = totals_of(offloaded.double_buffered)["host_to_host"]
    assert within.executions >= LAYERS
    assert within.bytes == within.executions * STACK_BYTES
    assert within.sync_in_loops == within.executions
    copies = full_stack_copies(module_of(offloaded.double_buffered))
    assert copies and all(f"host to host, {LAYERS} times" in one for one in copies)


def test_arithmetic_on_the_host_is_found_before_and_after_compiling():
    program, jaxpr = compiled(offloaded.decayed_on_host)
    found = host_arithmetic(jaxpr)
    assert len(found) == 2
    assert all(one.startswith("mul on float32<host>") for one in found)
    assert all("offloaded.py:" in one for one in found)
    assert any("annotated so" in one for one in host_compute(parse_module(program.hlo)))
    assert sum(one.bytes for one in transfers(program.hlo)) == 4  # the scale
