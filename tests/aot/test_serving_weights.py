"""Weights of engines on GPUs that are not there: in codes of eight bits, or fetched from the host.

Each model is as large as its users', and its program is compiled whole.
"""

import functools
import math
import re

import jax
import pytest

from colossax.aot import compile_program, host_copies, parse_module, parse_target
from colossax.aot.hlo import shape_bytes
from colossax.aot.lints import full_stack_copies, host_compute
from colossax.config import OffloadConfig, Plan
from colossax.inference.engine.program import Sizes
from colossax.inference.engine.sizing import SHARE, cache_bytes
from colossax.models import BloomConfig, LlamaConfig
from colossax.pallas.target import target
from tests.aot.serving import engine_program

pytestmark = [pytest.mark.aot, pytest.mark.slow]

GIB = 2**30
TWO_LAYERS = LlamaConfig(
    vocab=32768, embed=4096, layers=2, heads=32, kv_heads=8, mlp=14336, max_seq=512
)
CODES = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 32768
FEW = Sizes(seats=16, pages=32, page_tokens=16, slots=512, mixed=256, decode=16)
TYPES = {"int8": "s8", "fp8": "f8e4m3fn"}
NOT_WRITING = (
    "constant",
    "parameter",
    "bitcast",
    "get-tuple-element",
    "tuple",
    "while",
    "call",
    "conditional",
)


def compiled(config, plan, sizes, on, kind, **how):
    """The program of an engine's step, its description and its parameters."""
    with target("gpu", compute_capability=(9, 0)):
        program, params = engine_program(config, plan, sizes, on, **how)
        return compile_program(program.lowered(kind, params)), program, params


def running(module):
    """Instructions that are kernels, copies or calls of libraries: none within a fusion."""
    inside = {
        called
        for one in module.by_name.values()
        for role, called in one.called
        if role in ("calls", "to_apply") and one.opcode != "call"
    }
    for name, body in module.computations.items():
        if name not in inside:
            yield from (one for one in body if one.opcode not in NOT_WRITING)


def arrays(shape):
    """Type, numbers and text of each array of a shape."""
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        yield kind, math.prod(int(size) for size in dims.split(",") if size), f"{kind}[{dims}]"


@pytest.mark.catches("head-made-a-matrix")
@pytest.mark.catches("scales-before-the-product")
@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("form", TYPES)
def test_codes_are_read_once_and_no_matrix_is_written(form, kind):
    """Of 16 tokens or 256. An array of the size of a layer's `q` or of more would be a matrix."""
    program, _, params = compiled(TWO_LAYERS, Plan(), FEW, "h100:1x1", kind, form=form)
    assert sum(x.size for x in jax.tree.leaves(params) if x.dtype.itemsize == 1) == CODES
    module = parse_module(program.hlo)
    written = [a for one in running(module) for a in arrays(one.shape)]
    assert not [text for _, numbers, text in written if numbers >= 4096 * 4096]
    read = sum(
        shape_bytes(shape)
        for one in running(module)
        for shape in module.operand_shapes(one)
        if shape.startswith(TYPES[form])
    )
    # A loop, which has no turn where none are asked for, scores tokens of prompts by the head.
    head = TWO_LAYERS.vocab * TWO_LAYERS.embed
    assert read == CODES + (kind == "mixed") * head


BLOOM = BloomConfig(vocab=250880, embed=14336, layers=70, heads=112, max_seq=2048)
BLOOM_SIZES = Sizes(seats=48, pages=48 * 128, page_tokens=16, slots=2048, mixed=1024, decode=48)
"""Of 48 sequences of 2048 tokens."""


def test_bloom_in_int8_is_served_by_eight_h100():
    """176 billion parameters and a cache of 367 GiB; in bfloat16 there would not be room."""
    plan = Plan(mesh={"tensor": 8})
    program, engine, params = compiled(BLOOM, plan, BLOOM_SIZES, "h100:1x8", "mixed", form="int8")
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(params)
    )
    cache, limit = cache_bytes(engine), SHARE * parse_target("h100:1x8").gpu.memory_bytes
    assert cache == 2 * 70 * 14336 * 2 * 48 * 2048 // 8
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.dtype.itemsize == 1)
    assert matrices == 70 * 12 * 14336**2
    spare = program.device_bytes - held - cache
    print(
        f"{program.device_bytes / GIB:.2f} GiB of {limit / GIB:.2f}: weights {held / GIB:.2f},"
        f" cache {cache / GIB:.2f}, else {spare / GIB:.2f}"
    )
    assert 0 < spare < GIB
    assert program.device_bytes <= limit
    assert program.device_bytes + matrices // 8 > limit  # what bfloat16 would take more


LLAMA_50B = LlamaConfig(
    vocab=128256, embed=8192, layers=57, heads=64, kv_heads=8, mlp=28672, max_seq=4096
)
LAYER_BYTES = 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
STREAM_SIZES = Sizes(seats=64, pages=64 * 64, page_tokens=16, slots=4096, mixed=1024, decode=64)


@functools.cache
def streamed(kind):
    plan = Plan(offload=OffloadConfig(parameters=1.0))
    return compiled(LLAMA_50B, plan, STREAM_SIZES, "h200:1x1", kind)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_an_engine_streams_50b_from_the_host(kind):
    """Beside cache, tables and vectors a device has room for two layers, activations among them."""
    program, engine, params = streamed(kind)
    stats, here = program.stats, jax.tree.leaves(params)
    host = [x for x in here if x.sharding.memory_kind == "pinned_host"]
    device = sum(x.size * 2 for x in here) - sum(x.size * 2 for x in host)
    assert sum(x.size * 2 for x in host) == 57 * LAYER_BYTES
    assert stats.host_argument_size_in_bytes == program.host_bytes == 57 * LAYER_BYTES
    cache = cache_bytes(engine)
    weights = program.device_bytes - cache - device
    print(
        f"{kind}: {program.device_bytes / GIB:.2f} GiB on the device: cache {cache / GIB:.2f},"
        f" tables and vectors {device / GIB:.2f}, layers and else {weights / GIB:.3f} of"
        f" {2 * LAYER_BYTES / GIB:.3f}"
    )
    assert 2 * 8192 * 28672 < weights <= 1.05 * 2 * LAYER_BYTES


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_what_is_streamed_is_copied_layer_by_layer(kind):
    module = parse_module(streamed(kind)[0].hlo)
    assert host_copies(module) == []
    assert host_compute(module) == []
    assert full_stack_copies(module) == []
