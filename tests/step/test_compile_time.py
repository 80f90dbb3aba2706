"""Depth costs nothing to compile: layers are one loop."""

import time

import jax
import numpy as np
import optax
import pytest

from colossax.config import Plan, Segment
from colossax.models import LlamaConfig, maker
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from colossax.typing import TEXT_BATCH_DIMS

LIMIT = 1.2

pytestmark = pytest.mark.usefixtures("nothing_kept")


def compile_step(layers: int, segments: tuple[Segment, ...] = (Segment(),)) -> float:
    """CPU-seconds from a model's factory to its compiled step."""
    started = time.process_time()
    config = LlamaConfig(vocab=128, embed=64, layers=layers, heads=4, kv_heads=2, mlp=96)
    plan = Plan(segments=segments)
    step = build_step(
        maker(config),
        optax.adamw(1e-3),
        next_token_loss(),
        plan,
        devices=jax.devices()[:1],
        clip_norm=1.0,
    )
    batch = {name: jax.ShapeDtypeStruct((2, 32), np.int32) for name in TEXT_BATCH_DIMS}
    batch["weights"] = jax.ShapeDtypeStruct((2, 32), np.float32)
    step.lower(step.abstract, batch).compile()
    return time.process_time() - started


def test_80_layers_compile_as_fast_as_8():
    compile_step(8)  # what only a process's first compilation pays
    shallow, deep = [], []
    for _ in range(4):  # on a busy machine the least of a few is what the work itself costs
        jax.clear_caches()
        shallow.append(compile_step(8))
        jax.clear_caches()
        deep.append(compile_step(80))
        if min(deep) <= LIMIT * min(shallow):
            return
    raise AssertionError(f"80 layers take {deep} CPU-seconds, 8 layers {shallow}")


def test_the_clock_sees_what_unrolling_costs():
    """Without the loop the test above would fail: 6 layers apart against 2."""
    jax.clear_caches()
    few = compile_step(2, (Segment(count=1),) * 2)
    jax.clear_caches()
    many = compile_step(6, (Segment(count=1),) * 6)
    assert many > LIMIT * few
