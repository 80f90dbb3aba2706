"""Matmuls in float8 compiled for an H100 that is not there: what is sent, and what multiplies."""

import dataclasses
import re

import pytest

from colossax.aot import assert_collectives, parse_target, target_devices
from colossax.config import Plan, Precision
from colossax.errors import PlanError
from colossax.models import LlamaConfig
from colossax.planner import inspect_run
from tests.aot.test_step_bytes import CONFIG, DEVICES, LAYERS, MATRICES, PIECES, SEQ, D, V

pytestmark = pytest.mark.aot

FLOAT8 = Precision(compute="bfloat16", matmul="float8")


def in_float8(config, **plan):
    return config.replace(plan=config.plan.replace(precision=FLOAT8, **plan))


@pytest.mark.catches("float8-gathered-wide")
def test_weights_are_gathered_in_float8_both_ways():
    """A byte for each number of a matrix and direction, half of bfloat16; table, head and norms as
    before, and gradients, which are summed in bfloat16."""
    config = in_float8(CONFIG)
    one = inspect_run(config, parse_target(f"h100:1x{DEVICES}"))
    outside = LAYERS * 4 * 2 * D + 2 * 2 * V * D + 4 * D
    expected = {
        ("all-gather", "fsdp"): PIECES * (LAYERS * 2 * MATRICES + outside),
        ("reduce-scatter", "fsdp"): PIECES * (LAYERS * 2 * MATRICES + outside),
    }
    mesh = config.plan.bind(target_devices(one.target)).mesh
    # Of fewer bytes are the sums of losses and norms, and the largest numbers.
    assert_collectives(one.program.hlo, expected, mesh=mesh, within=0.0, ignore_below=1024)
    tokens = PIECES * DEVICES * SEQ
    work, narrow = one.flops_per_token * tokens, 6 * LAYERS * MATRICES * tokens
    assert one.compute_s == pytest.approx((work - narrow / 2) / (DEVICES * 989e12))


WIDE = LlamaConfig(vocab=V, embed=D, layers=2, heads=4, kv_heads=4, mlp=512, max_seq=256)
ODD = dataclasses.replace(WIDE, embed=100, heads=5, kv_heads=5, mlp=77)


@pytest.mark.catches("float8-operands-widened")
@pytest.mark.catches("float8-tilings-tried")
@pytest.mark.parametrize("model", [WIDE, ODD], ids=["even", "odd"])
def test_every_matmul_of_a_layer_is_one_of_float8(model):
    """Seven maps forward, two each in backward; the compiler joins q, k, v and gate, up,
    forward and where weights get gradients; odd sizes it fills up to multiples of 16."""
    config = in_float8(
        CONFIG.replace(model=model, plan=Plan(mesh={"fsdp": 1}, attention=CONFIG.plan.attention))
    )
    hlo = inspect_run(config, parse_target("h100:1x1")).program.hlo
    found = re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', hlo)
    assert len(found) == (7 - 3) + 7 + (7 - 3)


def test_gpus_without_float8_are_refused():
    with pytest.raises(PlanError, match=r"which NVIDIA A100.* does not multiply, as NVIDIA GPUs"):
        inspect_run(in_float8(CONFIG), parse_target(f"a100:1x{DEVICES}"))
