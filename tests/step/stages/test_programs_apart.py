"""Backward passes of chunks that loop over layers, in two parts: counted in compiled programs."""

import functools

import jax
import numpy as np
import pytest

from colossax.config import Segment
from colossax.models import LlamaConfig, maker
from colossax.optim import adamw
from colossax.pipeline import Costs, schedule, simulate
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.aot.executed import executed_flops
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_programs import uneven
from tests.step.stages.test_stages import devices_of

MODEL = LlamaConfig(vocab=64, embed=128, layers=8, heads=4, kv_heads=4, mlp=384, max_seq=32)
MIDDLE = 1


def counted(name, remat):
    """FLOPs of a chunk in the middle, by its programs."""
    segments = (Segment(remat=remat),)
    plan = uneven({"stage": 2}, 2, 2, 2, 2, schedule=name, count=2, chunks=2, segments=segments)
    step = build_step(maker(MODEL), adamw(1e-2), next_token_loss(), plan, devices=devices_of(plan))
    real, found = jax.jit, {}

    def counting(fn, **options):
        jitted, chunk = real(fn, **options), getattr(getattr(fn, "__self__", None), "chunk", None)

        def call(*args):
            if chunk is not None and chunk.position == MIDDLE and fn.__name__ not in found:
                text = jitted.lower(*args).compile().as_text()
                found[fn.__name__] = executed_flops(text)
            return jitted(*args)

        return call

    state = step.init(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", counting)
        step(state, {name: np.array(x[:2]) for name, x in oracle.batch("llama").items()})
    return found


@functools.cache
def costs(remat):
    found = counted("zb_v", remat)
    names = {"forward": "forward", "input": "input_gradient", "weight": "weight_gradient"}
    return Costs(**{name: float(found[key]) for name, key in names.items()})


@pytest.mark.catches("programs-loops-whole")
def test_two_parts_are_as_long_and_together_what_one_is():
    found = costs("none")
    whole = counted("interleaved", "none")["backward"]
    assert found.input + found.weight == pytest.approx(whole, rel=0.01)
    assert found.weight > 0.45 * whole


@pytest.mark.catches("programs-loops-whole")
@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (4, 16), (8, 32)])
def test_zb_v_waits_for_half_as_long_as_1f1b(remat, stages, microbatches):
    bubbles = [
        simulate(schedule(name, stages, microbatches, chunks, "free"), costs(remat), "free").bubble
        for name, chunks in (("zb_v", 2), ("1f1b", 1))
    ]
    assert bubbles[0] < 0.5 * bubbles[1]
