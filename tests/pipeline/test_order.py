"""Orders of unequal devices: all permutations tried, equal devices exchanged, time, refusals."""

import itertools
import random
import time

import pytest

from colossax.errors import InputError, PlanError
from colossax.pipeline import order
from colossax.pipeline.cuts import LayerCost, Link, StageDevice, cut_layers
from colossax.pipeline.order import order_devices
from tests.cases import quick_first
from tests.pipeline.chains import along, best_by_trying, chain, seeded

BLOCK = 10


def found_or_none(*given, **settings):
    try:
        return order_devices(*given, **settings)
    except PlanError:
        return None


def best_of_all_orders(layers, devices, links, settings):
    orders = itertools.permutations(range(len(devices)))
    found = [
        best_by_trying(layers, [devices[n] for n in numbers], along(links, numbers), **settings)
        for numbers in orders
    ]
    return min((seconds for seconds, _ in filter(None, found)), default=None)


def some_alike(rng, devices, links):
    """Of two kinds, and of one or two islands: some may be exchanged."""
    side = [rng.randrange(2) for _ in devices]
    near, far = Link(bytes_per_s=50.0), Link(bytes_per_s=rng.choice([5.0, 50.0]))
    links = [[near if a == b else far for b in side] for a in side]
    return [rng.choice(devices[:2]) for _ in devices], links


@pytest.mark.catches("order-alike")
@pytest.mark.catches("order-window")
@pytest.mark.catches("order-back")
@pytest.mark.catches("order-link-behind")
@pytest.mark.parametrize("tries", [0, order.FEW_TRIES])
@pytest.mark.parametrize("block", quick_first(range(20), 5))
def test_an_order_is_the_best_of_all_permutations(block, tries, monkeypatch):
    """At most 5 devices and 7 layers; with no tries before it the exact search stands alone."""
    monkeypatch.setattr(order, "FEW_TRIES", tries)
    for number, rng in enumerate(seeded(block, BLOCK)):
        layers, devices, links, settings = chain(rng, most_layers=7, most_devices=5)
        if number % 2:
            devices, links = some_alike(rng, devices, links)
        best = best_of_all_orders(layers, devices, links, settings)
        found = found_or_none(layers, devices, links=links, **settings)
        assert (found is None) == (best is None)
        if found is not None:
            assert found.exact
            assert sorted(found.devices) == list(range(len(devices)))
            assert found.cuts.slowest_s == pytest.approx(best)


@pytest.mark.catches("order-given")
@pytest.mark.parametrize("seed", range(10))
def test_it_is_never_slower_than_the_order_given(seed, monkeypatch):
    """Nor with a search that is bounded; of equally fast orders the one given stays."""
    monkeypatch.setattr(order, "EXACT_STATES", 0)
    monkeypatch.setattr(order, "TRIES", 3)
    rng = random.Random(seed)
    layers, devices, links, settings = chain(rng, most_layers=12, most_devices=6)
    devices = [StageDevice(speed=device.speed) for device in devices]
    found = order_devices(layers, devices, links=links, **settings)
    given = cut_layers(layers, devices, links=along(links, range(len(devices))), **settings)
    assert found.cuts.slowest_s <= given.slowest_s
    if found.cuts.slowest_s == given.slowest_s:
        assert found.devices == tuple(range(len(devices)))


def test_the_fast_device_goes_where_much_is():
    """A heavy layer at the end; the memory of the small device holds one layer anywhere."""
    layers = [LayerCost(seconds=s, state_bytes=1.0) for s in (1.0, 1.0, 1.0, 8.0)]
    devices = [StageDevice(speed=4.0), StageDevice(), StageDevice(memory_bytes=1.0)]
    found = order_devices(layers, devices)
    assert (found.devices[-1], found.cuts.layers[-1]) == (0, 1)
    assert found.cuts.slowest_s == 2.0
    assert cut_layers(layers, devices).slowest_s == 8.0


def test_slow_links_lie_where_they_cost_least():
    """Two islands of two, given crosswise: the slow link is crossed once."""
    near, far = Link(bytes_per_s=100.0), Link(bytes_per_s=1.0)
    links = [[near if a % 2 == b % 2 else far for b in range(4)] for a in range(4)]
    found = order_devices(
        [LayerCost(seconds=1.0, out_bytes=1.0)] * 8, [StageDevice()] * 4, links=links
    )
    assert [n % 2 for n in found.devices] in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert found.exact


def kinds_of_three(rng):
    kinds = [
        StageDevice(speed=speed, memory_bytes=memory)
        for speed, memory in ((1.0, 20.0), (0.6, 40.0), (0.3, 10.0))
    ]
    return [rng.choice(kinds) for _ in range(64)]


def test_64_devices_of_three_kinds_take_seconds():
    rng = random.Random(0)
    devices = kinds_of_three(rng)
    layers = [
        LayerCost(seconds=rng.uniform(0.5, 2), state_bytes=1.0, kept_bytes=0.01) for _ in range(160)
    ]
    start = time.process_time()
    found = order_devices(layers, devices)
    assert time.process_time() - start < 20
    assert found.cuts.slowest_s < cut_layers(layers, devices).slowest_s
    assert not found.exact


def test_a_bounded_search_finds_the_same_each_time(monkeypatch):
    monkeypatch.setattr(order, "TRIES", 50)
    rng = random.Random(0)
    devices = kinds_of_three(rng)
    layers = [LayerCost(seconds=rng.uniform(0.5, 2)) for _ in range(80)]
    assert order_devices(layers, devices) == order_devices(layers, devices)


@pytest.mark.catches("order-least")
def test_nothing_is_searched_where_nothing_can_be_faster(monkeypatch):
    """Equal layers and no bounds: every order is as fast as stages by speed allow."""
    seen = []
    changed = order._changed
    monkeypatch.setattr(order, "_changed", lambda *given: seen.append(1) or changed(*given))
    devices = [StageDevice(speed=1.0 + n % 3) for n in range(64)]
    found = order_devices([LayerCost(seconds=1.0)] * 160, devices)
    assert not seen
    assert found.exact
    assert found.devices == tuple(range(64))
    assert found.cuts.slowest_s == 3 / 2


def test_twelve_devices_that_all_differ_are_ordered_exactly():
    rng = random.Random(0)
    layers = [LayerCost(seconds=rng.uniform(0.5, 2), state_bytes=1.0) for _ in range(32)]
    devices = [
        StageDevice(speed=rng.uniform(0.3, 1), memory_bytes=rng.randint(2, 6)) for _ in range(12)
    ]
    start = time.process_time()
    found = order_devices(layers, devices)
    assert time.process_time() - start < 20
    assert found.exact
    assert found.cuts.slowest_s < cut_layers(layers, devices).slowest_s


LAYERS = [LayerCost(seconds=1.0, state_bytes=4e9)] * 4


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            {"links": [[Link()]]},
            InputError,
            r"links: found 1 rows of \[1\] for 2 devices; give 2 x",
        ),
        (
            {"links": [[Link(), Link()], [Link(bytes_per_s=1.0), Link()]]},
            InputError,
            "links: from device 0 to 1 another than back; give one for both ways",
        ),
        (
            {"devices": [StageDevice(memory_bytes=5e9)] * 2},
            PlanError,
            "stage 1: layers 1 to 3 .* need 12 GB and it has 5 GB.*; no order of these",
        ),
        ({"devices": [StageDevice()] * 5}, InputError, "stages: found 5 for 4 layers"),
    ],
)
def test_what_cannot_be_ordered_is_refused(change, error, sentence):
    with pytest.raises(error, match=sentence):
        order_devices(**{"layers": LAYERS, "devices": [StageDevice()] * 2, **change})
