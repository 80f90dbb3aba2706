"""Plans that are searched: against all that there are, and against those that people write."""

import dataclasses
import itertools
import json
import math
import random

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from colossax.aot import parse_target
from colossax.config import MESH_AXES, BatchConfig, LossConfig, Plan, Segment, preset
from colossax.errors import InputError, PlanError
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Asked, Subject, plan_run, planned, predict
from colossax.planner.searching.meshes import Limits, limits_of, meshes
from colossax.planner.searching.parts import Choices, Parts, abstract
from colossax.planner.searching.policies import Policy, fastest_mix
from colossax.planner.searching.search import search
from colossax.planner.searching.seconds import MATMULS, link_along
from colossax.recipes import recipe
from colossax.sharding import resolve
from colossax.tasks import Task, task_of

TARGET = parse_target("h100:1x8")


@pytest.fixture(scope="module")
def llama():
    """Llama 3 8B, read once."""
    config = recipe("llama3_8b")
    return config, profile_task(task_of(config), config.plan, TARGET)


@pytest.mark.catches("one-policy-for-all-layers")
@pytest.mark.catches("policies-over-their-room")
@pytest.mark.parametrize("seed", range(20))
def test_the_mix_of_policies_is_the_best_of_all(seed):
    draw = random.Random(seed)
    policies = [
        Policy(names=frozenset({str(at)}), seconds=draw.random(), bytes=float(draw.randint(1, 9)))
        for at in range(4)
    ]
    layers, room = 6, float(draw.randint(5, 60))
    every = itertools.product(range(layers + 1), repeat=4)
    counts = [each for each in every if sum(each) == layers]
    fitting = [
        sum(n * one.seconds for n, one in zip(each, policies, strict=True))
        for each in counts
        if sum(n * one.bytes for n, one in zip(each, policies, strict=True)) <= room
    ]
    found = fastest_mix(policies, layers, room)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert sum(n for n, _ in found) == layers
    assert sum(n * one.bytes for n, one in found) <= room
    # Two policies are the optimum but for rounding to whole layers: of one layer's worth.
    rounding = max(one.seconds for one in policies) - min(one.seconds for one in policies)
    assert min(fitting) <= sum(n * one.seconds for n, one in found) + 1e-12
    assert sum(n * one.seconds for n, one in found) <= min(fitting) + rounding


@pytest.mark.catches("parts-ignore-sizes")
@pytest.mark.parametrize("name", ["zero3", "zero3+megatron_sp", "zero2", "zero2+megatron_sp"])
def test_parts_are_where_the_rules_put_arrays(name):
    dims = {
        ("layers", "embed", "heads", "head_dim"): (32, 4096, 32, 128),
        ("layers", "embed", "kv_heads", "head_dim"): (32, 4096, 2, 128),
        ("layers", "mlp", "embed"): (32, 1536, 4096),
        ("embed", "vocab"): (4096, 50_257),
        ("layers", "experts", "expert_embed", "expert_mlp"): (4, 8, 512, 1024),
        ("layers", "embed"): (32, 4096),
    }
    choices = Choices(preset(name).rules)
    for sizes in itertools.product((1, 2, 4), (1, 3), (1, 2), (1, 4)):
        mesh = dict(zip(("fsdp", "ring", "ulysses", "tensor"), sizes, strict=True))
        count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        bound = abstract(preset(name, mesh=mesh), count)
        for role, (named, shape) in itertools.product(
            ("params", "weights", "gradients", "optimizer"), dims.items()
        ):
            parts = Parts(bound, choices)
            try:
                truth = resolve(bound, role, named, shape)
            except PlanError:
                with pytest.raises(PlanError):
                    parts.axes(role, named, shape)
                continue
            flat = [
                axis
                for entry in truth
                for axis in ((entry,) if isinstance(entry, str) else entry or ())
            ]
            assert parts.axes(role, named, shape) == tuple(flat), (mesh, role, named)


def test_meshes_are_all_that_divide():
    limits = Limits(rows=64, tokens=8192, heads=8, travels=True, experts=0, layers=32)
    found = list(meshes(TARGET, limits, {}))
    assert len({tuple(one.items()) for one in found}) == len(found)
    truth = 0
    for sizes in itertools.product((1, 2, 4, 8), repeat=6):
        truth += math.prod(sizes) == 8
    assert len(found) == truth
    assert all(one["expert"] == 1 for one in found)


@pytest.mark.catches("pins-are-not-held")
def test_what_is_pinned_or_forbidden_holds(llama):
    config, profile = llama
    asked = Asked(sizes={"tensor": 2}, forbidden=frozenset({"ring", "ulysses"}))
    found = search(profile, config.plan, TARGET, room=70e9, asked=asked)
    for one in found.candidates:
        assert one.plan.mesh["tensor"] == 2
        assert not {"ring", "ulysses"} & one.plan.mesh.keys()
    asked = Asked(dims={"embed": ("fsdp",)})
    found = search(profile, config.plan, TARGET, room=70e9, asked=asked)
    assert found.candidates
    for one in found.candidates:
        parts = Parts(abstract(one.plan, 8))
        assert "fsdp" in parts.axes("params", ("embed", "mlp"), (4096, 14336))


@pytest.mark.catches("one-link-for-all-axes")
def test_axes_within_a_node_have_its_link():
    target = parse_target("h100:4x8")
    parts = Parts(abstract(Plan(mesh={"data": 2, "fsdp": 4, "tensor": 4}), 32))
    assert link_along(target, parts, ("tensor",)).name == target.gpu.nvlink.name
    assert link_along(target, parts, ("fsdp",)).name == target.network.name
    assert link_along(target, parts, ("data", "fsdp")).name == target.network.name


def hand_written(target):
    """What people run Llama 3 8B with on a node: pure fsdp, with more recomputed or less, tensors
    split within it, and the rules of thumb that are a baseline: heads, mlp and vocab over all."""
    for remat in ("full", "qkv+attention"):
        for rows in (1, 2):
            yield {"fsdp": 8}, "zero3", remat, rows
    yield {"fsdp": 4, "tensor": 2}, "zero3+megatron_sp", "full", 2
    yield {"fsdp": 2, "tensor": 4}, "zero3+megatron_sp", "attention", 4
    yield {"tensor": 8}, "zero3+megatron", "full", 1
    yield {"data": 2, "fsdp": 4}, "zero3", "full", 1


def test_the_best_is_no_slower_than_what_people_write(llama):
    config, profile = llama
    room = 0.9 * TARGET.gpu.memory_bytes
    best = search(profile, config.plan, TARGET, room=room).candidates[0]
    assert best.predicted.bytes.total <= room
    for mesh, name, remat, rows in hand_written(TARGET):
        plan = preset(
            name,
            mesh=mesh,
            segments=(Segment(remat=remat),),
            precision=config.plan.precision,
            loss=LossConfig(vocab_chunks=8),
            batch=BatchConfig(microbatch=rows),
        )
        theirs = predict(profile, plan, TARGET)
        assert best.predicted.seconds.total <= theirs.seconds.total, (mesh, remat)


@pytest.mark.catches("recomputation-is-free")
def test_what_is_computed_again_takes_its_flops(llama):
    config, profile = llama
    plan = preset("zero3", mesh={"fsdp": 8}, precision=config.plan.precision)
    plan = plan.replace(batch=BatchConfig(microbatch=1))

    def compute(remat):
        one = predict(profile, plan.replace(segments=(Segment(remat=remat),)), TARGET)
        return one.seconds.compute

    (kind,) = profile.kinds
    qkv = sum(one.flops for one in kind.traced.maps[:3])
    rows, layers = config.data.global_batch // 8, 32
    seconds = rows * layers * qkv / (MATMULS * TARGET.gpu.bf16_flops)
    found = compute("attention+mlp") - compute("qkv+attention+mlp")
    assert found == pytest.approx(seconds, rel=1e-9)


@pytest.mark.catches("the-slowest-first")
@pytest.mark.catches("formulas-fill-more-than-the-room")
def test_candidates_fit_and_are_in_order(llama):
    config, profile = llama
    room = 40e9
    found = search(profile, config.plan, TARGET, room=room)
    seconds = [one.predicted.seconds.total for one in found.candidates]
    assert seconds == sorted(seconds)
    for one in found.candidates:
        assert one.predicted.bytes.total <= room
        again = predict(profile, one.plan, TARGET)
        assert again.bytes.total == pytest.approx(one.predicted.bytes.total)
        assert again.seconds.total == pytest.approx(one.predicted.seconds.total)


def test_two_searches_give_the_same_plans(llama):
    config, profile = llama
    first, second = (search(profile, config.plan, TARGET, room=60e9) for _ in range(2))
    assert [one.plan.hash for one in first.candidates] == [
        one.plan.hash for one in second.candidates
    ]
    for one in first.candidates:
        assert Plan.from_json(one.plan.to_json()) == one.plan
        assert Plan.from_json(json.loads(one.plan.to_json())) == one.plan
        assert all(axis in MESH_AXES for axis in one.plan.mesh)


class Compiler:
    """Stands for compilations: bytes are those of formulas, times a factor and with more."""

    def __init__(self, profile, *, factor=1.0, host_factor=1.0, refuse=()):
        self.profile, self.factor, self.refuse = profile, factor, refuse
        self.host_factor = host_factor
        self.plans = []

    def __call__(self, subject, plans, target, processes):
        return [self.one(plan, target) for plan in plans]

    def one(self, plan, target):
        self.plans.append(plan)
        if any(axis in plan.mesh for axis in self.refuse):
            return {"refused": "that axis is not for this model"}
        said = predict(self.profile, plan, target)
        total = self.factor * said.bytes.total
        return {
            "device_bytes": {"total": total, "terms": {"all": total}},
            "host_bytes": self.host_factor * said.host,
            "collectives": [{"seconds": 0.5, "exposed_s": 0.1}],
        }


@pytest.mark.parametrize(("factor", "budget"), [(0.7, 22.0), (1.0, 25.0), (1.3, 30.0)])
@pytest.mark.catches("over-budget-is-named")
@pytest.mark.catches("what-was-compiled-changes-nothing")
def test_no_plan_over_budget_is_named_and_room_is_used(llama, monkeypatch, factor, budget):
    config, profile = llama
    compiler = Compiler(profile, factor=factor)
    monkeypatch.setattr(planned, "compiled", compiler)
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    monkeypatch.setattr(planned, "target_devices", lambda _: [])
    answer = plan_run(Subject.of(config), config.plan, TARGET, top=3, device_gb=budget, processes=1)
    assert len(answer.plans) == 3
    assert answer.compiled == len(compiler.plans)
    for one in answer.plans:
        assert one.found is not None
        assert one.total_bytes <= budget * 1e9
        assert one.seconds.waited == pytest.approx(0.1)
        assert one.seconds.beside == pytest.approx(0.4)
    # Where programs take less than formulas say, layers keep more than those alone would let them.
    by_formula = search(profile, config.plan, TARGET, room=budget * 1e9).candidates[0]
    if factor < 1:
        assert answer.plans[0].seconds.compute < by_formula.predicted.seconds.compute
    if factor > 1:
        assert answer.plans[0].seconds.compute > by_formula.predicted.seconds.compute


@pytest.mark.catches("over-host-memory-is-named")
@pytest.mark.parametrize("factor", [0.9, pytest.param(1.0, marks=pytest.mark.slow)])
def test_no_plan_over_its_host_memory_is_named(llama, monkeypatch, factor):
    config, profile = llama
    one, compiler = parse_target("h100:1x1"), Compiler(profile, factor=factor)
    monkeypatch.setattr(planned, "compiled", compiler)
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    monkeypatch.setattr(planned, "target_devices", lambda _: [])
    answer = plan_run(Subject.of(config), config.plan, one, host_gb=100.0, top=1, processes=1)
    assert 0 < answer.plans[0].host_bytes <= 100e9
    assert answer.plans[0].to_json()["host_bytes"] == answer.plans[0].host_bytes
    # Programs leave a tenth of the device, and what they told lets more stay there.
    assert answer.plans[0].total_bytes > 0.85 * answer.room
    # Where they need more of the host, less is placed there.
    compiler = Compiler(profile, host_factor=1.2)
    monkeypatch.setattr(planned, "compiled", compiler)
    answer = plan_run(Subject.of(config), config.plan, one, host_gb=90.0, top=1, processes=1)
    assert any(1.2 * predict(profile, each, one).host > 90e9 for each in compiler.plans)
    assert 0 < answer.plans[0].host_bytes <= 90e9
    monkeypatch.setattr(planned, "compiled", Compiler(profile, host_factor=9.0))
    with pytest.raises(PlanError, match="nothing that is searched fits"):
        plan_run(Subject.of(config), config.plan, one, host_gb=90.0, top=1, processes=1)


@pytest.mark.catches("formulas-that-were-off-are-believed")
def test_a_refusal_after_compiling_names_what_was_compiled(llama, monkeypatch):
    config, profile = llama
    compiler = Compiler(profile, factor=3.0)
    monkeypatch.setattr(planned, "compiled", compiler)
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    monkeypatch.setattr(planned, "target_devices", lambda _: [])
    short = []

    def larger(*_, room, **__):
        short.append(room)

    monkeypatch.setattr(planned, "smallest_target", larger)
    with pytest.raises(PlanError) as refusal:
        plan_run(Subject.of(config), config.plan, TARGET, device_gb=24.0, processes=1, top=1)
    sizes = [predict(profile, each, TARGET).bytes.total for each in compiler.plans]
    said = float(str(refusal.value).split("--device-gb ")[1].split()[0])
    assert said == pytest.approx(3 * min(sizes) / 1e9, abs=0.1) and said >= 3 * min(sizes) / 1e9
    assert "takes, compiled)" in str(refusal.value)
    # More GPUs are looked for with what programs take beside formulas, not as if these were right.
    assert short == [pytest.approx(24e9 - 2 * min(sizes))]


@pytest.mark.catches("refused-is-named")
def test_what_the_library_refuses_gives_way_to_the_next(llama, monkeypatch):
    config, profile = llama
    monkeypatch.setattr(planned, "compiled", Compiler(profile, refuse=("ring",)))
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    monkeypatch.setattr(planned, "target_devices", lambda _: [])
    answer = plan_run(Subject.of(config), config.plan, TARGET, top=2, processes=1)
    assert answer.plans
    assert all("ring" not in one.plan.mesh for one in answer.plans)


def test_nothing_fits_says_what_needs_least(llama):
    config, _ = llama
    with pytest.raises(PlanError, match=r"nothing that is searched fits 9\.\d GiB .* needs least"):
        plan_run(Subject.of(config), config.plan, TARGET, device_gb=10.0, verify=False)


def test_two_counts_of_rows_may_fit_though_the_one_between_does_not(llama):
    """One microbatch adds no gradients up, so it may fit where two do not."""
    config, profile = llama
    config = config.replace(data=dataclasses.replace(config.data, global_batch=16))
    profile = dataclasses.replace(profile, rows=16)
    asked = Asked(sizes={"fsdp": 8})
    sizes = [predict(profile, _rows(config.plan, rows), TARGET).bytes.total for rows in (1, 2)]
    assert sizes[1] < sizes[0]
    found = search(profile, config.plan, TARGET, room=sum(sizes) / 2, asked=asked, margin=1.0)
    assert found.candidates[0].plan.batch.microbatch == 2


def _rows(plan, rows):
    full = (Segment(remat="full"),)
    own = preset("zero3", mesh={"fsdp": 8}, precision=plan.precision, segments=full)
    return own.replace(batch=BatchConfig(microbatch=rows), loss=LossConfig(vocab_chunks=32))


@pytest.mark.catches("frozen-parameters-are-summed")
def test_parameters_that_do_not_learn_send_no_gradients(llama):
    config, profile = llama
    frozen = dataclasses.replace(profile, learns=(False,) * len(profile.learns))
    plan = preset("zero3", mesh={"fsdp": 8}, precision=config.plan.precision)
    kinds = {one.kind for one in predict(frozen, plan, TARGET).sent}
    assert "all-gather" in kinds
    assert "reduce-scatter" not in kinds
    computed = predict(frozen, plan, TARGET).seconds.compute
    assert computed < predict(profile, plan, TARGET).seconds.compute


def test_dims_that_nothing_has_are_not_pinned(llama):
    config, _ = llama
    asked = Asked(dims={"embd": ("fsdp",)})
    with pytest.raises(InputError, match="--pin embd: is neither .* did you mean 'embed'"):
        plan_run(Subject.of(config), config.plan, TARGET, asked=asked, verify=False)
    asked = Asked(sizes={"tensor": 1}, dims={"vocab": ("fsdp",)})
    with pytest.raises(PlanError, match="has what is asked for, tensor=1, vocab=fsdp; pin less"):
        plan_run(Subject.of(config), config.plan, TARGET, asked=asked, verify=False)


@pytest.mark.catches("float8-fits-no-mesh")
def test_float8_is_refused(llama):
    config, _ = llama
    precision = dataclasses.replace(config.plan.precision, matmul="float8")
    with pytest.raises(PlanError, match="plan.precision: what float8 makes of a step's time"):
        plan_run(Subject.of(config), config.plan.replace(precision=precision), TARGET, verify=False)


@pytest.mark.catches("refusals-are-tried-for-ever")
def test_refusals_are_quoted_and_not_tried_for_ever(llama, monkeypatch):
    config, profile = llama
    compiler = Compiler(profile, refuse=("data", "fsdp", "ring", "tensor", "ulysses"))
    monkeypatch.setattr(planned, "compiled", compiler)
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    monkeypatch.setattr(planned, "target_devices", lambda _: [])
    with pytest.raises(PlanError, match=r"0 compiled, the last refusal: that axis is not for"):
        plan_run(Subject.of(config), config.plan, TARGET, top=2, processes=1)
    assert len(compiler.plans) <= 12


def test_what_is_near_the_budget_is_compiled_before_it_is_refused(llama, monkeypatch):
    config, profile = llama
    monkeypatch.setattr(planned, "compiled", Compiler(profile, factor=0.93))
    monkeypatch.setattr(planned, "profile_task", lambda *_: profile)
    monkeypatch.setattr(planned, "target_devices", lambda _: [])
    least = search(profile, config.plan, TARGET, room=1.0).smallest
    budget = 0.97 * least.predicted.bytes.total / 1e9
    answer = plan_run(Subject.of(config), config.plan, TARGET, top=1, device_gb=budget, processes=1)
    assert answer.plans[0].total_bytes <= budget * 1e9


class Plain(nnx.Module):
    """A model without layer stacks or names of dims."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def test_a_plain_model_of_ones_own_has_a_plan():
    def loss(model, batch):
        squares = jnp.sum((model(batch["x"]) - batch["y"]) ** 2)
        return {"squares": (squares, jnp.float32(batch["x"].shape[0]), 1.0)}, {}

    task = Task(
        name="plain",
        make_model=lambda rngs: Plain(rngs),
        optimizer=optax.adamw(1e-3),
        loss=loss,
        shapes={name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in ("x", "y")},
        batches=lambda *_: None,
        tokens=0,
        flops=0,
    )
    answer = plan_run(Subject(task=task), Plan(), TARGET, verify=False)
    assert answer.plans[0].plan.segments == (Segment(),)
    profile = profile_task(task, Plan(), TARGET)
    assert profile.ends_flops == 2 * 2 * 64 * 256


@pytest.mark.slow
def test_no_mesh_divides():
    config = recipe("llama3_8b")
    config = config.replace(data=dataclasses.replace(config.data, global_batch=7, seq_len=8191))
    asked = Asked(forbidden=frozenset({"tensor", "stage"}))
    said = (
        "no mesh of 8 devices with stage=1, tensor=1 divides 7 rows of 8191 tokens .*, or pin less"
    )
    with pytest.raises(PlanError, match=said):
        plan_run(Subject.of(config), config.plan, TARGET, asked=asked, verify=False)


def test_a_budget_beyond_the_gpu_is_refused(llama):
    config, _ = llama
    with pytest.raises(InputError, match="--device-gb: found 100, and a NVIDIA H100"):
        plan_run(Subject.of(config), config.plan, TARGET, device_gb=100.0, verify=False)


@pytest.mark.parametrize("name", ["vit_digits", "t5_stdlib", "moe_tiny", "clip_digits"])
@pytest.mark.sweep
def test_any_model_has_a_plan(name):
    config = recipe(name)
    target = parse_target("h100:1x4")
    answer = plan_run(Subject.of(config), config.plan, target, verify=False)
    assert answer.plans
    assert limits_of(profile_task(task_of(config), config.plan, target)).rows
