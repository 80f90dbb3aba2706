"""What layers compute of whole numbers in programs compiled for H100s: ranges of masks are none."""

import math
import re

import pytest

from colossax.aot import parse_module, parse_target
from colossax.config import AttentionConfig, Plan, Precision
from colossax.models import LlamaConfig
from colossax.planner import inspect_run
from colossax.recipes import recipe
from colossax.tasks import DataConfig

pytestmark = [pytest.mark.aot, pytest.mark.slow]

SEQ, DEVICES = 2048, 8
NO_KERNELS = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while")


def compiled(mesh):
    """A step of packed rows, by the kernels, in one microbatch: layers are its outermost loops."""
    model = LlamaConfig(vocab=256, embed=512, layers=4, heads=8, kv_heads=4, mlp=512, max_seq=SEQ)
    plan = Plan(
        mesh=mesh,
        attention=AttentionConfig(kernel="mosaic"),
        precision=Precision(compute="bfloat16"),
    )
    data = DataConfig(seq_len=SEQ, global_batch=DEVICES, tokenizer_vocab=256)
    config = recipe("llama_tiny").replace(model=model, plan=plan, data=data)
    return inspect_run(config, parse_target(f"h100:1x{DEVICES}")).program


def whole_numbers(module):
    """Kernels in loops that make whole numbers and truths alone, more than a ring has steps."""
    bodies = [
        called
        for one in module.by_name.values()
        for role, called in one.called
        if one.opcode == "while" and role == "body"
    ]
    return [
        f"{one.opcode} {one.shape} {one.op_name}"
        for body in bodies
        for one in module.computations[body]
        if one.opcode not in NO_KERNELS and _whole(one.shape)
    ]


def _whole(shape):
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shape)
    sizes = [math.prod(map(int, filter(None, dims.split(",")))) for _, dims in arrays]
    return max(sizes, default=0) > DEVICES and all(
        re.fullmatch(r"[su]\d+|pred", x) for x, _ in arrays
    )


MESHES = {
    "one sequence a device": {"fsdp": 8},
    "ring": {"fsdp": 2, "ring": 4},
    "usp": {"ring": 4, "ulysses": 2},
    "double ring": {"ring_out": 2, "ring_in": 4},
}


@pytest.mark.parametrize("name", MESHES)
def test_no_layer_computes_ranges(name):
    assert whole_numbers(parse_module(compiled(MESHES[name]).hlo)) == []


def test_without_what_the_mask_carries_there_are_many_such_kernels(monkeypatch):
    monkeypatch.setattr("colossax.nn.decoder.masks.with_ranges", lambda operands, _: operands.mask)
    assert len(whole_numbers(parse_module(compiled(MESHES["ring"]).hlo))) > 50
