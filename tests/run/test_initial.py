"""Parameters of a model with weights of another kind from a checkpoint of the model without."""

import jax
import numpy as np
import pytest

from colossax.checkpoint import Checkpointer
from colossax.config import Plan, Segment
from colossax.errors import CheckpointError
from colossax.models import maker
from colossax.nn import with_weights
from colossax.optim import sgd
from colossax.planner import build_step
from colossax.run.initial import initial_params
from colossax.run.origins import origins_of
from colossax.step.saving.records import state_slots
from colossax.tasks import next_token_loss
from tests.nn.quantised import CONFIG, LowRank, quantised

SEGMENTS = (Segment(count=1), Segment(count=2))


def adapted(make_model):
    """Narrow pairs beside the matrices of attention."""

    def make(name, module, rngs):
        return LowRank(module, module.held, rngs) if name.startswith("attn") else None

    return with_weights(make_model, make)


def step_of(make_model, plan):
    devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
    return build_step(make_model, sgd(0.1), next_token_loss(), plan, devices=devices)


def save(folder, step, state):
    pairs = list(zip(jax.tree.leaves(state_slots(step)), jax.tree.leaves(state), strict=True))
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, pairs, {})
    checkpointer.close()


def by_path(step, params):
    """Layers of a stack by number."""
    found = {}
    for info, x in zip(jax.tree.leaves(step.spec.infos), jax.tree.leaves(params), strict=True):
        rows = np.asarray(x) if info.stacked else np.asarray(x)[None]
        for i, row in enumerate(rows):
            found[info.path, (info.first_layer or 0) + i] = row
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    step = step_of(maker(CONFIG), Plan(mesh={"fsdp": 2}))
    state = step.init(seed=1)
    save(folder, step, state)
    return folder, by_path(step, state["params"])


@pytest.mark.catches("wrapped-weight-drawn")
@pytest.mark.parametrize("make_model", [adapted(maker(CONFIG)), adapted(adapted(maker(CONFIG)))])
def test_what_was_there_is_read_from_where_it_stood_and_what_is_new_is_drawn(plain, make_model):
    folder, stored = plain
    step = step_of(make_model, Plan(mesh={"fsdp": 2, "tensor": 2}, segments=SEGMENTS))
    params = initial_params(origins_of(str(folder), ()), step, seed=5)
    placed = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, step.shardings["params"]
    )
    assert all(jax.tree.leaves(placed))
    found, drawn = by_path(step, params), by_path(step, step.init(seed=5)["params"])
    for (path, layer), value in found.items():
        new = path.endswith(("/up", "/down"))
        before = drawn[path, layer] if new else stored[path.replace("/base", ""), layer]
        np.testing.assert_array_equal(value, before)
    assert any(path.endswith("q/w/base") or path.endswith("q/w/base/base") for path, _ in found)


@pytest.mark.catches("wrapped-weight-of-its-own")
def test_a_checkpoint_of_the_same_model_is_read_whole(tmp_path):
    step = step_of(adapted(maker(CONFIG)), Plan(mesh={"fsdp": 2}))
    state = step.init(seed=1)
    save(tmp_path, step, state)
    want, found = (
        by_path(step, p)
        for p in (state["params"], initial_params(origins_of(str(tmp_path), ()), step))
    )
    for key, value in want.items():
        np.testing.assert_array_equal(found[key], value)


def test_a_matrix_that_nothing_reads_is_no_reason_to_draw_another(plain):
    step = step_of(quantised(), Plan(mesh={"fsdp": 2}))
    with pytest.raises(CheckpointError, match="it has 'model/params/layers/attn/.*/w', which this"):
        initial_params(origins_of(str(plain[0]), ()), step)
