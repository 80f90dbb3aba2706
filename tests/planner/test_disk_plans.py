"""Plans with optimizer state in a file: what that takes, and that no other placement is faster."""

import dataclasses
import itertools
import math
import random

import jax
import numpy as np
import pytest

from colossax.aot import parse_target
from colossax.config import BatchConfig, OffloadConfig, Segment
from colossax.errors import PlanError
from colossax.planner.profiling import profile_task
from colossax.planner.searching import Subject, plan_run, predict
from colossax.planner.searching.disk import DISK_BYTES_PER_S
from colossax.planner.searching.hosted import Tier, best_placed
from colossax.planner.searching.policies import Policy
from colossax.planner.searching.predicting import OnMesh, policies_of
from colossax.planner.searching.scored import Placed
from colossax.planner.task_step import task_step
from colossax.recipes import recipe
from colossax.step.offloaded.disk import DiskTier
from colossax.tasks import task_of
from tests.planner.few_layers import few_layers

ONE, LAYERS = parse_target("h100:1x1"), 3


@pytest.fixture(scope="module")
def small():
    """Three narrow layers, with 8 rows a step."""
    config = few_layers("llama_tiny", LAYERS, 8)
    return config, profile_task(task_of(config), config.plan, ONE)


def policy_of(mesh, names):
    one_row = mesh.tokens(1)
    return Policy(
        names=names,
        seconds=LAYERS * mesh.layer_seconds(0, names, one_row),
        bytes=LAYERS * mesh.kept(0, names, one_row),
    )


@pytest.mark.catches("files-cost-no-time")
@pytest.mark.catches("records-need-no-buffers")
@pytest.mark.parametrize("seed", range(6))
def test_no_other_placement_with_a_file_is_faster(small, seed):
    draw = random.Random(seed)
    config, profile = small
    mesh = OnMesh(profile, config.plan.replace(mesh={"data": 1}), ONE)
    tier, rows = Tier(mesh, disk=True), draw.choice((1, 2, 8))
    names = draw.choice(policies_of(mesh.profile))
    every = {}
    for y, z, w, d in itertools.product(range(LAYERS + 1), repeat=4):
        if 0 < d <= z and (y == 0 or y >= d) and (w == 0 or w >= d):
            placed = Placed(layers=LAYERS, parameters=y, optimizer=z, activations=w, disk=d)
            every[placed] = tier.predicted(rows, [[(LAYERS, names)]], 8, placed)
    one = draw.choice(list(every.values()))  # so that there is what fits
    room, host = 1.001 * one.bytes.total, 1.001 * (one.host + one.through)
    disk = draw.choice((math.inf, one.file))
    fitting = {
        placed: one.seconds.total
        for placed, one in every.items()
        if one.bytes.total <= room and one.host + one.through <= host and one.file <= disk
    }
    given = {"room": room, "host": host, "disk": disk}
    found = tier.placed(rows, policy_of(mesh, names), 8, **given)
    assert found in fitting
    assert fitting[found] == pytest.approx(min(fitting.values()))
    assert every[found].seconds.disk >= found.disk * tier.file.record / DISK_BYTES_PER_S


@pytest.mark.catches("state-in-a-file-stays-in-host-memory")
@pytest.mark.catches("files-of-one-epoch")
@pytest.mark.parametrize(
    "shares",
    [
        (2, 0, 0),
        pytest.param((3, 3, 0), marks=pytest.mark.slow),
        pytest.param((1, 3, 2), marks=pytest.mark.slow),
    ],
)
def test_files_and_host_memory_are_those_of_the_step(small, tmp_path, shares):
    config, profile = small
    in_file, parameters, activations = shares
    offload = OffloadConfig(
        optimizer=1.0,
        parameters=parameters / LAYERS,
        activations=activations / LAYERS,
        disk=in_file / LAYERS,
    )
    plan = config.plan.replace(
        mesh={"data": 1},
        segments=(Segment(remat="full"),),
        batch=BatchConfig(microbatch=2),
        offload=offload,
    )
    said = predict(profile, plan, ONE)
    step = task_step(task_of(config), plan, jax.devices()[:1], disk=tmp_path)
    cost = DiskTier(step.streaming, step.abstract, tmp_path).cost()
    # Vectors take whole blocks, which are much of layers as narrow as these.
    assert said.file == pytest.approx(cost.file_bytes, rel=0.05)
    assert said.through == pytest.approx(cost.memory_bytes, rel=0.05)
    assert said.seconds.disk >= 0.95 * cost.written_bytes / DISK_BYTES_PER_S
    wide = np.dtype(plan.precision.compute).itemsize
    kept = activations * config.data.seq_len * 2 * config.model.embed * wide
    there = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.abstract) if _on_host(x))
    grads = step.streaming.parts.values()
    there += sum(part.gradient_stack_bytes(summed=True) for part in grads)
    assert said.host == there + kept


def _on_host(x):
    return getattr(x.sharding, "memory_kind", None) == "pinned_host"


def test_a_file_is_taken_where_host_memory_does_not_do():
    config = recipe("llama_tiny")
    config = config.replace(model=dataclasses.replace(config.model, layers=16))
    profile = profile_task(task_of(config), config.plan, ONE)
    mesh = OnMesh(profile, config.plan.replace(mesh={"data": 1}), ONE)
    names = frozenset()
    policies, tier = [dataclasses.replace(policy_of(mesh, names), bytes=0.0)], Tier(mesh)
    lavish, _ = best_placed(mesh, policies, (8,), 1e12, 1e12, 1e12)
    assert lavish.placed.disk == 0
    most = Placed(layers=16, parameters=16, optimizer=16)
    room = 1.01 * tier.predicted(1, [[(16, names)]], 8, most).bytes.total
    host = 24 * tier.optimizer
    assert best_placed(mesh, policies, (8,), room, host)[0] is None
    found, _ = best_placed(mesh, policies, (8,), room, host, 1e12)
    assert found is not None
    assert 0 < found.placed.disk < 16
    assert found.placed.settings["disk"] == found.placed.disk / 16
    assert "but in a file optimizer of" in found.placed.shown


@pytest.mark.catches("file-of-runs-that-differ")
@pytest.mark.parametrize(("fetched", "fits"), [(0, True), (1, False), (2, True), (3, True)])
def test_layers_in_a_file_are_one_run(small, fetched, fits):
    config, profile = small
    tier = Tier(OnMesh(profile, config.plan.replace(mesh={"data": 1}), ONE), disk=True)
    lacking = 1.5 * tier.optimizer - tier.file.through(1)  # so that two layers are in the file
    three, none = np.array(LAYERS), np.array(0)
    count, found = tier._filed(np.array(fetched), three, none, lacking, math.inf)
    assert bool(found) == fits
    assert int(count) == 2 * fits


@pytest.mark.catches("a-file-beside-no-host-memory")
@pytest.mark.parametrize(
    ("target", "offload", "host_gb", "words"),
    [
        ("h100:1x1", OffloadConfig(), None, "--disk-gb: found 9 without --host-gb, .* too"),
        ("h100:2x8", OffloadConfig(), 9.0, "--disk-gb: a file is of one node's .* has 2; leave it"),
        (
            "h100:1x1",
            OffloadConfig(clipping="layer"),
            9.0,
            "does not go with plan.offload.clipping layer",
        ),
    ],
)
def test_files_that_cannot_be_are_refused(small, target, offload, host_gb, words):
    config, _ = small
    plan, target = config.plan.replace(offload=offload), parse_target(target)
    with pytest.raises(PlanError, match=words):
        plan_run(Subject.of(config), plan, target, host_gb=host_gb, disk_gb=9.0, verify=False)


@pytest.mark.slow
@pytest.mark.catches("enough-of-a-file-is-not-said")
def test_a_file_that_is_said_to_do_does():
    config = recipe("llama3_8b")
    subject, given = Subject.of(config), {"host_gb": 40.0, "verify": False}
    with pytest.raises(PlanError, match=r"--disk-gb (\S+) \(of a file") as problem:
        plan_run(subject, config.plan, ONE, **given)
    assert "--host-gb" in str(problem.value)
    said = float(str(problem.value).split("--disk-gb ")[1].split()[0])
    first = plan_run(subject, config.plan, ONE, disk_gb=said, **given).plans[0]
    assert first.plan.offload.disk > 0
    assert first.host_bytes <= 40e9
    assert 0 < first.disk_bytes <= said * 1e9
    assert first.seconds.disk > 0
    assert first.to_json()["disk_bytes"] == first.disk_bytes
