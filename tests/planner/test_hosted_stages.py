"""Stages with host memory: what they take, what the step permits, and that nothing is faster."""

import functools
import itertools
import random

import numpy as np
import pytest

from colossax.aot import parse_target
from colossax.config import HOST_KINDS, BatchConfig, OffloadConfig, PipelineConfig, Segment
from colossax.errors import PlanError
from colossax.planner.profiling import profile_task
from colossax.planner.searching import predict
from colossax.planner.searching.asked import Asked
from colossax.planner.searching.bounds import divisors
from colossax.planner.searching.hosted_stages import StagedTier, best_staged
from colossax.planner.searching.meshes import rules_of
from colossax.planner.searching.parts import Parts, abstract
from colossax.planner.searching.predicting import OnMesh
from colossax.planner.searching.scored import Placed
from colossax.planner.searching.search import _mix, _policies, search
from colossax.step.offloaded.streaming import check_streamable
from colossax.step.stages.given import check_stages
from colossax.tasks import task_of
from tests.planner.few_layers import few_layers

FOUR, LAYERS = parse_target("h100:1x4"), 4


@pytest.fixture(scope="module")
def small():
    """Four narrow layers, with 16 rows a step."""
    config = few_layers("llama_tiny", LAYERS, 16)
    return config, profile_task(task_of(config), config.plan, FOUR)


def staged(plan, preset="zero3", once=False, **pipeline):
    return plan.replace(
        mesh={"stage": 2, "fsdp": 2},
        rules=rules_of(preset),
        batch=BatchConfig(microbatch=2, reduce_once=once),
        pipeline=PipelineConfig(**pipeline),
    )


@pytest.mark.catches("chunks-fetch-their-parameters")
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ({}, 6),
        ({"chunks": 2}, 4),
        ({"gather": "step"}, 4),
        ({"preset": "zero1", "once": True}, 1),
    ],
)
def test_placements_are_those_that_the_step_permits(small, how, count):
    config, profile = small
    plan = staged(config.plan, **how)
    tier = StagedTier(OnMesh(profile, plan, FOUR))
    searched = [
        tuple(getattr(one, kind) / LAYERS for kind in HOST_KINDS) for one in tier.placements()
    ]
    optimizer = task_of(config).optimizer
    permitted = set()
    for shares in itertools.product((0.0, 1.0), repeat=3):
        offload = OffloadConfig(**dict(zip(HOST_KINDS, shares, strict=True)))
        bound = abstract(plan.replace(offload=offload), FOUR.size)
        try:
            check_stages(bound)
            if any(shares):
                check_streamable(bound, profile.infos, profile.infos, optimizer)
        except PlanError:
            continue
        permitted.add(shares)
    assert len(searched) == count
    # Parameters alone, without what is kept, are what formulas do not know.
    assert set(searched) == {one for one in permitted if one[2] or not one[0]}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_fits_stages_and_host_is_faster(small, seed):
    draw = random.Random(seed)
    config, profile = small
    mesh = OnMesh(profile, staged(config.plan), FOUR)
    tier, policies, chunks = StagedTier(mesh), _policies(mesh), (1, 8)
    every = []
    for rows, (one, other) in itertools.product(
        divisors(mesh.rows), itertools.combinations_with_replacement(policies, 2)
    ):
        same = one.names == other.names
        mix = [[(2, one.names)] if same else [(1, one.names), (1, other.names)]]
        for pieces, placed in itertools.product(chunks, tier.placements()):
            if same or not placed.activations:
                every.append(tier.predicted(rows, mix, pieces, placed))
    least = min(one.bytes.total for one in every)
    room, host = draw.uniform(1.0, 1.5) * least, draw.uniform(0.3, 1.0) * every[-1].host
    fitting = [one for one in every if one.bytes.total <= room and one.host <= host]
    mix = functools.partial(_mix, mesh, policies)
    best, _ = best_staged(mesh, policies, chunks, room, host, mix)
    if not fitting:
        assert best is None
        return
    assert best is not None
    found = tier.predicted(best.rows, best.mix, best.chunks, best.placed)
    assert found.bytes.total <= room
    assert found.host <= host
    assert best.seconds == pytest.approx(found.seconds.total)
    assert best.seconds == pytest.approx(min(one.seconds.total for one in fitting))


@pytest.mark.catches("rings-of-one-slot-in-host-memory")
@pytest.mark.catches("stages-never-fetch-again")
def test_host_memory_and_traffic_in_closed_form(small):
    config, profile = small
    plan = staged(config.plan).replace(
        batch=BatchConfig(microbatch=2), segments=(Segment(remat="full"),)
    )
    said = predict(
        profile, plan.replace(offload=OffloadConfig(**dict.fromkeys(HOST_KINDS, 1.0))), FOUR
    )
    here = predict(profile, plan, FOUR)
    model, tokens = config.model, 2 * config.data.seq_len
    matrices = sum(
        info.shape[1] * info.shape[2] * info.shape[0]
        for info in profile.infos
        if info.total_layers and len(info.shape) == 3
    )
    assert matrices > 0
    others = [info for info in profile.infos if info.total_layers and len(info.shape) > 3]
    matrices += sum(functools.reduce(lambda a, b: a * b, info.shape) for info in others)
    params, ticks, slots = 4 * matrices / FOUR.size, 4 + 2 - 1, 2 * 2 - 1
    inputs = LAYERS // 2 * tokens * model.embed * np.dtype(plan.precision.compute).itemsize
    assert said.host == 3 * params + slots * inputs
    assert said.moved[0] == params * (2 * ticks + 1) + 2 * params + ticks * inputs
    assert said.moved[1] == 3 * params + ticks * inputs
    assert said.sent == here.sent
    assert said.seconds.bus > here.seconds.bus == 0


@pytest.mark.slow
@pytest.mark.catches("stages-over-their-host-memory")
@pytest.mark.catches("stages-have-no-host-memory")
@pytest.mark.catches("stages-update-during-backward")
def test_stages_are_searched_with_host_memory(small):
    config, profile = small
    asked = Asked(sizes={"stage": 2, "fsdp": 2, "tensor": 1})
    alone = search(profile, config.plan, FOUR, room=1.0, asked=asked)
    assert not alone.candidates
    assert alone.smallest is not None
    room = 0.9 * alone.smallest.predicted.bytes.total
    assert not search(profile, config.plan, FOUR, room=room, asked=asked, host=1.0).candidates
    found = search(profile, config.plan, FOUR, room=room, asked=asked, host=1e12).candidates
    assert found
    for one in found:
        offload = one.plan.offload
        assert offload.wanted
        assert not offload.fused
        assert {offload.parameters, offload.optimizer, offload.activations} <= {0.0, 1.0}
        check_stages(Parts(abstract(one.plan, FOUR.size)).bound)
        said = predict(profile, one.plan, FOUR)
        assert said.host == one.predicted.host > 0
        assert said.bytes.total == pytest.approx(one.predicted.bytes.total)
        assert said.seconds.total == pytest.approx(one.predicted.seconds.total)


@pytest.mark.catches("unknown-placements-are-predicted")
def test_what_formulas_do_not_know_of_stages_is_not_predicted(small):
    config, profile = small
    plan = staged(config.plan).replace(offload=OffloadConfig(parameters=1.0))
    with pytest.raises(PlanError, match="do not know in host memory parameters of all layers; cou"):
        predict(profile, plan, FOUR)


def test_what_is_in_host_memory_is_told():
    placed = Placed(layers=LAYERS, optimizer=LAYERS, activations=LAYERS, staged=True)
    assert placed.shown == "in host memory optimizer of all layers, activations of all layers"
