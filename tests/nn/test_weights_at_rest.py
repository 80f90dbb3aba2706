"""Parameters that keep a dtype of their own and never learn: trained beside, saved, generated."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.checkpoint import Checkpointer
from colossax.config import BatchConfig, OffloadConfig, Plan, Precision, Segment
from colossax.errors import CheckpointError, InputError
from colossax.inference import Generator
from colossax.nn import describe, initialise, param
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.sharding import Layout, explain, param_sharding, transfer, use
from colossax.step.saving.records import state_slots
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.nn.quantised import CONFIG, quantised
from tests.oracle import assert_losses_close

SEGMENTS = (Segment(count=1), Segment(count=2))
PLANS = {
    "one device": Plan(mesh={"fsdp": 1}, segments=SEGMENTS),
    "fsdp": Plan(mesh={"fsdp": 4}, segments=SEGMENTS),
    "tensor": Plan(mesh={"tensor": 2}, segments=SEGMENTS),
    "2d": Plan(mesh={"row": 2, "col": 2}, tensor_layout="2d", segments=SEGMENTS),
    "microbatches": Plan(mesh={"fsdp": 2}, batch=BatchConfig(accumulation=2)),
    "host memory": Plan(
        mesh={"fsdp": 2, "tensor": 2},
        segments=SEGMENTS,
        offload=OffloadConfig(parameters=1.0, optimizer=1.0),
    ),
    "bfloat16": Plan(mesh={"fsdp": 2}, precision=Precision(params="bfloat16")),
}
MESHES = [name for name in PLANS if name not in ("one device", "bfloat16")]


def batch(rows=4, seq=8):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (rows, seq + 1)).astype(np.int32)
    weights = np.ones((rows, seq), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def step_of(plan, **options):
    make = quantised(as_floats=options.pop("as_floats", False))
    plan = PLANS[plan]
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    return build_step(make, adamw(0.01), next_token_loss(), plan, devices=devices, **options)


def trained(step, steps=3):
    state, losses = step.init(), []
    for _ in range(steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def losses_of_floats():
    return trained(step_of("one device", as_floats=True))[1]


def by_path(step, params):
    infos = jax.tree.leaves(step.spec.infos)
    return {
        (info.path, info.first_layer): np.asarray(x)
        for info, x in zip(infos, jax.tree.leaves(params), strict=True)
    }


@pytest.mark.catches("own-dtype-cast-at-start")
@pytest.mark.parametrize("plan", quick_first(["one device", *MESHES], ["2d", "host memory"]))
def test_training_beside_int8_is_training_beside_floats_of_the_same_values(plan):
    """Their losses are equal; what does not learn is as before, to the bit, and has no state."""
    step = step_of(plan)
    before = by_path(step, step.init()["params"])
    state, losses = trained(step)
    assert_losses_close(losses, losses_of_floats())
    assert losses[-1] < losses[0]
    after = by_path(step, state["params"])
    for (path, layer), old in before.items():
        new = after[path, layer]
        assert (old.dtype == np.int8) == path.endswith("/codes"), path
        assert new.dtype == old.dtype
        frozen = path.endswith(("/codes", "/scales"))
        assert np.array_equal(old, new) == frozen, path
    assert not [i for i in jax.tree.leaves(step.infos) if i.path.endswith(("codes", "scales"))]


@pytest.mark.catches("filter-widens-what-learns")
def test_a_filter_narrows_what_learns_and_widens_nothing():
    step = step_of("one device", trainable=lambda info: not info.path.endswith("/w/down"))
    paths = {info.path for info in jax.tree.leaves(step.infos)}
    assert "layers/attn/q/w/up" in paths
    assert not {path for path in paths if path.endswith(("down", "codes", "scales"))}
    with pytest.raises(InputError, match="no parameter is left to train; let the filter accept"):
        step_of("one device", trainable=lambda info: info.path.endswith("/codes"))


@pytest.mark.parametrize("plan", ["bfloat16", "host memory"])
def test_the_state_is_as_its_layout_says_and_takes_the_bytes_of_int8(plan):
    step = step_of(plan)
    state = step.init()
    jax.tree.map(lambda x, want: assert_is(x, want), state, step.abstract)
    sizes = {"codes": 1, "scales": 2 if plan == "bfloat16" else 4}
    infos = jax.tree.leaves(step.spec.infos)
    for info, x in zip(infos, jax.tree.leaves(state["params"]), strict=True):
        size = sizes.get(info.path.rpartition("/")[2], sizes["scales"])
        assert x.nbytes == size * math.prod(info.shape)
    one = next(
        i for i in jax.tree.leaves(step.spec.infos) if i.path.endswith("mlp/down/w/base/codes")
    )
    row = explain(step.bound, [one]).splitlines()[-1].split()
    held = param_sharding(step.bound, "params", one).shard_shape(one.shape)
    assert row[-1] == f"{math.prod(held):,}"


def assert_is(x, want):
    assert (x.shape, x.dtype) == (want.shape, want.dtype)
    assert x.sharding.is_equivalent_to(want.sharding, x.ndim)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two steps on a mesh: folder, step and state."""
    step = step_of("fsdp")
    state, _ = trained(step, steps=2)
    folder = tmp_path_factory.mktemp("saved")
    pairs = list(zip(jax.tree.leaves(state_slots(step)), jax.tree.leaves(state), strict=True))
    checkpointer = Checkpointer(folder)
    checkpointer.save(2, pairs, {})
    checkpointer.close()
    return folder, step, state


@pytest.mark.parametrize("plan", quick_first(["2d", "host memory"], ["2d"]))
def test_a_checkpoint_comes_back_on_another_mesh_to_the_bit(saved, plan):
    folder, step, state = saved
    there = step_of(plan)
    slots, structure = jax.tree.flatten(state_slots(there))
    wants = list(zip(slots, jax.tree.leaves(there.shardings), strict=True))
    back = jax.tree.unflatten(structure, Checkpointer(folder).restore(2, wants))
    jax.tree.map(assert_is, back, there.abstract)
    old, new = by_path(step, state["params"]), by_path(there, back["params"])
    for key, value in old.items():
        assert new[key].dtype == value.dtype
        np.testing.assert_array_equal(new[key], value)
    _, metrics = there(back, batch())
    np.testing.assert_allclose(metrics["loss"], losses_of_floats()[2], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.catches("integers-converted")
def test_no_record_is_converted_to_integers_or_from_them(saved):
    folder, step, _ = saved
    slots = jax.tree.leaves(state_slots(step)["params"])
    slot = next(slot for slot in slots if slot.dtype == np.int8 and slot.layers is not None)
    asked = dataclasses.replace(slot, dtype=np.dtype("float32"))
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointError, match="as int8, not float32, and only floats are conv"):
        Checkpointer(folder).restore(2, [(asked, where)], exact=False, convert=True)


def test_a_transfer_keeps_integers():
    source, target = step_of("tensor"), step_of("2d")
    params = source.init()["params"]
    layouts = [Layout(bound=step.bound, infos=step.spec.infos) for step in (source, target)]
    moved = transfer(params, *layouts)
    jax.tree.map(assert_is, moved, target.abstract["params"])
    old, new = by_path(source, params), by_path(target, moved)
    for key, value in old.items():
        np.testing.assert_array_equal(new[key], value)


@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"tensor": 2}])
def test_generation_reads_int8(mesh):
    """What it generates is what floats of the same values do."""
    tokens = [generated(as_floats, mesh) for as_floats in (False, True)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 6


def generated(as_floats, mesh):
    bound = Plan(mesh=mesh).bind(jax.devices()[: math.prod(mesh.values())])
    with use(bound):
        spec = describe(quantised(as_floats=as_floats))
    params = initialise(spec, bound, jax.random.key(0))
    assert as_floats or any(x.dtype == jnp.int8 for x in jax.tree.leaves(params))
    return Generator(spec, bound, params).generate((1, 2, 3), max_tokens=6).tokens


class Table(nnx.Module):
    def __init__(self, **options):
        self.codes = param(jnp.arange(4), (None,), **options)


@pytest.mark.catches("integers-learn")
def test_integers_that_learn_are_refused():
    with pytest.raises(InputError, match="codes: int32 has no gradient, and this parameter learns"):
        describe(lambda rngs: Table())
    with pytest.raises(InputError, match="codes: int8 has no gradient"):
        describe(lambda rngs: Table(dtype="int8"))


def test_integers_keep_their_dtype_and_floats_that_of_the_plan_unless_told():
    def kept(**options):
        return jax.tree.leaves(describe(lambda rngs: Table(**options)).infos)[0].at_rest("bfloat16")

    assert kept(learns=False) == np.int32
    assert kept(learns=False, dtype="int8") == np.int8
    assert kept(dtype="float32") == np.float32
    plain = describe(lambda rngs: nnx.Dict(w=param(jnp.ones(4), (None,))))
    assert jax.tree.leaves(plain.infos)[0].at_rest("bfloat16") == jnp.bfloat16
