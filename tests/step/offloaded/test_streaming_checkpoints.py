"""States move between plans with and without host memory, and live where the plan says."""

import jax
import numpy as np
import pytest

from colossax.config import Plan, Segment
from colossax.optim import adamw
from colossax.run.checkpointing import RunCheckpoints
from tests.cases import quick_first
from tests.step.offloaded.streamed import FULL, SHARED, by_path, host, offloaded, started, stepped

PLANS = {
    "ordinary": (FULL, 1),
    "host": (host(), 1),
    "shares": (offloaded(**SHARED), 1),
    "segments": (host(Plan(segments=(Segment(count=1), Segment(remat="full")))), 1),
    "eight": (host(), 8),
    "eight ordinary": (FULL, 8),
}
MOVES = [("host", other) for other in PLANS] + [
    ("ordinary", "shares"),
    ("ordinary", "eight"),
    ("eight", "segments"),
    ("shares", "host"),
]
QUICK = {("ordinary", "shares"), ("host", "eight")}


def made(name):
    plan, count = PLANS[name]
    optimizer = adamw(1e-2, second_moment_dtype="bfloat16")
    return started(plan, optimizer, clip_norm=0.5, devices=jax.devices()[:count])


def kept(folder, step):
    def refuse(problem):
        raise AssertionError(problem)

    return RunCheckpoints(folder, step, keep=1, documents={}, report=refuse)


def arrays(step, state):
    return by_path(step, {name: state[name] for name in ("params", "opt_state")})


def assert_lives_where_the_plan_says(step, state):
    """Matrices of the first layers in host memory, everything else on devices.

    Returns:
        Of parameters and of the optimizer's state, which of both there are.
    """
    kinds = {"params": "parameters", "opt_state": "optimizer"}
    pairs = jax.tree_util.tree_flatten_with_path(step.spec.infos)[0]
    infos = {jax.tree_util.keystr(path): info for path, info in pairs}
    found = {kind: set() for kind in kinds}
    for kind, name in kinds.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(state[kind])[0]:
            key = jax.tree_util.keystr(path)
            info = next((i for own, i in infos.items() if key.endswith(own)), None)
            matrix = info is not None and info.path.startswith("layers/") and "/w" in info.path
            there = matrix and info.first_layer < step.bound.plan.offload.layers(name, 4)
            assert (leaf.sharding.memory_kind == "pinned_host") == there, key
            found[kind].add(there)
    return found


@pytest.mark.parametrize(("source", "target"), quick_first(MOVES, QUICK))
def test_a_state_moves_bit_for_bit_and_training_goes_on(devices, tmp_path, source, target):
    state, step = made(source)
    state, _ = stepped(state, step, steps=2)
    saving = kept(tmp_path, step)
    saving.save(state, 2)
    wanted = arrays(step, state)
    state, losses = stepped(state, step, steps=3)
    saving.finish()

    _, other = made(target)
    checkpoints = kept(tmp_path, other)
    restored = checkpoints.restore(checkpoints.latest())
    found = arrays(other, restored)
    assert found.keys() == wanted.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], wanted[name])
    places = assert_lives_where_the_plan_says(other, restored)
    if "ordinary" not in target:
        assert True in places["params"] and True in places["opt_state"]
    _, again = stepped(restored, other, steps=3)
    want, got = ([one["loss"] for one in each] for each in (losses, again))
    if source == target:
        assert got == want
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_fresh_state_lives_where_the_plan_says(devices):
    for name in ("shares", "eight"):
        state, step = made(name)
        assert_lives_where_the_plan_says(step, state)
        for leaf, sharding in zip(
            jax.tree.leaves(state), jax.tree.leaves(step.shardings), strict=True
        ):
            assert leaf.sharding.memory_kind == sharding.memory_kind
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
