"""Decoding through stages, compiled for GPUs that are not there: what goes between stages."""

import collections
import functools

import jax
import numpy as np
import pytest

import colossax
from colossax.aot import collectives, compile_program, parse_target, target_devices
from colossax.config import Plan, Precision
from colossax.inference import DecodeProgram, Generator, StagedProgram
from colossax.models import LlamaConfig, maker
from colossax.nn import describe
from colossax.pallas.target import target
from colossax.sharding import param_sharding

pytestmark = pytest.mark.aot

STAGES, FSDP, WIDTH = 4, 2, 16
SIZES = {"vocab": 128256, "embed": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "max_seq": 8192}
# Numbers of a layer
LAYER = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096


@functools.cache
def compiled(form, layers, slots=1024):
    """Llama 3 8B on 4 stages x fsdp 2, bfloat16: of a tick, or of a token in the other form."""
    bf16 = Precision(params="bfloat16", compute="bfloat16", cache="bfloat16")
    plan = Plan(mesh={"stage": STAGES, "fsdp": FSDP}, precision=bf16)
    bound = plan.bind(target_devices(parse_target("h100:1x8")))
    with target("gpu", compute_capability=(9, 0)):
        with colossax.use(bound):
            spec = describe(maker(LlamaConfig(**SIZES, layers=layers)))
        params = jax.tree.map(
            lambda info: jax.ShapeDtypeStruct(
                info.shape, np.dtype("bfloat16"), sharding=param_sharding(bound, "params", info)
            ),
            spec.infos,
        )
        if form == "staged":
            generator = Generator(spec, bound, params, slots=slots)
            assert isinstance(generator.program, StagedProgram)
            return compile_program(generator.lowered()), bound.mesh
        program = DecodeProgram(spec, bound, slots=slots, width=WIDTH)
        return compile_program(program.lowered(params)), bound.mesh


def between_stages(form, layers):
    """Payload bytes and bytes sent in a ring, by kind."""
    program, mesh = compiled(form, layers)
    payload, sent = collections.Counter(), collections.Counter()
    for one in collectives(program.hlo, mesh):
        if "stage" in one.axes:
            payload[one.kind] += one.bytes
            sent[one.kind] += one.ring_bytes
    return payload, sent


@pytest.mark.parametrize("layers", [4, 32])
def test_activations_alone_go_between_stages(layers):
    """To the next stage, from the table, whose width both axes split, and from the last stage."""
    payload, sent = between_stages("staged", layers)
    hidden = WIDTH * 4096 * 2
    chosen = 2 * (4 + 4) * STAGES  # of the likeliest and the drawn token, number and weight
    assert payload == {
        "collective-permute": hidden,
        "all-reduce": hidden // FSDP,
        "all-gather": hidden + chosen,
    }
    assert sent.total() <= 0.345e6


def test_without_it_every_layer_would_gather_the_stack():
    payload, sent = between_stages("gathered", 32)
    stack = 32 * 2 * LAYER // FSDP
    assert 0.99 <= payload["all-gather"] / (32 * stack) <= 1.01
    assert sent.total() >= 165e9


def test_the_caches_are_written_in_place():
    few, many = (compiled("staged", 32, slots)[0].stats for slots in (1024, 8192))
    # Of a stage's eight layers and four groups, keys and values.
    more = 8 * 4 * (8192 - 1024) * 2 * 8 * 128 * 2
    assert many.argument_size_in_bytes - few.argument_size_in_bytes == more
    assert many.temp_size_in_bytes <= 1.01 * few.temp_size_in_bytes <= 0.12 * 2**30
