"""Replicas of busy experts: the table against all tables, and what they compute and learn."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.config import ExpertsConfig
from colossax.errors import InputError, PlanError
from colossax.sharding import use
from colossax.sharding.experts.placement import (
    Placement,
    balanced_placement,
    packed,
    replicas_of,
)
from tests.sharding.experts.plans import E, plan
from tests.sharding.experts.test_island import MESHES, arrays, check, found, island, loads, wanted

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=5)


@pytest.mark.catches("replica-to-the-idle")
@settings(deadline=None)
@given(LOADS, st.integers(0, 4))
def test_replicas_make_the_busiest_as_idle_as_can_be(given_loads, more):
    slots = len(given_loads) + more
    counts = replicas_of(given_loads, slots)
    ways = itertools.product(range(1, more + 2), repeat=len(given_loads))
    best = min(
        max(load / n for load, n in zip(given_loads, way, strict=True))
        for way in ways
        if sum(way) == slots
    )
    assert sum(counts) == slots and min(counts) >= 1
    assert max(np.asarray(given_loads) / counts) == best


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.integers(1, 6))
def test_bins_have_equally_many_and_no_more_than_greedy_may(weights, bins):
    weights = weights * bins
    found = packed(weights, bins)
    assert sorted(i for each in found for i in each) == list(range(len(weights)))
    assert {len(each) for each in found} == {len(weights) // bins}
    sums = [sum(weights[i] for i in each) for each in found]
    assert max(sums) - min(sums) <= max(weights) * (len(weights) // bins) + 1e-9


@settings(deadline=None)
@given(st.data())
def test_a_table_computes_every_expert_and_groups_stay_on_a_node(data):
    nodes = data.draw(st.sampled_from([1, 2]))
    groups = nodes * data.draw(st.integers(1, 3))
    experts = groups * data.draw(st.integers(1, 3))
    devices = nodes * data.draw(st.integers(1, 4))
    slots = -(-experts // devices) + data.draw(st.integers(0, 2))
    given_loads = data.draw(st.lists(st.integers(0, 99), min_size=experts, max_size=experts))
    table = balanced_placement(given_loads, devices, slots, nodes=nodes, groups=groups)
    assert len(table) == devices and {len(row) for row in table} == {slots}
    assert {expert for row in table for expert in row} == set(range(experts))
    if nodes > 1:
        here = devices // nodes
        of_node = [
            {e * groups // experts for row in table[n * here : (n + 1) * here] for e in row}
            for n in range(nodes)
        ]
        assert not set.intersection(*of_node)
    placement = Placement(table, experts)
    flat, (slots_of, counts) = np.concatenate(table), placement.replicas
    assert all((flat[slots_of[e, : counts[e]]] == e).all() for e in range(experts))
    assert sum(counts) == placement.slots


def test_a_busy_expert_is_on_every_device():
    table = balanced_placement([700, 1, 1, 1, 1, 1, 1, 1], 4, 3)
    assert all(0 in row for row in table)
    assert max(sum(expert == 0 for expert in row) for row in table) == 2


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"nodes": 3, "groups": 3}, "3 nodes must divide 3 groups and 4 devices"),
        ({"slots": 1}, "have fewer than 8 experts; give 2 slots or more"),
    ],
)
def test_a_table_that_cannot_be_is_refused(asked, reason):
    with pytest.raises(InputError, match=reason):
        balanced_placement([1] * 8, **{"devices": 4, "slots": 2, **asked})


TABLE = ((3, 0), (3, 1), (2, 3), (4, 7), (3, 5), (6, 3), (0, 3), (1, 3))
"""Expert 3, which takes everything in the load `one`, seven times of sixteen."""


@pytest.mark.catches("replica-first-alone")
def test_replicas_share_rows_and_learn_as_one_expert():
    _, passes = check(plan({"expert": 8}, "passes", placement=TABLE), "one", "even")
    _, alone = found(plan({"expert": 8}, "passes"), ["one"])
    assert passes["one"] < int(alone["one"][0][1][1][0])


@pytest.mark.sweep
@pytest.mark.parametrize("dispatch", ["passes", "gather"])
@pytest.mark.parametrize(
    ("mesh", "group", "name"),
    [
        ("expert8", None, None),
        ("expert4-tensor2", "expert", None),
        ("expert4-tensor2", None, None),
        ("fsdp2-expert4", None, "zero3"),
        ("expert2-ring2-tensor2", "ring,tensor", "zero3+megatron_sp"),
    ],
)
def test_any_placement_is_one_device(mesh, group, name, dispatch):
    asked = plan(MESHES[mesh], dispatch, group, name=name)
    with use(asked) as bound:
        devices = bound.size(island(bound, arrays()[1]).group)
    generator = np.random.default_rng(devices)
    for slots in (E // devices, E // devices + 2):
        table = balanced_placement(generator.integers(0, 99, E), devices, slots)
        more = {"placement": table, "chunks": 2} if slots > E // devices else {"placement": table}
        check(plan(MESHES[mesh], dispatch, group, name=name, **more), *loads())


def test_on_one_device_there_is_nothing_to_place():
    import jax

    asked = plan({"data": 1}, placement=((0, 1, 2, 3, 4, 5, 6, 7),)).bind(jax.devices()[:1])
    with use(asked) as bound:
        assert island(bound, arrays()[1]).placement is None
    assert wanted()


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (((0, 1), (2, 3)), "has experts of 2 devices, and they are split over 8"),
        (tuple((i, 0) for i in range(7)) + ((0, 0),), "expert 7 is computed nowhere"),
        (tuple((i, 8) for i in range(8)), "expert 8 is none of 8"),
    ],
)
def test_a_table_of_others_is_refused(table, reason):
    with use(plan({"expert": 8}, "passes", placement=table)) as bound:
        with pytest.raises(PlanError, match=reason):
            island(bound, arrays()[1])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("nowhere.json", "experts.placement 'nowhere.json': cannot be read"),
        (3, "found 3; give a list of experts for each device"),
        (((0, -1),), "experts are numbers from 0"),
        (((0, 1), (2,)), "devices have 2, 1 experts; give each as many"),
    ],
)
def test_what_is_no_table_is_refused(table, reason):
    with pytest.raises(PlanError, match=reason):
        ExpertsConfig(placement=table)


def test_a_table_may_be_in_a_file(tmp_path):
    (tmp_path / "table.json").write_text("[[0, 1], [1, 2]]")
    config = ExpertsConfig(placement=str(tmp_path / "table.json"))
    assert (
        config.placement == ((0, 1), (1, 2)) == ExpertsConfig(placement=[[0, 1], [1, 2]]).placement
    )
