"""A mixture's layer compiled for GPUs that are not there: bytes, memory, which kernels.

T, K, E, D, F: tokens of a device, choices of a token, experts, width, an expert's hidden width.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from colossax.aot import collectives, compile_program, parse_module, parse_target, target_devices
from colossax.aot.collectives import totals
from colossax.config import ExpertsConfig, Precision, preset
from colossax.nn.experts import ExpertMLP
from colossax.sharding import use
from colossax.sharding.experts.island import through_experts
from colossax.sharding.experts.layout import layout_of
from colossax.sharding.rules import resolve

pytestmark = pytest.mark.aot

T, K, D, F, DEVICES = 2048, 8, 1024, 1024, 8
SLOTS = T * K // DEVICES * 5 // 4
"""Rows for each device, a quarter more than of a balanced load."""
ROWS = DEVICES * SLOTS
INTO, OUT = ("experts", "expert_embed", "expert_mlp"), ("experts", "expert_mlp", "expert_embed")
DIMS = {"up": INTO, "gate": INTO, "down": OUT}


@functools.cache
def compiled(experts=32, *, dispatch="passes", gpu="h100", mesh="expert", reduction=None):
    """Forward and backward; weights in bfloat16, so that their copies are not the memory."""
    sizes = {"expert": DEVICES} if mesh == "expert" else {"fsdp": 2, "expert": DEVICES // 2}
    plan = preset(
        "zero3",
        mesh=sizes,
        experts=ExpertsConfig(dispatch=dispatch),
        precision=Precision(compute="bfloat16", reduction=reduction),
    )
    target = parse_target(f"{gpu}:1x{DEVICES}")
    shapes = {"up": (experts, D, F), "gate": (experts, D, F), "down": (experts, F, D)}
    half = jnp.dtype("bfloat16")
    with use(plan.bind(target_devices(target))) as bound:
        layout = layout_of(
            bound,
            (DEVICES, T, D),
            K,
            float(K),
            tuple((name, shape, DIMS[name]) for name, shape in shapes.items()),
            half,
        )

        def total(x, weights, scale, expert):
            y, *_ = through_experts(layout, ExpertMLP(), x, weights, expert, scale)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        def put(shape, dims, dtype, role):
            spec = resolve(bound, role, dims, shape, name="test")
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(bound.mesh, spec))

        tokens = ("batch", "seq:residual", None)
        given = (
            put((DEVICES, T, D), ("batch", "seq:residual", "embed"), half, "activations"),
            {name: put(shape, DIMS[name], half, "params") for name, shape in shapes.items()},
            put((DEVICES, T, K), tokens, jnp.float32, "activations"),
            put((DEVICES, T, K), tokens, jnp.int32, "activations"),
        )
        lowered = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2))).lower(*given)
        return compile_program(lowered), bound.mesh, layout


def shares(experts=32, **how):
    """Bytes that a device sends, by kind and axis."""
    program, mesh, _ = compiled(experts, **how)
    module = parse_module(program.hlo).with_trip_count(1)  # passes of a balanced load
    return {(t.kind, t.axis): t.ring_bytes for t in totals(collectives(module, mesh))}


@pytest.mark.catches("rows-sent-wide")
@pytest.mark.parametrize("experts", [32, 128])
def test_rows_go_out_and_back_and_backward_once_more(experts):
    """Forward sends rows and results; backward rows, their cotangents, and gradients of rows."""
    found = shares(experts)
    rows = 5 * ROWS * D * 2
    weights = 3 * ROWS * 4  # forward, backward, and their gradient
    counts = experts * 4  # backward's are forward's, and the compiler sends them once
    assert found["all-to-all", "expert"] == (rows + weights + counts) * (DEVICES - 1) // DEVICES
    assert sum(found.values()) - found["all-to-all", "expert"] < 100


def test_gathered_tokens_go_once_each_way():
    """Tokens with their choices, then cotangents; results, then gradients of tokens and choices."""
    found = shares(dispatch="gather")
    tokens, choices = T * D * 2, T * K * 4
    assert found["all-gather", "expert"] == (2 * tokens + 2 * choices) * (DEVICES - 1)
    assert found["reduce-scatter", "expert"] == (2 * tokens + choices) * (DEVICES - 1)


@pytest.mark.catches("experts-gradient-narrow")
def test_gradients_of_experts_are_summed_in_the_dtype_of_reductions():
    size = 32 // (DEVICES // 2) * 3 * D * F  # of a device's experts, over two devices
    wide, narrow = (shares(mesh="fsdp", reduction=dtype) for dtype in ("float32", None))
    assert wide["reduce-scatter", "fsdp"] == 4 * size // 2
    assert narrow["reduce-scatter", "fsdp"] == 2 * size // 2


def shapes(program):
    return {
        tuple(int(size) for size in dims.split(","))
        for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.hlo)
    }


@pytest.mark.parametrize("how", [{"experts": 128}, {"dispatch": "gather"}])
def test_no_array_has_rows_times_experts_times_width(how):
    """None is larger than the rows of all passes' buffers or a device's experts."""
    program, _, layout = compiled(**how)
    assert max(map(math.prod, shapes(program))) == max(ROWS * D, layout.experts_here * D * F)


@pytest.mark.catches("hidden-kept-for-its-gradient")
@pytest.mark.parametrize("experts", [32, 128])
def test_memory_is_that_of_six_buffers_and_one_gradient(experts):
    """Of four times the experts, with as many choices and rows, none but that gradient grows."""
    program, *_ = compiled(experts)
    rows, gradient = ROWS * D * 2, experts // DEVICES * D * F * 2
    assert program.stats.temp_size_in_bytes <= 1.02 * (6 * rows + gradient + T * D * 4)


@pytest.mark.catches("experts-in-tiles-on-hopper")
@pytest.mark.parametrize(("gpu", "kernels"), [("h100", 11), ("a100_80", 0)])
def test_hopper_has_the_kernels_and_others_the_tile_loop(gpu, kernels):
    """Three products forward; backward two of them again, and each one's two gradients."""
    program, _, layout = compiled(gpu=gpu)
    assert program.hlo.count('custom_call_target="mosaic_gpu') == kernels
    assert "ragged" not in program.hlo
    assert max(map(math.prod, shapes(program))) == max(ROWS * D, layout.experts_here * D * F)
