"""What is sent goes beside what is computed, as programs for GPUs are scheduled."""

import pytest

from colossax.aot import parse_target
from colossax.config import BatchConfig, LossConfig, Plan, Segment, preset
from colossax.planner import inspect_task
from colossax.tasks import task_of
from tests.planner.few_layers import few_layers

pytestmark = [pytest.mark.aot, pytest.mark.timeout(600)]


@pytest.mark.catches("xla-orders-as-it-likes")
@pytest.mark.catches("stages-broadcast")
@pytest.mark.parametrize(
    ("target", "mesh", "waited"),
    [
        ("h100:1x8", {"fsdp": 8}, 0.02),
        ("a100:1x8", {"fsdp": 8}, 0.02),
        ("h100:1x8", {"stage": 2, "fsdp": 4}, 0.02),
        ("h100:1x8", {"stage": 2, "data": 4}, 0.02),
        ("h100:1x8", {"stage": 2, "fsdp": 2, "tensor": 2}, 0.1),
    ],
)
def test_weights_gradients_and_sums_of_layers_go_beside_what_is_computed(target, mesh, waited):
    config, target = few_layers("llama3_8b", 8, 32), parse_target(target)
    name = "zero3+megatron" if "tensor" in mesh else "zero3"
    plan = preset(name, mesh=mesh, **settings(config.plan))
    found = inspect_task(task_of(config.replace(plan=plan)), plan, target)
    sent = [one for one in found.links if one.totals.axis in mesh and one.totals.axis != "stage"]
    sent = [one for one in sent if one.totals.kind != "all-to-all"]  # rows of the table
    alone = sum(one.exposed_s for one in sent)
    assert alone <= waited * sum(one.seconds for one in sent), found.links


def settings(plan: Plan) -> dict[str, object]:
    return {
        "segments": (Segment(remat="full"),),
        "precision": plan.precision,
        "loss": LossConfig(vocab_chunks=8),
        "batch": BatchConfig(microbatch=1),
    }
