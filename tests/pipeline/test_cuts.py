"""Cuts of layers into unequal stages: all cuts tried by hand, memory, refusals, time."""

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.errors import InputError, PlanError
from colossax.pipeline.cuts import LayerCost, Link, StageDevice, cut_layers, even_layers
from tests.cases import quick_first
from tests.pipeline.chains import along, best_by_trying, chain, of_stages, seeded

BLOCK = 50
BLOCKS = 1000 // BLOCK


def cut_or_none(layers, devices, **settings):
    try:
        return cut_layers(layers, devices, **settings)
    except PlanError:
        return None


@pytest.mark.catches("cuts-send")
@pytest.mark.catches("cuts-in-flight")
@pytest.mark.catches("cuts-head")
@pytest.mark.catches("cuts-uneven")
@pytest.mark.catches("cuts-empty")
@pytest.mark.parametrize("block", quick_first(range(BLOCKS), 5))
def test_cuts_are_the_best_of_all_there_are(block):
    """At most 12 layers on 4 devices, all cuts tried; what a stage takes is computed anew."""
    refused = 0
    for rng in seeded(block, BLOCK):
        layers, devices, links, settings = chain(rng, most_layers=12, most_devices=4)
        settings["links"] = along(links, range(len(devices)))
        best = best_by_trying(layers, devices, **settings)
        found = cut_or_none(layers, devices, **settings)
        refused += best is None
        assert (found is None) == (best is None)
        if found is None:
            continue
        assert (found.slowest_s, sum(s * s for s in found.modelled_s)) == pytest.approx(best)
        bounds = [0, *itertools.accumulate(found.layers)]
        seconds, sizes = zip(*of_stages(bounds, layers, devices, **settings), strict=True)
        assert found.modelled_s == pytest.approx(seconds)
        assert found.modelled_bytes == sizes
        for size, device in zip(sizes, devices, strict=True):
            assert device.memory_bytes is None or size <= device.memory_bytes
    assert 0 < refused < BLOCK / 2


def equal(count, **given):
    return [LayerCost(seconds=1.0, **given)] * count


def test_a_device_twice_as_fast_gets_twice_the_layers():
    found = cut_layers(equal(12), [StageDevice(speed=s) for s in (1.0, 2.0, 1.0)])
    assert found.layers == (3, 6, 3)
    assert found.modelled_s == (3.0, 3.0, 3.0)
    assert (found.even, found.modelled_even_s) == ((4, 4, 4), 4.0)
    assert found.modelled_gain == pytest.approx(4 / 3)
    assert found.line == (
        "layers 3,6,3, modelled 3 s for the slowest stage, a modelled 1.33 times as fast as cut"
        " evenly (4,4,4)"
    )


def test_half_of_the_devices_at_half_speed_gain_at_least_1_3():
    devices = [StageDevice(speed=1.0)] * 4 + [StageDevice(speed=0.5)] * 4
    for count in (32, 80, 96, 126):
        assert cut_layers(equal(count), devices).modelled_gain >= 1.3


def test_an_embedding_and_a_head_count_where_they_are():
    devices = [StageDevice(), StageDevice()]
    assert cut_layers(equal(8), devices, last=LayerCost(seconds=2.0)).layers == (5, 3)
    assert cut_layers(equal(8), devices, first=LayerCost(seconds=2.0)).layers == (3, 5)
    head = LayerCost(seconds=0.0, state_bytes=5.0)
    room = [StageDevice(), StageDevice(memory_bytes=7.0)]
    assert cut_layers(equal(8, state_bytes=1.0), room, last=head).layers == (6, 2)


def test_earlier_stages_keep_more_microbatches():
    """As in 1F1B: the first of two keeps two, the last one, of 3 bytes a layer."""
    devices = [StageDevice(memory_bytes=18.0)] * 2
    found = cut_layers(equal(8, kept_bytes=3.0), devices)
    assert (found.layers, found.modelled_bytes) == ((3, 5), (18.0, 15.0))
    assert cut_layers(equal(8, kept_bytes=3.0), devices, in_flight=[1, 1]).layers == (4, 4)


def test_a_slow_link_is_crossed_where_little_is_sent():
    sent = [9.0, 9.0, 9.0, 1.0, 9.0, 9.0]
    layers = [LayerCost(seconds=1.0, out_bytes=size) for size in sent]
    found = cut_layers(layers, [StageDevice()] * 2, links=[Link(bytes_per_s=1.0)])
    assert (found.layers, found.modelled_s) == ((4, 2), (5.0, 3.0))


def test_even_cuts_that_do_not_fit_are_no_measure():
    devices = [StageDevice(memory_bytes=2.0), StageDevice()]
    found = cut_layers(equal(6, state_bytes=1.0), devices)
    assert (found.layers, found.modelled_gain) == ((2, 4), None)
    assert found.line.endswith("cut evenly (3,3) they would not fit")
    assert even_layers(7, 3) == (3, 2, 2)


def test_stages_of_no_seconds_gain_nothing():
    assert cut_layers([LayerCost(seconds=0.0)] * 3, [StageDevice()] * 2).modelled_gain == 1.0


@pytest.mark.parametrize("bounded", [False, True])
def test_160_layers_on_64_devices_take_less_than_a_second(bounded):
    rng = random.Random(0)
    layers = [
        LayerCost(seconds=rng.uniform(0.5, 2), state_bytes=1.0, out_bytes=1.0) for _ in range(160)
    ]
    devices = [
        StageDevice(speed=rng.uniform(0.3, 1), memory_bytes=rng.randint(3, 9) if bounded else None)
        for _ in range(64)
    ]
    links = [Link(bytes_per_s=rng.uniform(1, 9)) for _ in range(63)]
    start = time.process_time()
    found = cut_layers(layers, devices, links=links)
    assert time.process_time() - start < 1
    assert sum(found.layers) == 160 and min(found.layers) >= 1


numbers = st.floats(0.1, 10)


@st.composite
def cases(draw):
    layers = [
        LayerCost(seconds=draw(numbers), state_bytes=draw(numbers), out_bytes=draw(numbers))
        for _ in range(draw(st.integers(2, 9)))
    ]
    count = draw(st.integers(1, min(4, len(layers))))
    room = st.one_of(st.none(), st.floats(5, 60))
    devices = [StageDevice(speed=draw(numbers), memory_bytes=draw(room)) for _ in range(count)]
    return layers, devices, [Link(bytes_per_s=draw(numbers)) for _ in range(count - 1)]


def slowest(layers, devices, links):
    found = cut_or_none(layers, devices, links=links)
    return np.inf if found is None else found.slowest_s


@given(cases(), st.floats(1, 4), st.integers(0, 3))
def test_what_is_better_is_never_slower(case, times, at):
    """A faster device, a larger one, one without bound, a cheaper layer, a faster link."""
    layers, devices, links = case
    at %= len(devices)
    before, one = slowest(*case) * (1 + 1e-9), devices[at]
    room = None if one.memory_bytes is None else one.memory_bytes * times
    for better in (
        StageDevice(speed=one.speed * times, memory_bytes=one.memory_bytes),
        StageDevice(speed=one.speed, memory_bytes=room),
        StageDevice(speed=one.speed),
    ):
        assert slowest(layers, [*devices[:at], better, *devices[at + 1 :]], links) <= before
    cheaper = LayerCost(seconds=layers[at].seconds / times, out_bytes=layers[at].out_bytes)
    assert slowest([*layers[:at], cheaper, *layers[at + 1 :]], devices, links) <= before
    fast = [Link(bytes_per_s=link.bytes_per_s * times) for link in links]
    assert slowest(layers, devices, fast) <= before


def bounded(*sizes, kind=""):
    return [StageDevice(memory_bytes=None if s is None else s * 1e9, kind=kind) for s in sizes]


HEAVY = LayerCost(seconds=1.0, state_bytes=2e9, kept_bytes=1e9)


@pytest.mark.catches("cuts-refusal")
@pytest.mark.parametrize(
    ("layers", "devices", "sentence"),
    [
        (
            [HEAVY] * 4,
            bounded(8, 5, kind="a100"),
            "stage 1 ('a100'): layers 2 to 3 with 1 microbatches in flight need 6 GB and it has 5",
        ),
        (
            [HEAVY] * 4,
            bounded(3, 100),
            "stage 0: layer 0 with 2 microbatches in flight need 4 GB and it has 3 GB; give more",
        ),
        (
            [HEAVY] * 4,
            bounded(None, 1, None),
            "stage 1: layer 2 with 2 microbatches in flight need 4 GB and it has 1 GB, though the"
            " stages before it hold as many as they can",
        ),
        ([HEAVY] * 3, bounded(8), "stage 0: layers 0 to 2 with 1 microbatches in flight need 9 GB"),
    ],
)
def test_what_does_not_fit_is_refused_with_stage_bytes_and_layers(layers, devices, sentence):
    with pytest.raises(PlanError) as refusal:
        cut_layers(layers, devices)
    said = str(refusal.value)
    assert said.startswith(sentence)
    assert said.endswith("give more stages, more memory or a remat that keeps less")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"devices": []}, "devices: found none; give one for each stage"),
        (
            {"devices": [StageDevice()] * 5},
            "stages: found 5 for 4 layers, and each needs one; ask for 4 or fewer",
        ),
        ({"links": []}, "links: found 0 for 2 stages; give 1, from each stage to the next"),
        ({"in_flight": [1]}, r"in_flight: found \[1\] for 2 stages; give each its number"),
        ({"in_flight": [2, 0]}, r"in_flight: found \[2, 0\] for 2 stages; .* 1 or more"),
    ],
)
def test_lists_of_other_lengths_are_refused(change, sentence):
    given = {"layers": [HEAVY] * 4, "devices": [StageDevice()] * 2, **change}
    with pytest.raises(InputError, match=sentence):
        cut_layers(**given)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LayerCost(seconds=-1.0), "layer.seconds: found -1.0; give 0 or more"),
        (lambda: LayerCost(seconds=float("nan")), "layer.seconds: found nan, which is not finite"),
        (lambda: LayerCost(seconds=1.0, kept_bytes=-1.0), "layer.kept_bytes: found -1.0"),
        (lambda: StageDevice(speed=0.0), "device.speed: found 0.0; give a number above 0"),
        (lambda: StageDevice(kind="h100", memory_bytes=-1.0), "device 'h100'.memory_bytes: found"),
        (lambda: Link(bytes_per_s=0.0), "link.bytes_per_s: found 0.0; give a number above 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()
