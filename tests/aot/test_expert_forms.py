"""Forms in which tokens meet experts, by formula and in programs compiled for H100s."""

import dataclasses

import pytest

from colossax.aot import parse_target
from colossax.config import ExpertsConfig, LossConfig, Segment, preset
from colossax.planner import inspect_task
from colossax.planner.profiling import profile_task
from colossax.planner.searching import predict
from colossax.recipes import recipe
from colossax.tasks import task_of

pytestmark = pytest.mark.aot

GATHER = ExpertsConfig(dispatch="gather")
WEIGHTS = ExpertsConfig(dispatch="weights")
LEVELS = ExpertsConfig(dispatch="passes", hierarchical=True)


@pytest.mark.catches("gathered-tokens-take-no-memory")
@pytest.mark.catches("buffers-of-experts-are-as-full-as-loads")
@pytest.mark.parametrize(
    ("target", "mesh", "experts", "count", "travels"),
    [
        ("h100:1x8", {"fsdp": 2, "expert": 4}, GATHER, 8, set()),
        ("h100:1x8", {"fsdp": 4, "ring": 2}, WEIGHTS, 8, {"fsdp", "ring"}),
        ("h100:2x8", {"expert": 2, "tensor": 8}, LEVELS, 16, {"expert", "tensor"}),
    ],
)
def test_bytes_of_each_form_are_those_of_its_program(target, mesh, experts, count, travels):
    """Four layers of Mixtral 8x7B, two rows a device."""
    config, target = recipe("mixtral_8x7b"), parse_target(target)
    plan = preset(
        "zero3+megatron_sp" if "tensor" in mesh else "zero3",
        mesh=mesh,
        segments=(Segment(remat="full"),),
        precision=config.plan.precision,
        loss=LossConfig(vocab_chunks=8),
        experts=experts,
    )
    rows = 2 * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    data = dataclasses.replace(config.data, global_batch=rows)
    model = dataclasses.replace(config.model, layers=4, experts=count)
    task = task_of(config.replace(plan=plan, data=data, model=model))
    predicted = predict(profile_task(task, plan, target), plan, target)
    found = inspect_task(task, plan, target)
    assert predicted.bytes.total == pytest.approx(found.memory.total_bytes, rel=0.05)
    said = sum(predicted.microbatches * one.bytes for one in predicted.sent)
    said += sum(one.bytes for one in predicted.sent_once)
    truth = sum(link.totals.ring_bytes for link in found.links)
    assert said == pytest.approx(truth, rel=0.005)
    # Rows that travel axis by axis, along each of them: of experts, or of the table of tokens,
    # exchanged along the axes of a batch's rows and then along those of its positions.
    along: dict[str, float] = {}
    for one in predicted.sent:
        if one.kind == "all-to-all" and len(one.axes) == 1:
            along[one.axes[0]] = along.get(one.axes[0], 0.0) + one.bytes
    for axis, size in along.items():
        sums = [link.totals for link in found.links if link.totals.kind == "all-to-all"]
        there = sum(each.ring_bytes for each in sums if each.axis == axis)
        assert size == pytest.approx(there, rel=0.01), axis
    assert set(along) == travels
