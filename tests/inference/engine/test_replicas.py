"""Engines that share requests give each the tokens that it has alone."""

import dataclasses

import jax
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError
from colossax.inference import Replicas, make_engine
from colossax.inference.engine import Engine
from colossax.inference.plan import unrolled
from colossax.models import MixtralConfig
from colossax.scheduling import Emitted, EngineRequest
from tests.cases import quick_first
from tests.inference.engine.test_engine import (
    SMALL,
    alone,
    compiled_while,
    engine,
    requests,
    tokens,
)
from tests.inference.test_generator import GROUPED, LLAMA, build, single

pytestmark = pytest.mark.slow

MESHES = {
    "data2": {"data": 2},
    "data2 tensor2": {"data": 2, "tensor": 2},
    "data2 fsdp2 tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "data4 fsdp2": {"data": 4, "fsdp": 2},
    "data8": {"data": 8},
}
TIGHT = SMALL | {"seats": 3, "pages": 17}


def bound_of(mesh, config=LLAMA):
    plan = unrolled(Plan(mesh=mesh), build(config, single())[0])
    return plan.bind(jax.devices()[: int(np.prod(list(mesh.values())))])


def made(mesh, config=LLAMA, **options):
    bound = bound_of(mesh, config)
    spec, params = build(config, bound)
    return make_engine(spec, bound, params, **TIGHT | options)


@pytest.mark.catches("replicas-tell-their-own-numbers")
@pytest.mark.parametrize("name", quick_first(MESHES, ["data2 tensor2"]))
def test_each_as_if_alone(name):
    """Pages are shared and run out within each; all of them have something to do."""
    one, seated = made(MESHES[name]), []
    one.began = seated.extend
    found = one.generate_all(requests())
    assert tokens(found) == alone("llama")
    stats = one.stats
    assert len(stats.each) == MESHES[name]["data"] and all(x.steps["decode"] for x in stats.each)
    assert sum(x.scheduler.finished for x in stats.each) == stats.scheduler.finished == len(found)
    assert set(seated) == set(range(len(found)))
    assert len(seated) == len(found) + stats.scheduler.preemptions
    assert stats.scheduler.referenced == 0 and not one.busy
    assert all(x.program.compiled == {"mixed": 1, "decode": 1} for x in one.engines)
    if name == "data2 tensor2":
        assert all(x.scheduler.preemptions and x.scheduler.reused for x in stats.each)


@pytest.mark.sweep
def test_experts():
    config = MixtralConfig(**GROUPED, experts=4, choices=2)
    found = made({"data": 2, "expert": 2, "tensor": 2}, config).generate_all(requests())
    assert tokens(found) == tokens(engine(config).generate_all(requests()))


def test_one_place_along_data_is_one_engine():
    assert isinstance(made({"tensor": 2}), Engine) and isinstance(made({"data": 2}), Replicas)


@pytest.mark.catches("replicas-copy-parameters")
def test_parameters_are_where_they_were():
    """No second copy: the arrays of an engine are the memory of those that it was given."""
    bound = bound_of({"data": 2, "fsdp": 2})
    spec, params = build(LLAMA, bound)
    one = make_engine(spec, bound, params, **TIGHT)
    given = {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
    }
    devices = set()
    for each in one.engines:
        for leaf in jax.tree.leaves(each._params):
            for shard in leaf.addressable_shards:
                assert (shard.device, shard.data.unsafe_buffer_pointer()) in given
                devices.add(shard.device)
    assert devices == set(bound.mesh.devices.flat)


class Told(Engine):
    """An engine that notes what it is asked; its step is over when somebody says so."""

    waits, busy, seats = False, True, 1

    def __init__(self, ahead=(0, 0), log=None):
        self.order, self.log, self.added = ahead, [] if log is None else log, []

    def check(self, request, constraint=None):
        if not request.prompt:
            raise InputError("prompt: it is empty")

    def ahead(self, request):
        return self.order

    def add(self, request, constraint=None):
        self.added.append(request)
        return len(self.added) - 1

    def send(self):
        self.log.append(("send", self))

    def land(self):
        if not self.busy:
            return []
        self.log.append(("land", self))
        self.busy = False
        return [Emitted(0, token=5, ended="length")]


def front(*engines):
    return Replicas(single(), engines)


REQUEST = EngineRequest(prompt=(1, 2), max_tokens=4)


@pytest.mark.catches("replicas-wait-one-by-one")
def test_all_are_on_their_way_before_one_is_waited_for():
    log = []
    slow, quick = Told(log=log), Told(log=log)
    one = front(slow, quick)
    quick.order = (1, 0)
    first = one.add(REQUEST)
    slow.order = (2, 0)
    second = one.add(REQUEST)
    slow.waits = True
    assert one.step() == [Emitted(second, token=5, ended="length")]
    assert log == [("send", slow), ("send", quick), ("land", quick)]
    slow.waits = False
    assert [x.request for x in one.step() if x.request == first] == [first]


@pytest.mark.catches("replicas-take-turns")
def test_a_request_goes_where_least_is_ahead_of_it():
    busy, free, freer = Told((40, 1)), Told((8, 3)), Told((8, 2))
    front(busy, free, freer).add(REQUEST)
    assert [len(x.added) for x in (busy, free, freer)] == [0, 0, 1]
    with pytest.raises(InputError, match="prompt"):
        front(busy).add(dataclasses.replace(REQUEST, prompt=()))


def test_who_begins_alike_goes_where_its_pages_are():
    """And elsewhere, once those who wait there would cost more than to compute the prefix."""
    one = made({"data": 2}, seats=2, pages=64, mixed_tokens=8)
    first, other = requests()[0].prompt[:8] * 4, tuple(range(100, 120))
    one.generate_all([EngineRequest(prompt=x, max_tokens=2) for x in (first, other)])
    held = [engine.stats.scheduler.cached for engine in one.engines]
    assert all(held)
    begin = EngineRequest(prompt=(*first, 9), max_tokens=8)
    numbers = [one.add(begin) for _ in range(8)]
    places = [one._places[number][0] for number in numbers]
    assert places[:2] == [0, 0] and 1 in places
    told = []
    while one.busy:
        told += one.step()
    assert {x.request for x in told} == set(numbers)


@pytest.mark.catches("replicas-cancel-another")
def test_a_cancelled_request_leaves_its_own_seat():
    one = made({"data": 2}, pages=64)
    asked = [EngineRequest(prompt=(i, 2, 3), max_tokens=30) for i in range(4)]
    numbers = [one.add(x) for x in asked]
    told = one.step()
    one.cancel(numbers[1])
    one.cancel(999)
    while one.busy:
        told += one.step()
    ends = {x.request: x.ended for x in told if x.ended}
    assert ends == {n: "cancelled" if n == numbers[1] else "length" for n in numbers}
    one.cancel(numbers[0])


def test_nothing_is_compiled_after_warm():
    one = made({"data": 2, "tensor": 2})
    one.warm()
    assert not compiled_while(lambda: one.generate_all(requests()))
