"""Generation with layers in host memory, against the same model on the devices, bit for bit."""

import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import colossax
from colossax.checkpoint import Checkpointer, reading, slot_of
from colossax.cli import main
from colossax.config import BoundPlan, OffloadConfig, Plan, Precision, Segment
from colossax.errors import PlanError
from colossax.inference import (
    Chunk,
    Generator,
    Sampling,
    fit_layers,
    inference_plan,
    open_checkpoint,
)
from colossax.inference.fitting import _Trial
from colossax.inference.plan import parameters_alone
from colossax.models import LlamaConfig, config_to_json, maker
from colossax.nn import FlatTokens, describe
from colossax.offload import resolved_segments
from colossax.sharding import param_sharding, replicated
from tests.cases import quick_first
from tests.fresh import fresh_params
from tests.inference.test_generator import CONFIGS, LLAMA, PROMPT

AUTO = OffloadConfig(auto=True)
ALL = OffloadConfig(parameters=1.0)
PLACEMENTS = {
    "all": Plan(offload=ALL),
    "half": Plan(offload=OffloadConfig(parameters=0.5)),
    "layer by layer": Plan(offload=ALL, segments=(Segment(count=1),) * 3),
    "segments": Plan(offload=OffloadConfig(parameters=0.4), segments=(Segment(count=1), Segment())),
    "named": Plan(segments=(Segment(count=2, offload="parameters"), Segment())),
    "trained": Plan(
        offload=OffloadConfig(parameters=0.3, optimizer=0.6, activations=1.0),
        segments=(Segment(remat="full", offload="mlp", mlp_share=0.5),),
    ),
}
HOST_LAYERS = {"all": 3, "half": 2, "layer by layer": 3, "segments": 2, "named": 2, "trained": 1}
MESHES = {"one": {}, "fsdp8": {"fsdp": 8}, "tensor2 fsdp4": {"fsdp": 4, "tensor": 2}}


@functools.cache
def bound_to(mesh: str, placement: str | None = None) -> BoundPlan:
    plan = Plan() if placement is None else PLACEMENTS[placement]
    devices = jax.devices()[: 1 if mesh == "one" else 8]
    return plan.replace(mesh=MESHES[mesh]).bind(devices)


@functools.cache
def build(name: str, mesh: str, placement: str | None = None):
    bound = bound_to(mesh, placement)
    with colossax.use(bound):
        spec = describe(maker(CONFIGS[name]))
    return spec, bound, fresh_params(CONFIGS[name], spec, bound, jax.random.key(1))


def found_by(spec, bound, params) -> tuple[np.ndarray, tuple[int, ...]]:
    """Logits of a prompt by the cached pass, and tokens drawn by the generator."""
    generator = Generator(spec, bound, params, slots=48)

    def logits(params, cache, tokens):
        position = jnp.arange(len(PROMPT), dtype=jnp.int32)
        flat = FlatTokens(seat=jnp.zeros_like(position), position=position, slot=position)
        with colossax.use(generator.bound):
            model = spec.merge(params)
            hidden, _ = model.decode(tokens, cache, flat)
            return model.logits(hidden)

    run = jax.jit(logits, out_shardings=replicated(bound))
    logits = np.asarray(run(params, generator.program.cache.empty(), np.asarray(PROMPT, np.int32)))
    return logits, generator.generate(PROMPT, max_tokens=8, temperature=2.0, seed=3).tokens


@functools.cache
def expected(name: str, mesh: str):
    return found_by(*build(name, mesh))


def host_bytes(params) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params) if x.sharding.memory_kind != "device")


CASES = [
    *((name, "one", "all") for name in CONFIGS),
    *(("llama", "one", placement) for placement in PLACEMENTS if placement != "all"),
    ("gpt2", "one", "half"),
    *((name, mesh, "all") for name in ("llama", "gpt2") for mesh in MESHES if mesh != "one"),
    ("qwen3", "fsdp8", "half"),
    ("llama", "fsdp8", "layer by layer"),
    ("bloom", "tensor2 fsdp4", "segments"),
    ("llama", "tensor2 fsdp4", "trained"),
]


QUICK = (
    ("llama", "one", "all"),
    ("gpt2", "one", "half"),
    ("gpt2", "tensor2 fsdp4", "all"),
    ("qwen3", "fsdp8", "half"),
    ("llama", "fsdp8", "layer by layer"),
    ("bloom", "tensor2 fsdp4", "segments"),
    ("llama", "tensor2 fsdp4", "trained"),
)


@pytest.mark.parametrize(("name", "mesh", "placement"), quick_first(CASES, QUICK))
def test_logits_and_draws_are_those_of_the_model_on_the_devices(name, mesh, placement, devices):
    spec, bound, params = build(name, mesh, placement)
    logits, tokens = expected(name, mesh)
    assert logits.std() > 1
    there = found_by(spec, bound, params)
    np.testing.assert_array_equal(there[0], logits)
    assert there[1] == tokens
    matrices = sum(
        info.layer_count * math.prod(info.shape[info.stacked :])
        for info in jax.tree.leaves(spec.infos)
        if info.first_layer is not None and info.path.endswith("/w")
    )
    assert host_bytes(params) == 4 * matrices * HOST_LAYERS[placement] // 3


def test_the_cache_stays_on_the_device():
    spec, bound, params = build("llama", "one", "all")
    generator = Generator(spec, bound, params)
    cache = generator.program.cache.empty()
    assert {x.sharding.memory_kind for x in cache.values()} == {"device"}
    chunk = Chunk(ids=np.zeros(16, np.int32), start=np.int32(0), count=np.int32(1))
    sampling = Sampling(temperature=np.float32(0), seed=np.uint32(0))
    _, after = generator.program(params, cache, chunk, sampling)
    assert {x.sharding.memory_kind for x in after.values()} == {"device"}
    assert cache["k"].is_deleted()


def test_of_what_is_offloaded_only_parameters_are_served():
    plan = PLACEMENTS["trained"]
    served = inference_plan(plan)
    assert served.segments == (Segment(),) and served.offload == plan.offload
    named = Segment(remat="full", offload="optimizer+parameters+activations")
    assert inference_plan(Plan(segments=(named,))).segments == (
        Segment(offload="parameters+optimizer"),
    )
    alone = parameters_alone(plan)
    assert alone.segments == (Segment(),)
    assert alone.offload == OffloadConfig(parameters=0.3)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(
            segments=(Segment(remat="full", offload="parameters+optimizer"),),
            offload=OffloadConfig(cpu_update=0.5),
        ),
        Plan(offload=OffloadConfig(parameters=1.0, optimizer=1.0, disk=0.5)),
        Plan(offload=OffloadConfig(parameters=0.75, optimizer=1.0, cpu_update=0.5)),
    ],
)
def test_a_trained_model_is_served_as_it_was_cut(plan):
    def cuts(found):
        runs = resolved_segments(found, 6)
        return [(run.count, run.placement.params_on_host) for run in runs]

    assert cuts(inference_plan(plan)) == cuts(plan)
    alone = parameters_alone(plan)
    assert sum(count for count, there in cuts(alone) if there) == sum(
        count for count, there in cuts(plan) if there
    )
    assert alone.offload.disk == 0 and alone.offload.cpu_update == "off"


def test_a_model_on_the_device_is_not_run_by_a_plan_with_host_memory():
    spec, _, params = build("llama", "one")
    with pytest.raises(PlanError, match=r"wants layers 3 in host memory, the model was built with"):
        Generator(spec, bound_to("one", "all"), params).generate(PROMPT, max_tokens=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of the model in `build`, saved from one device."""
    folder = tmp_path_factory.mktemp("checkpoint")
    spec, _, params = build("llama", "one")
    infos, arrays = jax.tree.leaves(spec.infos), jax.tree.leaves(params)
    slots = [slot_of(info, "model/params") for info in infos]
    with Checkpointer(folder) as checkpointer:
        pairs = list(zip(slots, arrays, strict=True))
        checkpointer.save(1, pairs, {"model": config_to_json(LLAMA)})
    return folder


@pytest.mark.parametrize(
    ("placement", "mesh"),
    quick_first(itertools.product(["all", "segments", "trained"], MESHES), 4),
)
def test_a_checkpoint_is_read_into_host_memory(mesh, placement, checkpoint, devices, monkeypatch):
    placed = []
    original = jax.device_put

    def device_put(x, target, *rest, **options):
        if isinstance(x, np.ndarray):  # what is read, in contrast to what a program traces
            placed.append((target.memory_kind, x.nbytes))
        return original(x, target, *rest, **options)

    monkeypatch.setattr(reading.jax, "device_put", device_put)
    bound = bound_to(mesh, placement)
    model = open_checkpoint(checkpoint).load(bound.plan, list(bound.mesh.devices.flat))
    monkeypatch.undo()
    sharded = bound.mesh.size
    there = [size for kind, size in placed if kind == "pinned_host"]
    assert sum(there) == host_bytes(model.params) > 0
    # No device ever holds more than its part of what stays there.
    on_device = [
        x.sharding.shard_shape(x.shape)
        for x in jax.tree.leaves(model.params)
        if x.sharding.memory_kind == "device"
    ]
    sizes = [4 * math.prod(shape) for shape in on_device]
    here = [size for kind, size in placed if kind != "pinned_host"]
    assert {kind for kind, _ in placed} == {"device", "pinned_host"}
    assert sorted(here) == sorted(sizes * sharded)
    if placement == "all":
        assert max(here) == 4 * 128 * 64 // sharded  # the embedding
    spec, _, params = build("llama", mesh)
    logits, tokens = expected("llama", mesh)
    found = found_by(model.spec, model.bound, model.params)
    np.testing.assert_array_equal(found[0], logits)
    assert found[1] == tokens


# Budgets


SMALL = LlamaConfig(
    vocab=128, embed=64, layers=6, heads=8, kv_heads=2, mlp=512, max_seq=64, init_std=0.3
)
LAYER_BYTES = 4 * (3 * 64 * 512 + 64 * 64 * 2 + 2 * 64 * 16)


def generator_of(plan: Plan, mesh: str = "one") -> Generator:
    """Of shapes alone; plans that differ in budgets alone share one, which is compiled once."""
    offload = dataclasses.replace(plan.offload, device_gb=None, host_gb=None)
    plan = plan.replace(mesh=MESHES[mesh], offload=offload)
    return shared_generator(plan.bind(jax.devices()[: 1 if mesh == "one" else 8]))


@functools.cache
def shared_generator(bound: BoundPlan) -> Generator:
    with colossax.use(bound):
        spec = describe(maker(SMALL))
    params = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(
            info.shape, jnp.float32, sharding=param_sharding(bound, "params", info)
        ),
        spec.infos,
    )
    generator = Generator(spec, bound, params)
    generator.lowered = functools.cache(generator.lowered)
    return generator


def fit(mesh: str = "one", **offload):
    plan = Plan(offload=OffloadConfig(auto=True, **{"host_gb": 0.1, **offload}))
    return fit_layers(lambda plan: generator_of(plan, mesh), plan, SMALL.layers)


def least_bytes(mesh: str = "one") -> float:
    """Device bytes with every layer in host memory, where a GB is a byte."""
    with pytest.raises(PlanError) as refused:
        fit(mesh, device_gb=1.0, host_gb=1e9)
    return float(str(refused.value).split(" GB to generate")[0].split()[-1])


@pytest.fixture
def in_bytes(monkeypatch):
    """A GB is a byte."""
    monkeypatch.setattr("colossax.offload.budget.GB", 1)
    monkeypatch.setattr("colossax.offload.limits.GB", 1)


def test_memory_that_holds_everything_gets_everything():
    found = fit(device_gb=1.0)
    assert (found.resident, found.plan.offload.parameters, found.host_bytes) == (6, 0.0, 0)
    assert not found.plan.offload.auto and found.compiles == 2


@pytest.mark.parametrize("mesh", ["one", "fsdp8"])
def test_as_many_layers_stay_as_fit(mesh, in_bytes, devices):
    each = LAYER_BYTES // (8 if mesh == "fsdp8" else 1)
    least = least_bytes(mesh)
    make = functools.partial(generator_of, mesh=mesh)
    # The obvious way: all of them compiled.
    needs = [_Trial(make, Plan(offload=AUTO), 6, count).needs() for count in range(7)]
    for extra in (0, 0.9, 2.5, 4.9):
        budget = least + extra * each
        found = fit(mesh, device_gb=budget, host_gb=1e9)
        most = max(count for count in range(7) if needs[count].device_bytes <= budget)
        assert found.resident == most and found.compiles <= 3
        assert found.device_bytes == needs[most].device_bytes
        assert found.host_bytes == (6 - most) * each
        assert found.plan.offload.layers("parameters", 6) == 6 - most


def test_a_little_less_than_all_keeps_nearly_all(in_bytes):
    """All layers are tried and do not fit; the last try is not wasted on as tight a one."""
    least = least_bytes()
    for extra in (5.1, 5.4):
        found = fit(device_gb=least + extra * LAYER_BYTES, host_gb=1e9)
        assert found.resident >= 4
        assert found.device_bytes <= least + extra * LAYER_BYTES


def test_what_turns_out_too_large_is_corrected(in_bytes, monkeypatch):
    """Temporaries of a trial may be larger than those of the one before."""
    from colossax.inference import fitting

    original = fitting._Trial.needs
    grown = LAYER_BYTES // 2

    def needs(self):
        found = original(self)
        more = grown if found.host_bytes < 6 * LAYER_BYTES else 0
        return dataclasses.replace(found, device_bytes=found.device_bytes + more)

    monkeypatch.setattr(fitting._Trial, "needs", needs)
    least = least_bytes()
    found = fit(device_gb=least + 3.2 * LAYER_BYTES, host_gb=1e9)
    assert (found.resident, found.compiles) == (2, 3)
    grown = 9 * LAYER_BYTES  # then nothing but the first trial is known to fit
    found = fit(device_gb=least + 3.2 * LAYER_BYTES, host_gb=1e9)
    assert (found.resident, found.host_bytes) == (0, 6 * LAYER_BYTES)
    assert found.device_bytes == least and found.compiles == 2


def test_budgets_that_do_not_do_are_refused():
    with pytest.raises(PlanError, match=r"do not say how much memory they have; give how much"):
        fit()
    with pytest.raises(
        PlanError,
        match=r"device_gb: 0.000 GB may be used, and a device needs \d\.\d{3} GB to generate even",
    ):
        fit(device_gb=1e-5)
    with pytest.raises(PlanError, match=r"host_gb: 1000000.000 GB for each of 1 device\(s\)"):
        fit(device_gb=1.0, host_gb=1e6)


def test_a_host_budget_names_what_would_do(in_bytes):
    least = least_bytes()
    tight = {"device_gb": least + 1.9 * LAYER_BYTES}
    with pytest.raises(PlanError, match=r"of the host may be used for each device, and") as refused:
        fit(**tight, host_gb=3.5 * LAYER_BYTES)
    enough = float(str(refused.value).split("device_gb ")[1].split(" ")[0].rstrip(","))
    assert f"give host_gb {5 * LAYER_BYTES:.3f}" in str(refused.value)
    assert fit(**tight, host_gb=5.0 * LAYER_BYTES).resident == 1
    assert fit(device_gb=enough, host_gb=3.5 * LAYER_BYTES).resident == 3


def command(*words, capsys):
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_the_command_line_finds_what_stays_on_the_device(checkpoint, capsys):
    ids = ",".join(map(str, PROMPT))
    words = ("generate", checkpoint, "--prompt-tokens", ids, "--max-tokens", 8, "--json")
    code, plain, _ = command(*words, capsys=capsys)
    assert code == 0
    auto = ("--plan.offload", "auto", "--plan.offload.host_gb", 0.1)
    code, out, error = command(*words, *auto, "--plan.offload.device_gb", 1, capsys=capsys)
    assert code == 0 and json.loads(out) == json.loads(plain)
    assert error.startswith("plan.offload auto: 3 of 3 layers stay on the device; 0.")
    code, out, error = command(*words, "--plan.offload", "parameters=0.5", capsys=capsys)
    assert code == 0 and json.loads(out) == json.loads(plain)
    assert error.splitlines() == [f"step 1 of {checkpoint}"]
    code, out, error = command(*words, "--plan.offload", "auto", capsys=capsys)
    assert code == 2 and not out and error.count("\n") == 1
    assert "give how much of it may be used, as in --plan.offload.device_gb 8" in error


def test_a_loaded_model_with_auto_is_the_fitted_one(checkpoint):
    plan = Plan(offload=OffloadConfig(auto=True, device_gb=1.0, host_gb=0.1))
    model = open_checkpoint(checkpoint).load(plan, jax.devices()[:1], slots=48)
    assert model.bound.plan.offload.parameters == 0
    assert model.generator(slots=48).generate(PROMPT, max_tokens=2).tokens


def test_stacks_in_host_memory_need_no_copy_in_another_precision():
    """Parameters at rest in float32, computed with in bfloat16: cast on the device, row by row."""
    plan = Plan(offload=ALL, precision=Precision(compute="bfloat16", cache="bfloat16"))
    generator = generator_of(plan)
    jaxpr = generator.program.jitted.trace(*generator.arguments).jaxpr
    stacks = [v.aval for v in jaxpr.jaxpr.invars if "host" in str(v.aval)]
    assert len(stacks) == 7
    assert "f32<host>[6,64,512]" in str(jaxpr) and "bf16<host>" not in str(jaxpr)
