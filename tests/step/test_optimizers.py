"""Optimizers whose state is not all like the parameters, in whole steps: on meshes, in host memory,
on disk, by stages of their own, saved and resumed. The plain truth is one device with all on it.
"""

import functools
import math

import jax
import numpy as np
import pytest

from colossax.config import OffloadConfig, PipelineConfig, Plan, Segment, preset
from colossax.errors import InputError
from colossax.models import LlamaConfig, MixtralConfig
from colossax.optim import (
    Groups,
    adafactor,
    adamw,
    adamw_8bit,
    averaged,
    came,
    ema,
    galore,
    lion,
    muon,
    schedule_free,
)
from tests.cases import quick_first
from tests.oracle import assert_losses_close
from tests.step.offloaded.streamed import FULL, batch, by_path, host, offloaded, started, stepped

MODEL = LlamaConfig(vocab=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=64, max_seq=32)
EXPERTS = MixtralConfig(
    vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=32, experts=4, choices=2, max_seq=32
)
OPTIMIZERS = {
    "adafactor": adafactor(1e-2, momentum=0.9, weight_decay=0.1),
    "came": came(1e-3, weight_decay=0.1),
    "lion": lion(1e-3),
    "muon": muon(1e-2),
    "galore": galore(1e-2, rank=6, interval=2),
    "galore 8 bits": galore(1e-2, rank=16, interval=2, state="8bit"),
    "adamw 8 bits": adamw_8bit(1e-2),
    "ema": ema(adamw(1e-2), 0.5),
    "schedule free": schedule_free(1e-2),
    "groups": adamw(1e-2, groups=Groups(multiples={"attn/": 0.3}, decays={"mlp/": 1.0})),
}
PLANS = {
    "fsdp": Plan(mesh={"fsdp": 8}),
    "fsdp tensor": Plan(mesh={"fsdp": 4, "tensor": 2}),
    "all three": Plan(mesh={"data": 2, "fsdp": 2, "tensor": 2}),
    "zero1": preset("zero1", mesh={"data": 8}),
    "stages": Plan(mesh={"stage": 2, "fsdp": 2, "tensor": 2}),
    "stages of their own": Plan(
        mesh={"stage": 2, "fsdp": 4}, pipeline=PipelineConfig(microbatches=2, cuts=(3, 1))
    ),
    "ring": Plan(mesh={"ring": 2, "ulysses": 2, "fsdp": 2}),
    "accumulated": preset("zero2", mesh={"data": 4}),
    "host": host(Plan(mesh={"fsdp": 4, "tensor": 2}, segments=(Segment(remat="full"),))),
    "stages and host": offloaded(
        Plan(mesh={"stage": 2, "fsdp": 4}, segments=(Segment(remat="full"),)), optimizer=1.0
    ),
}
FEW = ("fsdp tensor", "all three", "stages of their own", "host")
ON_ONE = {
    "host": host(),
    "shares": offloaded(parameters=0.5, optimizer=0.75),
    "the CPU": host(cpu_update=1.0),
}
MOST = {name: 4 if "accumulated" in name else 8 for name in PLANS}


def ran(name, plan, count, *, model=MODEL, steps=3, **options):
    state, step = started(
        plan, OPTIMIZERS[name], model=model, devices=jax.devices()[:count], clip_norm=0.5, **options
    )
    state, found = stepped(state, step, steps=steps)
    return state, step, [metrics["loss"] for metrics in found]


@functools.cache
def alone(name, model=MODEL):
    """Losses on one device with everything there."""
    losses = ran(name, FULL, 1, model=model)[2]
    assert abs(losses[0] - losses[-1]) > 1e-2
    return losses


@pytest.mark.parametrize(
    ("name", "plan"),
    quick_first(
        [
            (name, plan)
            for name in OPTIMIZERS
            for plan in PLANS
            if name in ("adafactor", "muon", "galore", "adamw 8 bits") or plan in FEW
        ],
        {("muon", "fsdp tensor"), ("galore", "fsdp tensor"), ("adafactor", "fsdp")},
    ),
)
def test_any_plan_equals_one_device(name, plan, devices):
    _, _, losses = ran(name, PLANS[plan], MOST[plan])
    assert_losses_close(losses, alone(name))


@pytest.mark.parametrize(
    ("name", "place"),
    quick_first([(n, p) for n in OPTIMIZERS for p in ON_ONE], {("adamw 8 bits", "host")}),
)
def test_layers_in_host_memory_learn_alike(name, place):
    _, step, losses = ran(name, ON_ONE[place], 1)
    assert step.streaming is not None
    assert_losses_close(losses, alone(name))


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [{"expert": 4, "fsdp": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}])
@pytest.mark.parametrize("name", ["adafactor", "muon", "galore", "adamw 8 bits"])
def test_experts_learn_each_by_itself(name, mesh, devices):
    _, _, losses = ran(name, Plan(mesh=mesh), 8, model=EXPERTS)
    assert_losses_close(losses, alone(name, EXPERTS))


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_on_disk(name, tmp_path):
    plan = FULL.replace(offload=OffloadConfig(parameters=1.0, optimizer=1.0, disk=1.0))
    _, step, losses = ran(name, plan, 1, disk=tmp_path)
    assert step.disk.latest() == 3
    assert_losses_close(losses, alone(name))


MOVES = [
    ("fsdp tensor", "fsdp tensor"),
    ("fsdp", "all three"),
    ("host", "fsdp"),
    ("stages", "host"),
    ("stages of their own", "fsdp"),
]


@pytest.mark.parametrize(
    ("name", "source", "target"),
    quick_first(
        [
            (name, *move)
            for at, name in enumerate(OPTIMIZERS)
            for move in (MOVES[0], MOVES[1 + at % 4], MOVES[1 + (at + 1) % 4])
        ],
        {("muon", "fsdp tensor", "fsdp tensor")},
    ),
)
def test_it_goes_on_from_where_it_was_saved(name, source, target, devices, tmp_path):
    state, step, _ = ran(name, PLANS[source], 8, steps=2)
    step.save(tmp_path, state)
    wanted = by_path(step, state["opt_state"])
    state, then = stepped(state, step, steps=2)
    fresh, other = started(
        PLANS[target], OPTIMIZERS[name], model=MODEL, devices=devices, clip_norm=0.5
    )
    restored = other.restore(tmp_path)
    found = by_path(other, restored["opt_state"])
    assert found.keys() == wanted.keys()
    for key, leaf in found.items():
        np.testing.assert_array_equal(leaf, wanted[key], err_msg=key)
    _, again = stepped(restored, other, steps=2)
    want, got = ([one["loss"] for one in each] for each in (then, again))
    if source == target:
        assert got == want
    assert_losses_close(got, want)


@pytest.mark.parametrize("plan", quick_first([FULL, ON_ONE["host"]], {FULL}))
def test_a_skipped_step_is_no_update_by_which_galore_counts(plan):
    """The third would have refreshed the directions: the next one does."""
    good = [batch(number) for number in range(4)]
    bad = {**good[0], "weights": np.full_like(good[0]["weights"], np.nan)}
    found = []
    for batches in (good, [*good[:2], bad, *good[2:]]):
        state, step = started(plan, OPTIMIZERS["galore"], model=MODEL, clip_norm=0.5)
        state, metrics = stepped(state, step, batches=batches)
        assert metrics[-1]["skipped"] == len(batches) - len(good)
        found.append(by_path(step, (state["params"], state["opt_state"])))
    for path, leaf in found[0].items():
        np.testing.assert_array_equal(leaf, found[1][path], err_msg=path)


def held(tree):
    """(Bytes on one device, of them in host memory) of a tree of abstract arrays."""
    found = [0, 0]
    for leaf in jax.tree.leaves(tree):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        found[0] += size
        found[1] += size if leaf.sharding.memory_kind == "pinned_host" else 0
    return tuple(found)


E, F, V, L = 32, 64, 64, 4
MATRICES = {"q": (E, E), "k": (E, E // 2), "v": (E, E // 2), "o": (E, E)}
MATRICES |= {"gate": (E, F), "up": (E, F), "down": (F, E)}
"""Sides of a layer's matrices; it has two norms too, and the model a norm and two tables."""
COUNT = sum(a * b for a, b in MATRICES.values())
SIDES = sum(a + b for a, b in MATRICES.values())
LOW_RANK = 6 * sum(min(sides) + 2 * max(sides) for sides in MATRICES.values())
"""Of GaLore: six directions of the shorter side, and two moments of each and the longer one."""
TABLES, TABLE_SIDES, NORMS = 2 * V * E, 2 * (V + E), (2 * L + 1) * E
ELEMENTS = L * COUNT + TABLES


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("lion", 4 * (ELEMENTS + NORMS)),
        ("muon", 4 * (ELEMENTS + NORMS) + 4 * (TABLES + NORMS)),
        ("galore", 4 * L * LOW_RANK + 8 * (TABLES + NORMS)),
        ("came", 4 * (ELEMENTS + 2 * NORMS) + 8 * (L * SIDES + TABLE_SIDES)),
    ],
)
def test_bytes_on_one_device(name, arrays):
    """What `inspect` counts: the shapes and places of the state, beside a counter of 4 bytes."""
    _, step = started(FULL, OPTIMIZERS[name], model=MODEL)
    assert held(step.abstract["opt_state"]) == (arrays + 4, 0)


@pytest.mark.catches("state-of-blocks-whole")
def test_codes_and_scales_are_split_and_in_host_memory(devices):
    """Of a layer whose matrices are split over eight devices, in eight bits: all but vectors."""
    _, step = started(PLANS["fsdp"], OPTIMIZERS["adamw 8 bits"], model=MODEL, devices=devices)
    _, away = started(
        host(PLANS["fsdp"].replace(segments=FULL.segments)),
        OPTIMIZERS["adamw 8 bits"],
        model=MODEL,
        devices=devices,
    )
    codes = 2 * (L * COUNT + TABLES) // 8
    # Of q, k, v and o the width is one block, so that all devices have all scales.
    scales = 8 * L * (E + E // 2 + E // 2 + E) + 8 * (3 * L + 2) * E // 8
    assert held(step.abstract["opt_state"]) == (codes + scales + 8 * NORMS // 8 + 4, 0)
    _, there = held(away.abstract["opt_state"])
    assert there > 2 * L * COUNT // 8


def test_a_pattern_that_fits_nothing_is_refused_by_the_step():
    groups = Groups(multiples={"atn/": 2.0})
    with pytest.raises(InputError, match="'atn/' is found in the path of no parameter that learns"):
        started(FULL, adamw(1e-2, groups=groups), model=MODEL)


@pytest.mark.parametrize(
    ("name", "plan"),
    quick_first(
        [(name, plan) for name in ("ema", "schedule free") for plan in (FULL, *PLANS.values())],
        {("ema", FULL)},
    ),
)
def test_averages_are_evaluated_and_saved_as_a_model_of_their_own(name, plan, devices, tmp_path):
    count = 1 if plan == FULL else 8
    if plan == PLANS["accumulated"]:
        count = 4
    state, step, _ = ran(name, plan, count)
    mean = averaged(state)
    params = by_path(step, mean["params"])
    one, alone_step, _ = ran(name, FULL, 1)
    wanted = by_path(alone_step, averaged(one)["params"])
    for path, leaf in params.items():
        np.testing.assert_allclose(leaf, wanted[path], rtol=1e-3, atol=1e-4, err_msg=path)
    total, weight = step.evaluate(mean, batch())["cross_entropy"]
    other, plain = step.evaluate(state, batch())["cross_entropy"]
    assert weight == plain and total != other
    step.save(tmp_path, mean)
    _, reading = started(FULL, OPTIMIZERS[name], model=MODEL, clip_norm=0.5)
    found = by_path(reading, reading.restore(tmp_path)["params"])
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, params[path], err_msg=path)
