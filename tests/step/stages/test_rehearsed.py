"""A step of a program per stage, dispatched without arrays: what it runs, holds and sends."""

import collections
import functools
import types

import jax
import pytest

from colossax.config import BatchConfig, Segment
from colossax.optim import adamw
from colossax.pipeline import Kind
from colossax.step.programs.rehearsed import rehearsed
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_programs import uneven
from tests.step.stages.test_stages import MODELS, devices_of, step_of

MESH, CUTS = {"stage": 2, "fsdp": 2}, (5, 3)
COUNT = 8
ROWS = 4 * COUNT


def plan_of(once=False, **more):
    plan = uneven(MESH, *CUTS, count=COUNT, gather="step" if once else "microbatch", **more)
    return plan.replace(batch=BatchConfig(reduce_once=once))


@functools.cache
def found(once=False, **more):
    """Llama of eight layers on two stages of two devices each; the programs are of CPUs."""
    return dispatched(plan_of(once, **more), ROWS)


def dispatched(plan, rows):
    """(step, what it was dispatched as, stages that compiled programs)."""
    step = step_of("llama", plan, devices_of(plan), adamw(1e-2))
    shapes = jax.eval_shape(lambda: oracle.batch("llama", rows=rows))
    compiled = []

    def compile(stage, lowered):
        compiled.append(stage)
        program = lowered.compile()
        return types.SimpleNamespace(
            stats=program.memory_analysis(), out_shardings=program.output_shardings
        )

    return step, rehearsed(step, step.abstract_batch(shapes), compile), compiled


@pytest.mark.catches("rehearsed-once-each")
def test_programs_run_as_often_as_the_table_says():
    _, all_of_it, compiled = found()
    for stage in all_of_it.stages:
        operations = all_of_it.table.operations()
        asked = collections.Counter(op.kind for _, at, op in operations if at == stage.number)
        ran = {one.name: one.times for one in stage.ran}
        assert ran["forward"] == asked[Kind.FORWARD] == COUNT
        assert ran["backward"] == asked[Kind.BACKWARD] == COUNT
        assert ran["conclude"] == 1
    assert [stage.layers for stage in all_of_it.stages] == [((0, 4),), ((5, 7),)]
    assert len(compiled) == len({id(one.program) for one in all_of_it.ran})


@pytest.mark.catches("rehearsed-state-of-all")
def test_a_stage_holds_what_a_real_one_holds():
    step, all_of_it, _ = found()
    state = step.init()
    batch = step.place(oracle.batch("llama", rows=ROWS))
    held = collections.Counter()
    for array in jax.tree.leaves((state, batch)):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    for stage in all_of_it.stages:
        devices = step.bound.stage(stage.number).mesh.devices.flat
        assert {held[device] for device in devices} == {stage.argument_bytes}


@pytest.mark.catches("rehearsed-sent-whole")
def test_between_stages_go_the_boundaries_of_the_microbatches():
    _, all_of_it, _ = found()
    size, rows = MODELS["llama"], ROWS // COUNT // MESH["fsdp"]
    boundary = rows * oracle.batch("llama", rows=ROWS)["tokens"].shape[1] * size.embed * 4
    assert all_of_it.sent_bytes.keys() == {(0, 1), (1, 0)}
    for link in ((0, 1), (1, 0)):
        beside = all_of_it.sent_bytes[link] - COUNT * boundary
        # Square norms, the loss and its weights: numbers, once a step.
        assert 0 <= beside < 100
        assert all_of_it.passed_bytes[link] == COUNT * boundary
        assert all_of_it.passed_messages[link] == COUNT


@pytest.mark.sweep
def test_the_loss_of_a_single_microbatch_is_sent_once():
    """Nobody adds it up, so that it leaves as the last chunk has made it."""
    _, all_of_it, _ = dispatched(uneven({"stage": 3}, 2, 3, 3, count=1), 4)
    assert all_of_it.messages[2, 0] > 0
    assert all_of_it.passed_messages == dict.fromkeys([(0, 1), (1, 2), (2, 1), (1, 0)], 1)


@pytest.mark.catches("rehearsed-kept-for-ever")
def test_what_waits_for_backward_is_of_the_schedule_and_not_of_the_microbatches():
    _, few, _ = found()
    size = MODELS["llama"]
    seq = oracle.batch("llama", rows=ROWS)["tokens"].shape[1]
    row = ROWS // COUNT // MESH["fsdp"] * seq * size.embed * 4
    saved = [stage.most["kept for backward"] for stage in few.stages]
    # Full recomputation keeps the input of each layer, two tables of the rotary embedding, which
    # are whole on each device, and the tokens. The first stage waits with two microbatches, the
    # last with one, of which it also keeps what its head needs.
    tables = 2 * ROWS // COUNT * seq * 4 + ROWS // COUNT // MESH["fsdp"] * seq * 4
    assert saved[0] == 2 * (CUTS[0] * row + tables)
    assert CUTS[1] * row <= saved[1] < (CUTS[1] + 4) * row
    # Gathered weights are not a part of it; the tables are then split as the tokens are.
    gathered = [one.most["kept for backward"] for one in found(once=True)[1].stages]
    assert gathered[0] == 2 * (CUTS[0] * row + tables) - 2 * ROWS // COUNT * seq * 4
    assert gathered[1] <= saved[1]


def test_recomputation_is_less_to_keep_and_more_to_do():
    less, more = found()[1], found(segments=(Segment(),))[1]
    for one, other in zip(less.stages, more.stages, strict=True):
        assert one.most["kept for backward"] < other.most["kept for backward"] / 3


@pytest.mark.catches("table-of-one-mesh")
def test_the_table_of_a_step_says_which_stage_holds_what():
    step, _, _ = found()
    lines = repr(step).splitlines()
    rows = {tuple(line.split()[:1])[0]: line for line in lines[2:]}
    assert "stage 0: " in rows["embed/table"] and "stage 1: " in rows["head/w"]
    ups = [line for line in lines if line.startswith("layers/mlp/up/w")]
    assert ["stage 0: " in line for line in ups] == [True, False]
    assert "5 16 24" in ups[0] and "3 16 24" in ups[1]
    assert "stage 1: " in step._repr_html_()
