"""The picture of inspections has the schedules of their stages."""

import dataclasses

import pytest
from matplotlib.image import imread

from colossax.pipeline import Kind, Op, schedule, simulate
from colossax.pipeline.picture import color
from colossax.planner.counting.inspection_plot import plot_inspections
from colossax.planner.counting.stage_cost import StageCost
from tests.pipeline.test_picture import share
from tests.planner.test_inspection import inspection


def staged(name):
    table = schedule(name, 4, 8)
    layers = tuple(((stage, stage),) for stage in range(4))
    cost = StageCost(schedule=name, table=table, report=simulate(table), layers=layers)
    return dataclasses.replace(inspection(None), pipeline=cost)


@pytest.mark.catches("plot-without-schedule")
def test_each_schedule_is_drawn_once_below_the_bars(tmp_path):
    path = tmp_path / "all.png"
    plot_inspections({"none": inspection(None)}, path)
    bars = imread(path).shape[0]
    plot_inspections({"a": staged("1f1b"), "b": staged("1f1b")}, path)
    one = imread(path).shape[0]
    assert share(path, color(Op(Kind.BACKWARD, 0))) > 0.01
    assert share(path, color(Op(Kind.INPUT, 0))) == 0
    plot_inspections({"a": staged("1f1b"), "b": staged("zb_h1")}, path)
    assert bars < one < imread(path).shape[0]
    assert share(path, color(Op(Kind.INPUT, 0))) > 0.01


def test_the_sentence_says_what_waits_for_weight_gradients():
    cost = staged("zb_h1").pipeline
    assert cost is not None
    assert cost.line.endswith(
        "room for 7 microbatches that wait for backward, 4 wait for their weights' gradients"
    )
    assert "20 % of its time in vain" in cost.line
    assert cost.to_json(1)["pipeline"]["pending"] == 4
    v = staged("zb_v").pipeline
    assert v is not None and "22 forward passes for 16, 20 % of its time in vain" in v.line
    plain = staged("1f1b").pipeline
    assert plain is not None and plain.line.endswith(
        "room for 7 microbatches that wait for backward"
    )
