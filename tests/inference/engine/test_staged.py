"""An engine whose stages have programs of their own says what one device says."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from colossax.config import OffloadConfig, Plan
from colossax.errors import PlanError
from colossax.inference import Replicas, make_engine
from colossax.inference.engine import Engine
from colossax.inference.plan import unrolled, with_stage_programs
from colossax.models import GPT2Config, MixtralConfig
from colossax.models.hf_folder import read_params
from colossax.models.registry import maker
from colossax.nn import Decoder, describe, every, initialise
from colossax.scheduling import EngineRequest
from colossax.sharding import use
from tests.cases import quick_first
from tests.inference import test_caches as caches
from tests.inference.engine.test_engine import (
    SMALL,
    alone,
    compiled_while,
    engine,
    requests,
    tokens,
)
from tests.inference.test_generator import CONFIGS, GROUPED, LLAMA, SIZES, build, single
from tests.inference.weights.made import stored
from tests.models.test_parity import GOLDEN, expected

pytestmark = pytest.mark.slow

MESHES = {
    "stage2 tensor2": {"stage": 2, "tensor": 2},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage2 fsdp2 tensor2": {"stage": 2, "fsdp": 2, "tensor": 2},
    "stage2 data2 tensor2": {"stage": 2, "data": 2, "tensor": 2},
    "stage2 data2": {"stage": 2, "data": 2},
    "stage3 data2": {"stage": 3, "data": 2},
}
TIGHT_PAGES = 17
"""Of each engine: too few for two long requests."""


def bound_of(mesh, config=LLAMA, cuts=None):
    plan = unrolled(Plan(mesh=mesh), build(config, single())[0])
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return with_stage_programs(plan, plan.bind(devices), config.layers, cuts).bind(devices)


def made(mesh, config=LLAMA, cuts=None, **options):
    bound = bound_of(mesh, config, cuts)
    spec, params = build(config, bound)
    pages = TIGHT_PAGES * mesh["stage"]
    return make_engine(spec, bound, params, **SMALL | {"pages": pages} | options)


@pytest.mark.catches("stage-reads-rows-of-others")
@pytest.mark.catches("stage-hears-no-token")
@pytest.mark.catches("stages-one-after-another")
@pytest.mark.parametrize("name", quick_first(MESHES, ["stage2 tensor2"]))
def test_each_as_if_alone(name):
    """Three layers, on two stages in unequal parts; as many engines as stages go by turns."""
    mesh = MESHES[name]
    one = made(mesh, clock=lambda: 0.0)  # how long they wait decides who meets whose pages
    found = one.generate_all(requests())
    assert tokens(found) == alone("llama")
    assert isinstance(one, Replicas)
    assert len(one.engines) == mesh["stage"] * mesh.get("data", 1)
    stats = one.stats
    assert all(x.scheduler.finished for x in stats.each)
    assert stats.scheduler.finished == len(found) and stats.scheduler.referenced == 0
    programs = {id(x.program): x.program for x in one.engines}.values()
    assert len(programs) == mesh.get("data", 1)
    # Of each stage one for each kind, whoever runs them.
    expected = {"mixed": mesh["stage"], "decode": mesh["stage"]}
    assert all(program.compiled == expected for program in programs)
    if name == "stage2 tensor2":
        assert stats.scheduler.preemptions and stats.scheduler.reused


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama"])
def test_families(name):
    """Tied tables, learned positions, windows and slopes; and a stage that has one layer."""
    found = made({"stage": 2, "fsdp": 2}, CONFIGS[name], (1, 2)).generate_all(requests())
    assert tokens(found) == alone(name)


@pytest.mark.sweep
def test_experts():
    config = MixtralConfig(**GROUPED, experts=4, choices=2)
    found = made({"stage": 2, "expert": 2, "tensor": 2}, config).generate_all(requests())
    assert tokens(found) == tokens(engine(config).generate_all(requests()))


KINDS = {
    "sinks": caches.SINKS,
    "chunks": caches.CHUNKS,
    "latent": caches.LATENT,
    "in turns": dataclasses.replace(caches.SINKS, layers=8, full_layers=every(2, 8)),
}


@functools.cache
def decoder(name, stages, stacked=False):
    """A model of several kinds of layers, or of latents, on so many stages."""
    config = KINDS[name]

    def make(rngs):
        return Decoder(config, rngs=rngs)

    devices = jax.devices()[:stages]
    plan = Plan(mesh={"stage": stages})
    bound = plan.bind(devices)
    with use(bound):
        spec = describe(make)
    if not stacked:
        plan = unrolled(plan, spec)
    bound = with_stage_programs(plan, bound, config.layers).bind(devices)
    with use(bound):
        spec = describe(make)
    return spec, bound


def engine_of(name, stages, **options):
    spec, bound = decoder(name, stages)
    return make_engine(spec, bound, initialise(spec, bound, jax.random.key(1)), **options)


@pytest.mark.catches("stage-rows-by-the-stack")
@pytest.mark.parametrize("name", quick_first(["sinks", "chunks", "latent"], ["sinks"]))
def test_layers_of_several_kinds(name):
    """Each kind has a cache of its own, whose rows are counted anew in each stage."""
    asked = [
        dataclasses.replace(one, prompt=tuple(x % 64 for x in one.prompt), ends=())
        for one in requests()[:6]
    ]
    found = engine_of(name, 2, **SMALL | {"pages": 2 * TIGHT_PAGES}).generate_all(asked)
    assert tokens(found) == tokens(engine_of(name, 1, **SMALL).generate_all(asked))


LOADED = [
    ("gemma3", "own", {}),
    ("llama", "own", {}),
    ("llama", "int8", {}),
    ("gpt_oss", "int8", {}),
    ("llama", "own", {"offload": OffloadConfig(parameters=1.0)}),
]


@pytest.mark.parametrize(("case", "form", "more"), quick_first(LOADED, LOADED[:1]))
def test_a_checkpoint_through_stages(case, form, more, tmp_path):
    """What `transformers` says, of layers that are read by the stage that has them."""
    want = expected(case)
    prompt, greedy = tuple(want["prompt"].tolist()), want["greedy"].tolist()
    plan = Plan(mesh={"stage": 2, "fsdp": 2}, **more)
    opened = stored(tmp_path, case)
    model = opened.load(plan, jax.devices()[:4], unroll=True, weights=form)
    sizes = {"slots": len(prompt) + len(greedy), "mixed_tokens": 7, "seats": 2}
    one = model.engine(**sizes)
    assert len(one.engines) == 2
    asked = [EngineRequest(prompt=prompt, max_tokens=n) for n in (len(greedy), 3)]
    found = tokens(one.generate_all(asked))
    if form != "own":
        alone = opened.load(Plan(), jax.devices()[:1], unroll=True, weights=form)
        greedy = tokens(alone.engine(**sizes).generate_all(asked))[0]
    assert [list(x) for x in found] == [list(greedy), list(greedy[:3])]


def layers_of(one):
    return {info.first_layer for info in one if info.first_layer is not None}


@pytest.mark.catches("stage-has-everything")
@pytest.mark.catches("stage-caches-everything")
@pytest.mark.parametrize("config", [LLAMA, GPT2Config(**SIZES, mlp=96)], ids=["llama", "tied"])
def test_a_stage_has_its_own_layers_and_their_cache(config):
    """And what stands before or behind them; a table that is head too is on both ends."""
    one = made({"stage": 3}, config)
    infos = jax.tree.leaves(one.engines[0].program.spec.infos)
    program, own = one.engines[0].program, one.engines[0]._params["stages"]
    for number, (stage, params) in enumerate(zip(program.stages, own, strict=True)):
        (device,) = stage.bound.mesh.devices.flat
        assert all(x.sharding.device_set == {device} for x in params)
        read = [infos[at] for at in stage.places]
        assert layers_of(read) == {number}
        ends = {info.path for info in read if info.first_layer is None}
        tied = "head/w" not in {info.path for info in infos}
        assert ("embed/table" in ends) == (number == 0 or (tied and number == 2))
        assert any(path.startswith("norm/") for path in ends) == (number == 2)
        assert {x.shape[0] for x in jax.tree.leaves(stage.cache.abstract)} == {1}
    assert all(engine._params["stages"] is own for engine in one.engines)


def test_nothing_is_compiled_after_warm():
    one = made({"stage": 2, "tensor": 2})
    one.warm()
    assert not compiled_while(lambda: one.generate_all(requests()[:8]))


def test_seats_and_pages_are_shared():
    one = made({"stage": 2}, seats=5, pages=41)
    assert [(x.sizes.seats, x.sizes.pages) for x in one.engines] == [(3, 21)] * 2
    assert one.seats == 6
    assert len(made({"stage": 3}, seats=2).engines) == 2


@pytest.mark.catches("stages-of-what-reads-first")
def test_refusals():
    bound = bound_of({"stage": 2})
    spec, params = build(LLAMA, bound)
    with pytest.raises(PlanError, match="an engine runs all layers in one .* use make_engine"):
        Engine(spec, bound, params)
    whole = unrolled(Plan(mesh={"stage": 2}), spec).bind(jax.devices()[:2])
    with pytest.raises(PlanError, match="'stage': the plan has one program .*unroll=True"):
        make_engine(spec, whole, params)
    with pytest.raises(PlanError, match="layers of several kinds take turns in one run"):
        make_engine(*decoder("in turns", 2, stacked=True), {})
    three = Plan(mesh={"stage": 3}).bind(jax.devices()[:3])
    with pytest.raises(PlanError, match="'stage': 2 layers cannot be shared by 3 stages; give 2"):
        with_stage_programs(three.plan, three, 2)
    with pytest.raises(PlanError, match="cuts: 'auto' is found for training alone"):
        with_stage_programs(three.plan, three, 6, "auto")
    with use(single()):
        spec = describe(maker(read_params(GOLDEN / "t5")[0]))
    with pytest.raises(PlanError, match="the model reads a source, sound or images"):
        make_engine(spec, bound, params)
