"""Prompts that are continued together get what a generator says to each."""

import functools

import jax
import numpy as np
import pytest

import colossax
from colossax.config import OffloadConfig, Plan
from colossax.errors import InputError, PlanError
from colossax.inference import Generator, several
from colossax.inference.engine import sizing
from colossax.inference.engine.engine import Engine
from colossax.models import maker
from colossax.nn import describe
from colossax.scheduling import EngineRequest, Keep, SamplingConfig
from tests.cases import quick_first
from tests.fresh import fresh_params
from tests.inference.test_generator import LLAMA, build, single

EOS = 20
"""Said in some of the texts."""
PLANS = {
    "one": Plan(),
    "in host memory": Plan(offload=OffloadConfig(parameters=0.5)),
    "mesh": Plan(mesh={"fsdp": 2, "tensor": 2}),
    "host memory of a mesh": Plan(mesh={"fsdp": 4}, offload=OffloadConfig(parameters=1.0)),
    "replicas": Plan(mesh={"data": 3}),
    "replicas of a mesh": Plan(mesh={"data": 2, "fsdp": 2, "tensor": 2}),
    "replicas in host memory": Plan(mesh={"data": 2}, offload=OffloadConfig(parameters=0.5)),
    "stages": Plan(mesh={"stage": 3}),
}


def requests(count=20, longest=24):
    """More than there are seats, greedy and drawn, in no order of lengths."""
    noise = np.random.default_rng(5)
    return [
        EngineRequest(
            prompt=tuple(noise.integers(0, 128, int(noise.integers(1, longest))).tolist()),
            max_tokens=(20, 3, 11)[i % 3],
            sampling=SamplingConfig(temperature=(i % 2) * 0.9, seed=i),
        )
        for i in range(count)
    ]


@functools.cache
def alone():
    spec, params = build(LLAMA, single())
    generator = Generator(spec, single(), params, eos=EOS)
    return [
        generator.generate(
            one.prompt,
            max_tokens=one.max_tokens,
            temperature=one.sampling.temperature,
            seed=one.sampling.seed,
        )
        for one in requests()
    ]


def model(plan):
    bound = plan.bind(jax.devices()[: int(np.prod(list(plan.mesh.values()) or [1]))])
    with colossax.use(bound):
        spec = describe(maker(LLAMA))
    return spec, bound, fresh_params(LLAMA, spec, bound, jax.random.key(1))


@pytest.fixture
def engines(monkeypatch):
    """Those that were made."""
    made, start = [], Engine._start

    def seen(self, *given, **more):
        made.append(self)
        start(self, *given, **more)

    monkeypatch.setattr(Engine, "_start", seen)
    return made


@pytest.mark.catches("prompts-one-by-one")
@pytest.mark.catches("few-pages-for-many")
@pytest.mark.parametrize(
    "name", quick_first(PLANS, ["one", "in host memory", "replicas", "stages"])
)
def test_each_as_if_alone(name, engines):
    found = several(*model(PLANS[name]), requests=requests(), eos=EOS).run()
    assert found == alone()
    assert any(one.ended for one in found) and not all(one.ended for one in found)
    if name == "stages":
        assert not engines
        return
    assert len(engines) == PLANS[name].mesh.get("data", 1)
    each = [engine.stats.scheduler for engine in engines]
    assert all(stats.preemptions == 0 and stats.finished for stats in each)
    assert sum(stats.finished for stats in each) == len(found)
    # Steps one by one would be as many as tokens are said.
    steps = max(sum(engine.stats.steps.values()) for engine in engines)
    assert steps <= sum(len(one.tokens) for one in found) / 4


def test_few_short_prompts_take_one_program_and_long_ones_two():
    spec, bound, params = model(Plan())
    for asked, sizes in (
        (requests(1, 9), {"seats": 1, "mixed": 16, "decode": 16, "slots": 64, "pages": 4}),
        (requests(20), {"seats": 16, "mixed": 256, "decode": 16, "slots": 64}),
    ):
        one = several(spec, bound, params, requests=asked)
        found = vars(one._programs[0].sizes)
        assert {name: found[name] for name in sizes} == sizes
        one.run()
        kinds = {"mixed": 1, "decode": 0} if len(asked) == 1 else {"mixed": 1, "decode": 1}
        assert one._programs[0].compiled == kinds


def test_other_parameters_share_the_programs():
    spec, bound, params = model(Plan())
    asked = requests(3)
    one = several(spec, bound, params, requests=asked)
    other = one.with_params(jax.tree.map(lambda x: x * 1.5, params))
    assert one.run() != other.run() and one.run() == one.run()
    assert one._programs[0] is other._programs[0] and one._programs[0].compiled["mixed"] == 1


@pytest.mark.catches("no-look-at-memory")
def test_pages_are_as_many_as_there_is_room_for(monkeypatch, engines):
    spec, bound, params = model(Plan())
    asked = requests(8)
    one = several(spec, bound, params, requests=asked)
    whole, used = one._programs[0].sizes, sizing.used_bytes(one.lowered())
    page = sizing.cache_bytes(one._programs[0]) // whole.pages
    memory = (used - page * (whole.pages - 7)) / sizing.DEVICE_SHARE
    monkeypatch.setattr(sizing, "device_memory", lambda *_: memory)
    monkeypatch.setattr(sizing, "ROOMY", 0.0)  # most of what so small a model needs is temporaries
    less = several(spec, bound, params, requests=asked)
    found = less.run()
    assert whole.pages_a_seat <= less._programs[0].sizes.pages < whole.pages
    assert less.with_params(params)._programs[0] is less._programs[0]
    monkeypatch.setattr(sizing, "ROOMY", 1e9)
    assert [x.tokens for x in found] == [x.tokens for x in one.run()]
    assert one._programs[0].sizes == whole
    assert engines[0].stats.scheduler.finished == len(asked)
    monkeypatch.setattr(sizing, "ROOMY", 0.0)
    monkeypatch.setattr(sizing, "device_memory", lambda *_: memory - 8 * page)
    with pytest.raises(PlanError, match="pages: a device has .* GB are needed for one sequence"):
        several(spec, bound, params, requests=asked).run()


@pytest.mark.catches("room-for-what-nobody-holds")
def test_requests_that_let_go_need_no_room_for_all_of_a_sequence(monkeypatch):
    spec, bound, params = model(Plan())
    asked = [EngineRequest(prompt=(1, 2), max_tokens=60, keep=Keep(heavy=16, window=16))]
    one = several(spec, bound, params, requests=asked)
    sizes = one._programs[0].sizes
    assert sizes.pages < sizes.pages_a_seat
    memory = 1.001 * sizing.used_bytes(one.lowered()) / sizing.DEVICE_SHARE
    monkeypatch.setattr(sizing, "device_memory", lambda *_: memory)
    monkeypatch.setattr(sizing, "ROOMY", 0.0)
    assert several(spec, bound, params, requests=asked).run() == one.run()


@pytest.mark.catches("stages-draw-by-temperature")
@pytest.mark.catches("not-a-number-is-a-text")
def test_refusals():
    drawn = [EngineRequest(prompt=(1, 2), sampling=SamplingConfig(temperature=1.0, top_p=0.5))]
    with pytest.raises(InputError, match="top_p: found 0.5, and with stages tokens are drawn by"):
        several(*model(PLANS["stages"]), requests=drawn)
    spec, bound, params = model(Plan())
    with pytest.raises(InputError, match="max_tokens: a prompt of 1 and 64 more make 65 tokens"):
        several(spec, bound, params, requests=[EngineRequest(prompt=(1,), max_tokens=64)]).run()
    bad = jax.tree.map(lambda x: x * np.nan, params)
    asked = [EngineRequest(prompt=(1,), max_tokens=4)]
    with pytest.raises(InputError, match="prompt 1: the model gave numbers that are no logits"):
        several(spec, bound, bad, requests=asked).run()
