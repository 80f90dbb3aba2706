"""Plans with layers in host memory: what they take, and that no other placement is faster."""

import dataclasses
import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from colossax.aot import parse_target
from colossax.config import BatchConfig, OffloadConfig, Plan, Segment, preset
from colossax.errors import PlanError
from colossax.offload import Traffic
from colossax.planner.deciding.trial import Trial, with_shares
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, plan_run, predict
from colossax.planner.searching.bounds import divisors
from colossax.planner.searching.hosted import Tier, best_placed
from colossax.planner.searching.policies import Policy
from colossax.planner.searching.predicting import OnMesh, policies_of
from colossax.planner.searching.scored import Placed
from colossax.planner.searching.search import search, told
from colossax.planner.task_step import task_step
from colossax.recipes import recipe
from colossax.tasks import Task, task_of
from tests.planner.few_layers import few_layers

ONE, NODE = parse_target("h100:1x1"), parse_target("h100:1x8")
LAYERS = 4


@pytest.fixture(scope="module")
def llama():
    """Llama 3 8B, read once."""
    config = recipe("llama3_8b")
    return config, profile_task(task_of(config), config.plan, ONE)


@pytest.fixture(scope="module")
def shallow():
    """Four layers as wide as those of Llama 3 8B, with 8 rows a step."""
    config = few_layers("llama3_8b", LAYERS, 8)
    return config, profile_task(task_of(config), config.plan, ONE)


def tier_of(profile, plan, target=ONE):
    mesh = OnMesh(profile, plan.replace(mesh={"data": 1}), target)
    return mesh, Tier(mesh)


@pytest.mark.catches("stacks-of-gradients-stay")
@pytest.mark.catches("fetched-once-a-step")
@pytest.mark.parametrize("mesh", [{"data": 1}, {"fsdp": 2}])
@pytest.mark.parametrize(
    ("shares", "rows", "clip"),
    [
        ({"parameters": 1.0, "optimizer": 1.0, "activations": 1.0}, 8, True),
        ({"parameters": 0.5, "optimizer": 0.75, "activations": 0.25}, 2, True),
        ({"parameters": 1.0, "optimizer": 1.0}, 8, False),
        ({"parameters": 0.25, "optimizer": 1.0}, 1, False),
    ],
)
def test_host_memory_and_what_moves_are_those_of_the_step(mesh, shares, rows, clip):
    config = recipe("llama_tiny")
    plan = config.plan.replace(
        mesh=mesh, segments=(Segment(remat="full"),), batch=BatchConfig(microbatch=rows)
    )
    config = config.replace(
        model=dataclasses.replace(config.model, layers=LAYERS),
        data=dataclasses.replace(config.data, global_batch=8 * math.prod(mesh.values())),
        plan=plan,
    )
    task = task_of(config)
    options = dataclasses.replace(task.options, clip_norm=1.0 if clip else None)
    task = dataclasses.replace(task, options=options)
    placed = with_shares(plan, shares)
    devices = jax.devices()[: math.prod(mesh.values())]
    trial = Trial(lambda one: task_step(task, one, devices), placed, task.shapes, None)
    target = parse_target(f"h100:1x{len(devices)}")
    said = predict(profile_task(task, plan, target), placed, target)
    there, moved = trial.host_arrays(), trial.traffic()
    assert said.host == sum(there.values())
    every = functools.reduce(Traffic.plus, moved.values())
    assert said.moved == (sum(every.up), sum(every.down))


@pytest.mark.catches("more-optimizer-state-than-has-to")
@pytest.mark.catches("host-memory-without-end")
@pytest.mark.parametrize("seed", range(6))
def test_no_other_placement_of_a_policy_is_faster(shallow, seed):
    draw = random.Random(seed)
    config, profile = shallow
    profile = dataclasses.replace(profile, clips=bool(seed % 2))
    mesh, tier = tier_of(profile, config.plan)
    rows = draw.choice((1, 2, 8))
    (names,) = draw.sample(policies_of(mesh.profile), 1)
    one_row = mesh.tokens(1)
    policy = Policy(
        names=names,
        seconds=LAYERS * mesh.layer_seconds(0, names, one_row),
        bytes=LAYERS * mesh.kept(0, names, one_row),
    )
    mix = [[(LAYERS, names)]]

    def predicted(counts):
        kinds = dict(zip(("parameters", "optimizer", "activations"), counts, strict=True))
        return tier.predicted(rows, mix, 8, Placed(layers=LAYERS, **kinds))

    every = [predicted(counts) for counts in itertools.product(range(LAYERS + 1), repeat=3)]
    least = min(one.bytes.total for one in every)
    room = draw.uniform(0.98, 1.6) * least
    host = draw.choice((5e9, 20e9, math.inf))
    fitting = [one for one in every if one.bytes.total <= room and one.host <= host]
    found = tier.placed(rows, policy, 8, room=room, host=host)
    if not fitting:
        assert found is None
        return
    assert found is not None
    best = predicted((found.parameters, found.optimizer, found.activations))
    assert best.bytes.total <= room * (1 + 1e-9)
    assert best.host <= host
    assert best.seconds.total == pytest.approx(min(one.seconds.total for one in fitting))


@pytest.mark.catches("hops-of-every-row")
@pytest.mark.parametrize(
    ("name", "tensor", "room"),
    [
        ("llama3_8b", 1, 24e9),
        pytest.param("qwen", 8, 6e9, marks=pytest.mark.slow),
    ],
)
def test_no_other_policy_or_microbatch_is_faster(shallow, name, tensor, room):
    config, profile = shallow
    if name == "qwen":  # narrow, so that messages along `tensor` take longer than matmuls
        config = recipe("qwen3_0p6b")
        profile = profile_task(task_of(config), config.plan, NODE)
    plan = config.plan.replace(mesh={"tensor": tensor}, rules=preset("zero3+megatron_sp").rules)
    mesh = OnMesh(profile, plan, NODE if tensor > 1 else ONE)
    tier, calls, one_row = Tier(mesh), profile.kinds[0].calls, mesh.tokens(1)
    policies = [
        Policy(
            names=names,
            seconds=calls * mesh.layer_seconds(0, names, one_row),
            bytes=calls * mesh.kept(0, names, one_row),
        )
        for names in policies_of(mesh.profile)
    ]
    best, _ = best_placed(mesh, policies, (8, 32), room, 1e12)
    every = []
    for rows, chunks, policy in itertools.product(divisors(mesh.rows), (8, 32), policies):
        placed = tier.placed(rows, policy, chunks, room=room, host=1e12)
        if placed is not None:
            every.append(tier.predicted(rows, [[(calls, policy.names)]], chunks, placed))
    assert best is not None
    assert best.seconds == min(one.seconds.total for one in every)


@pytest.mark.catches("host-memory-is-not-searched")
@pytest.mark.catches("shares-are-not-in-the-plan")
def test_a_model_that_no_device_holds_is_planned_with_host_memory(llama):
    config, profile = llama
    assert not search(profile, config.plan, ONE, room=82e9).candidates
    (found,) = search(profile, config.plan, ONE, room=82e9, host=100e9).candidates
    offload = found.plan.offload
    assert offload.fused
    assert offload.optimizer == 1.0
    assert found.predicted.bytes.total <= 0.98 * 82e9
    assert 0 < found.predicted.host <= 100e9
    said = predict(profile, found.plan, ONE)
    assert said.bytes.total == pytest.approx(found.predicted.bytes.total)
    assert said.seconds.total == pytest.approx(found.predicted.seconds.total)
    assert "in host memory optimizer of all layers" in told(found)


@pytest.mark.catches("host-memory-though-devices-are-faster")
def test_what_devices_hold_stays_there(llama):
    config, profile = llama
    alone = search(profile, config.plan, NODE, room=82e9, count=3).candidates[0]
    both = search(profile, config.plan, NODE, room=82e9, count=3, host=100e9).candidates[0]
    assert both.plan == alone.plan
    assert both.predicted.host == 0


@pytest.mark.catches("enough-host-memory-is-a-guess")
def test_host_memory_that_is_said_to_do_does(llama):
    config, _ = llama
    subject = Subject.of(config)
    with pytest.raises(PlanError, match=r"--host-gb (\S+) \(of host memory") as problem:
        plan_run(subject, config.plan, ONE, verify=False)
    said = float(str(problem.value).split("--host-gb ")[1].split()[0])
    answer = plan_run(subject, config.plan, ONE, host_gb=said, verify=False)
    assert answer.plans[0].host_bytes <= said * 1e9


@pytest.mark.catches("shares-given-are-lost")
@pytest.mark.parametrize(
    ("offload", "host_gb", "words"),
    [
        (
            OffloadConfig(optimizer=1.0),
            None,
            r"give --host-gb \(--plan.offload auto beside --plan auto\), or",
        ),
        (OffloadConfig(auto=True), None, "give --host-gb"),
        (OffloadConfig(cpu_update=0.5, optimizer=1.0, parameters=1.0), 9.0, "cpu_update: found"),
        (OffloadConfig(clipping="two_pass"), 9.0, "clipping: found two_pass"),
        (OffloadConfig(optimizer=1.0, disk=1.0), 9.0, "--host-gb finds which of them are to be"),
    ],
)
def test_what_a_search_would_lose_is_refused(offload, host_gb, words):
    config = recipe("llama_tiny")
    plan = config.plan.replace(offload=offload)
    with pytest.raises(PlanError, match=words):
        plan_run(Subject.of(config), plan, ONE, host_gb=host_gb, verify=False)


class Plain(nnx.Module):
    """Without a layer stack."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


@pytest.mark.catches("what-cannot-move-is-planned-away")
def test_a_model_whose_layers_cannot_move_is_refused():
    def loss(model, batch):
        y = model(batch["x"])
        return {"y": (jnp.sum(y), jnp.float32(y.size), 1.0)}, {}

    task = Task(
        name="plain",
        make_model=Plain,
        optimizer=optax.adamw(1e-3),
        loss=loss,
        shapes={"x": jax.ShapeDtypeStruct((8, 32), jnp.float32)},
        batches=(),
        tokens=0,
        flops=0,
    )
    with pytest.raises(PlanError, match="cannot be: plan.offload: the model has no layer stack"):
        plan_run(Subject(task=task), Plan(), ONE, host_gb=9.0, verify=False)
