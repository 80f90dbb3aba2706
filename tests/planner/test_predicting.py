"""Plans as they are, predicted: those that are written by hand too."""

import pytest

from colossax.aot import parse_target
from colossax.config import Plan, Segment, preset
from colossax.planner.profiling import profile_task
from colossax.planner.searching import predict
from colossax.recipes import recipe
from colossax.tasks import task_of

TARGET = parse_target("h100:1x8")


@pytest.mark.catches("names-that-layers-lack")
def test_layers_keep_those_names_that_they_give():
    """A mixture names nothing of its experts' hidden units, and `none` keeps all that has a name"""
    config = recipe("moe_tiny")
    profile = profile_task(task_of(config), Plan(), TARGET)
    plan = preset("zero3", mesh={"fsdp": 8})

    def predicted(*remats):
        counts = (2, -1)[-len(remats) :]
        runs = tuple(
            Segment(count=count, remat=remat) for count, remat in zip(counts, remats, strict=True)
        )
        return predict(profile, plan.replace(segments=runs), TARGET)

    assert predicted("none") == predicted("qkv+attention+mlp") == predicted("qkv+attention")
    assert predicted("mlp") == predicted("full")
    assert predicted("mlp", "none") == predicted("full", "qkv+attention")
    assert predicted("full").bytes.kept < predicted("none").bytes.kept
