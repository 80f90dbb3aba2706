"""Parameters in bfloat16 rounded at random: any mesh is one device, resumed is uninterrupted."""

import jax
import numpy as np
import pytest

from colossax.config import OffloadConfig, PipelineConfig, Plan, Precision, Segment
from colossax.errors import PlanError
from colossax.models import maker
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.fresh import fresh_state
from tests.step.test_loss_scale import by_path
from tests.step.test_step import CONFIG, text_batch

AT_RANDOM = Precision(params="bfloat16", rounding="stochastic")
RATE = 1e-3

HOSTED = (Segment(offload="parameters+optimizer", remat="full"),)


def made(mesh, precision=AT_RANDOM, **plan):
    step = build_step(
        maker(CONFIG),
        adamw(RATE),
        next_token_loss(),
        Plan(mesh=mesh, precision=precision, **plan),
        devices=jax.devices()[: int(np.prod(list(mesh.values())))],
        clip_norm=0.5,
    )
    return step


def moved(step):
    """Parameters after a step, by path."""
    state, _ = step(fresh_state(CONFIG, step), text_batch())
    found = by_path(step.spec.infos, state["params"])
    return {path: leaf.astype(np.float32) for path, leaf in found.items()}


PLANS = {
    "segments": ({"fsdp": 1}, {"segments": (Segment(count=1), Segment(count=1))}),
    "fsdp_tensor": ({"fsdp": 4, "tensor": 2}, {}),
    "stack": ({"fsdp": 1}, {"segments": HOSTED}),
    "two_pass": ({"fsdp": 2}, {"segments": HOSTED, "offload": OffloadConfig(clipping="two_pass")}),
    "cpu": ({"fsdp": 1}, {"segments": HOSTED, "offload": OffloadConfig(cpu_update=1.0)}),
    "stages": ({"stage": 2, "fsdp": 2}, {}),
    "programs": ({"stage": 2, "fsdp": 2}, {"pipeline": PipelineConfig(cuts=(1, 1))}),
    "staged_host": ({"stage": 2}, {"segments": HOSTED}),
}


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_rounds_as_one_device(name):
    """Sums of gradients may differ in their last bit: of 2^16 roundings about one sees it.

    A gradient that is nothing but rounding may turn around, and with it a first step of Adam.
    """
    mesh, plan = PLANS[name]
    want, found = moved(made({"fsdp": 1})), moved(made(mesh, **plan))
    count = sum(leaf.size for leaf in want.values())
    for path, leaf in want.items():
        within = 2 * RATE + 2.0**-7 * np.abs(leaf)
        assert np.all(np.abs(found[path] - leaf) <= within), path
    assert sum(np.sum(found[path] != want[path]) for path in want) < 0.005 * count


@pytest.mark.sweep
@pytest.mark.catches("parameters-rounded-to-the-nearest")
def test_a_resumed_run_rounds_as_one_that_was_not_stopped(tmp_path):
    step, batch = made({"fsdp": 2}), text_batch()
    state, _ = step(fresh_state(CONFIG, step), batch)
    step.save(tmp_path, state)
    ends = []
    for start in (state, step.restore(tmp_path)):
        for _ in range(2):
            start, _ = step(start, batch)
        ends.append(by_path(step.spec.infos, start["params"]))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    nearest = made({"fsdp": 2}, Precision(params="bfloat16"))
    here, there = moved(step), moved(nearest)
    count = sum(leaf.size for leaf in here.values())
    assert sum(np.sum(here[path] != there[path]) for path in here) > 0.1 * count


def test_it_is_refused_where_nothing_is_rounded():
    with pytest.raises(PlanError, match="rounding: found 'stochastic', and parameters are kept in"):
        Precision(rounding="stochastic")
    with pytest.raises(PlanError, match="precision.rounding: unknown 'stocastic'; did you mean"):
        Precision(params="bfloat16", rounding="stocastic")
