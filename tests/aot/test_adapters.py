"""An adapter of a large model compiled for a GPU that is not there: what learns alone has state."""

import dataclasses

import pytest

from colossax.aot import parse_target
from colossax.nn import AdapterConfig
from colossax.planner import inspect_run
from colossax.recipes import recipe

pytestmark = pytest.mark.aot

GIB = 2**30
LAYERS, D, RANK = 80, 8192, 16
WIDE_LAYERS = 150  # of 856 million numbers, and two tables of 1.05 billion: 130.4 billion
# A and B of q and o (D to D), k and v (D to 1024).
PAIRS = LAYERS * RANK * (2 * (D + D) + 2 * (D + 1024))


@pytest.mark.slow
def test_an_adapter_of_70b_trains_on_one_h200():
    config = recipe("llama3_70b")
    data = dataclasses.replace(config.data, seq_len=2048, global_batch=1)
    precision = dataclasses.replace(config.plan.precision, params="bfloat16")
    plan = config.plan.replace(mesh={"fsdp": 1}, precision=precision)
    adapter = AdapterConfig(rank=RANK, targets="attn/*")
    found = inspect_run(
        config.replace(data=data, plan=plan, adapter=adapter), parse_target("h200:1x1")
    )
    terms, base = found.memory.terms, found.parameters - PAIRS
    assert found.fits
    assert found.memory.total_bytes / GIB < 137
    assert terms["parameters"] == pytest.approx(2 * base + 4 * PAIRS, rel=1e-3)
    assert terms["optimizer"] == pytest.approx(8 * PAIRS, rel=1e-3)
    # Two of three FLOPs of each frozen weight but the table's, and scores of causal attention.
    weights = base - config.model.vocab * D
    scores = 6 * 2 * 64 * 128 * LAYERS * (2048 + 1) / 2
    assert found.flops_per_token == pytest.approx(4 * weights + scores, rel=1e-3)


@pytest.mark.slow
def test_an_adapter_of_130b_trains_beside_nf4_on_one_h200():
    config = recipe("llama3_70b")
    data = dataclasses.replace(config.data, seq_len=2048, global_batch=1)
    precision = dataclasses.replace(config.plan.precision, params="bfloat16")
    plan = config.plan.replace(mesh={"fsdp": 1}, precision=precision)
    model = dataclasses.replace(config.model, layers=WIDE_LAYERS)
    adapter = AdapterConfig(rank=RANK, targets="attn/*", base="nf4")
    found = inspect_run(
        config.replace(data=data, model=model, plan=plan, adapter=adapter),
        parse_target("h200:1x1"),
    )
    pairs = WIDE_LAYERS * PAIRS // LAYERS
    matrices = WIDE_LAYERS * (2 * D * D + 2 * D * 1024 + 3 * D * 28_672)
    tables = 2 * config.model.vocab * D
    assert matrices + tables > 129e9
    assert found.fits
    assert found.memory.total_bytes / GIB <= 80
    kept = matrices // 2 + 4 * matrices // 64 + 2 * tables + 4 * pairs
    assert found.memory.terms["parameters"] == pytest.approx(kept, rel=1e-3)
