"""A table of one's own, from a file: run if it can be, else refused by tick and stage."""

import dataclasses
import json

import jax
import pytest

from colossax.config import BatchConfig, Plan
from colossax.errors import PlanError
from colossax.pipeline import Kind, Op, checked, schedule, simulate
from colossax.pipeline.placing import packed
from colossax.step.stages.given import table_of
from tests.step import test_parallel_oracle as oracle
from tests.step.stages import test_stages as stages
from tests.step.stages.test_stages import devices_of, piped


def slower(table):
    """A table in which every tick is followed by one in which nobody does anything."""
    rest = ((),) * table.stages
    ticks = tuple(each for cells in table.ticks for each in (cells, rest))
    return dataclasses.replace(table, ticks=ticks)


def in_parts_on_first(table):
    """A table whose first stage goes back in two parts, in one tick."""

    def parts(op, stage):
        kinds = (Kind.INPUT, Kind.WEIGHT) if op.kind is Kind.BACKWARD and not stage else (op.kind,)
        return [dataclasses.replace(op, kind=kind) for kind in kinds]

    ticks = tuple(
        tuple(tuple(one for op in cell for one in parts(op, at)) for at, cell in enumerate(cells))
        for cells in table.ticks
    )
    return dataclasses.replace(table, ticks=ticks)


def turned(table):
    """A table whose chunks are numbered the other way."""
    last = table.chunks - 1

    def of(op):
        return dataclasses.replace(op, chunk=last - op.chunk)

    layout = tuple((stage, last - chunk) for stage, chunk in table.layout)
    ticks = tuple(tuple(tuple(map(of, cell)) for cell in cells) for cells in table.ticks)
    return dataclasses.replace(table, layout=layout, ticks=ticks)


def around_from(table, first):
    """A table whose first position is on another stage."""
    at = [(stage - first) % table.stages for stage in range(table.stages)]
    layout = tuple(((stage + first) % table.stages, chunk) for stage, chunk in table.layout)
    ticks = tuple(tuple(cells[stage] for stage in at) for cells in table.ticks)
    return dataclasses.replace(table, layout=layout, ticks=ticks)


OWN = {
    "every other tick empty, one stage in parts": (
        slower(in_parts_on_first(schedule("1f1b", 2, 3))),
        {"stage": 2, "tensor": 2},
    ),
    "from the third stage on, chunks the other way": (
        turned(around_from(schedule("interleaved", 4, 3, 2), 2)),
        {"stage": 4},
    ),
}


@pytest.mark.catches("stage-own-table-ignored")
@pytest.mark.parametrize(("table", "mesh"), OWN.values(), ids=OWN)
def test_a_table_of_ones_own_equals_one_device(tmp_path, table, mesh):
    path = tmp_path / "own.json"
    path.write_text(checked(table).to_json())
    own = piped(table.microbatches, chunks=table.chunks, table=str(path))
    stages.assert_equals_one_device("llama", Plan(mesh=mesh, segments=stages.FULL, **own), rows=12)


def refused(tmp_path, text, plan=None, **pipeline):
    path = tmp_path / "own.json"
    path.write_text(text)
    own = piped(3, **{"table": str(path), **pipeline})
    plan = Plan(mesh={"stage": 2}, **own, **(plan or {}))
    with pytest.raises(PlanError) as found:
        step = stages.step_of("llama", plan, devices_of(plan))
        jax.eval_shape(step.gradients, step.abstract, oracle.batch("llama", rows=6))
    return str(found.value).replace(str(path), "own.json")


def test_a_table_some_of_which_is_in_parts_is_priced_as_it_runs(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(in_parts_on_first(schedule("1f1b", 2, 8)).to_json())
    plan = Plan(mesh={"stage": 2}, **piped(8, table=str(path)))
    executed = simulate(table_of(plan.bind(jax.devices()[:2]), 8)).executed
    assert executed == {Kind.FORWARD: 9, Kind.BACKWARD: 0, Kind.INPUT: 9, Kind.WEIGHT: 9}


def test_a_table_is_of_the_microbatches_of_all_microsteps(tmp_path):
    table = schedule("1f1b", 2, 3).to_json()
    plan = {"batch": BatchConfig(accumulation=2)}
    assert refused(tmp_path, table, plan).endswith(
        "it is of 3 microbatches, and by plan.batch.accumulation 2 x plan.pipeline.microbatches 3"
        " the batch has 6; give a table of 6"
    )


@pytest.mark.catches("stage-own-table-unchecked")
def test_a_table_that_reads_what_nobody_wrote_is_refused_by_tick_and_stage(tmp_path):
    fields = json.loads(schedule("1f1b", 2, 3).to_json())
    fields["ticks"][1], fields["ticks"][2] = fields["ticks"][2], fields["ticks"][1]
    assert refused(tmp_path, json.dumps(fields)) == (
        "plan.pipeline.table own.json: schedule: tick 1, stage 0: backward of microbatch 0, chunk 0"
        " reads the gradient that stage 1, chunk 0 makes of microbatch 0 in tick 2; move it to a"
        " later tick"
    )


@pytest.mark.catches("stage-own-table-of-another-size")
def test_a_table_of_another_size_is_refused(tmp_path):
    for table, message in (
        (schedule("1f1b", 4, 3), "it is of 4 stages, and the plan has 2; give plan.mesh stage 4"),
        (schedule("zb_v", 2, 3), "2 chunks, and the plan has 1; give plan.pipeline.chunks 2, or"),
        (schedule("1f1b", 2, 4), "4 microbatches, and the plan has 3; give plan.pipeline.microb"),
    ):
        assert message in refused(tmp_path, table.to_json())


def test_what_is_no_table_is_refused(tmp_path):
    wrong = "plan.pipeline.table own.json: schedule: it is no JSON"
    assert refused(tmp_path, "{").startswith(wrong)
    missing = refused(tmp_path, "", table=str(tmp_path / "none.json"))
    assert "none.json: cannot be read" in missing and "or give plan.pipeline.schedule" in missing
    assert "positions 0 and 1 are both on stage 0" in refused(tmp_path, BLOCKS.to_json(), chunks=2)


def in_blocks(stage):
    """What a stage does whose chunks are neighbours in the model."""
    forward = [Op(Kind.FORWARD, m, chunk) for m in range(3) for chunk in range(2)]
    return [*forward, *(dataclasses.replace(op, kind=Kind.BACKWARD) for op in reversed(forward))]


BLOCKS = packed(3, ((0, 0), (0, 1), (1, 0), (1, 1)), list(map(in_blocks, range(2))))
