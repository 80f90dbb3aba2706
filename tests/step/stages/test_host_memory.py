"""State and activations of stages in host memory equal those on the devices, and lie there."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from colossax.config import BatchConfig, OffloadConfig, PipelineConfig, Plan, Segment
from colossax.errors import PlanError
from colossax.optim import adamw, lamb
from tests.oracle import assert_trees_close
from tests.step.offloaded.streamed import CONFIG, FULL, batch, by_path, started, stepped

MODEL = dataclasses.replace(CONFIG, layers=6)
CLIP = 0.5
MESHES = {
    "fsdp": ({"stage": 2, "fsdp": 2}, {}),
    "reduced once": ({"stage": 2, "data": 2}, {"gather": "step", "once": True}),
    "tensor, in chunks": ({"stage": 3, "tensor": 2}, {"chunks": 2}),
    "data": ({"stage": 2, "data": 2, "tensor": 2}, {}),
}


def plan_of(mesh, offload="none", *, base=FULL, once=False, **pipeline):
    return base.replace(
        mesh=mesh,
        batch=BatchConfig(reduce_once=once),
        pipeline=PipelineConfig(microbatches=4, **pipeline),
        offload=OffloadConfig().with_text(offload),
    )


def run(plan, make=adamw, steps=2, **options):
    devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
    optimizer = make(1e-2, eps=1e-3)
    state, step = started(plan, optimizer, model=MODEL, devices=devices, **options)
    state, metrics = stepped(state, step, steps=steps)
    return state, step, metrics


def arrays(state):
    return jax.tree.map(np.asarray, (state["params"], state["opt_state"]))


@functools.cache
def on_devices(name, make, clip):
    """A run of the same stages with all of their state on the devices."""
    mesh, how = MESHES[name]
    state, _, metrics = run(plan_of(mesh, **how), make, clip_norm=clip)
    return arrays(state), metrics


def assert_same(found, metrics, want, wanted):
    for name in ("loss", "grad_norm"):
        pairs = [[each[name] for each in run] for run in (metrics, wanted)]
        np.testing.assert_allclose(*pairs, rtol=1e-6)
    assert_trees_close(found, want)


def assert_as_on_devices(offload, name="fsdp", make=adamw, clip=CLIP):
    mesh, how = MESHES[name]
    state, step, metrics = run(plan_of(mesh, offload, **how), make, clip_norm=clip)
    want, wanted = on_devices(name, make, clip)
    assert_same(arrays(state), metrics, want, wanted)
    return state, step


def kinds(tree):
    """Memories of arrays with three dims or more, which are layers' matrices."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 2}


@pytest.mark.catches("stage-updates-another-layer")
@pytest.mark.catches("stage-takes-another-slot")
def test_all_of_the_stages_layers_in_host_memory(tmp_path):
    state, step = assert_as_on_devices("parameters=1,optimizer=1,activations=1")
    assert kinds(state["opt_state"]) == kinds(state["params"]) == {"pinned_host"}
    step.save(tmp_path, state)
    kept = by_path(step, arrays(state)[0])
    alone, one = started(FULL, adamw(1e-2), model=MODEL, clip_norm=CLIP)
    back = one.restore(tmp_path)
    found = by_path(one, arrays(back)[0])
    jax.tree.map(np.testing.assert_array_equal, found, kept)
    one.save(tmp_path / "again", back)
    again = step.restore(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, arrays(again), arrays(state))
    assert kinds(again["opt_state"]) == {"pinned_host"}
    rows = {name: x[:5] for name, x in batch(7).items()}
    found, want = step.evaluate(again, rows), one.evaluate(one.restore(tmp_path), rows)
    np.testing.assert_allclose(found["cross_entropy"], want["cross_entropy"], rtol=1e-5)


SWEPT = [
    ("optimizer=1", "fsdp", adamw, None),
    ("optimizer=1", "fsdp", lamb, CLIP),
    ("optimizer=1", "reduced once", adamw, CLIP),
    ("optimizer=1", "tensor, in chunks", lamb, CLIP),
    ("optimizer=1,activations=1", "tensor, in chunks", adamw, CLIP),
    ("activations=1", "data", adamw, CLIP),
    ("parameters=1", "fsdp", adamw, None),
    ("parameters=1,activations=1", "data", adamw, CLIP),
    ("parameters=1,optimizer=1,activations=1", "data", lamb, CLIP),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("offload", "name", "make", "clip"), SWEPT)
def test_every_kind_of_state_on_every_mesh(offload, name, make, clip):
    assert_as_on_devices(offload, name, make, clip)


@pytest.mark.sweep
@pytest.mark.parametrize("remat", ["none", "qkv+mlp", "dots"])
def test_all_that_is_kept_goes_to_host_memory(remat):
    base = Plan(segments=(Segment(remat=remat),))
    found = []
    for offload in ("none", "activations=1"):
        state, _, metrics = run(plan_of({"stage": 2, "fsdp": 2}, offload, base=base))
        found.append((arrays(state), metrics))
    assert_same(*found[1], *found[0])


@pytest.mark.sweep
def test_host_memory_under_stages_equals_one_device():
    state, step, metrics = run(plan_of({"stage": 3}, "optimizer=1,activations=1"), clip_norm=CLIP)
    alone, one = started(FULL, adamw(1e-2, eps=1e-3), model=MODEL, clip_norm=CLIP)
    alone, want = stepped(alone, one, steps=2)
    found, wanted = by_path(step, state["params"]), by_path(one, alone["params"])
    assert_same(found, metrics, wanted, want)


REFUSED = {
    "a part of the layers": ({"optimizer": 0.5}, "optimizer: .* give 0 or 1"),
    "auto": ({"auto": True}, "auto: with 2 stages shares are not searched for"),
    "fused": ({"fused": True}, "fused: with 2 stages stages have all gradients"),
    "two passes": ({"optimizer": 1.0, "clipping": "two_pass"}, "'two_pass' would do nothing"),
    "disk": ({"optimizer": 1.0, "disk": 1.0}, "no state in a file; give disk 0"),
    "the CPU": (
        {"parameters": 1.0, "optimizer": 1.0, "cpu_update": 1.0},
        "give cpu_update off",
    ),
}


@pytest.mark.catches("stage-part-of-the-layers-away")
@pytest.mark.parametrize(("offload", "message"), REFUSED.values(), ids=REFUSED)
def test_what_stages_cannot_place_is_refused(offload, message):
    plan = Plan(mesh={"stage": 2}, offload=OffloadConfig(**offload))
    shapes = {"tokens": jax.ShapeDtypeStruct((8, 32), np.int32)}
    with pytest.raises(PlanError, match=message):
        started(plan, adamw(1e-2), model=MODEL, devices=jax.devices()[:2], shapes=shapes)


@pytest.mark.catches("stage-keeps-by-name-in-host-memory")
def test_what_layers_keep_by_name_is_refused():
    plan = Plan(mesh={"stage": 2}, segments=(Segment(remat="full", offload="qkv"),))
    with pytest.raises(PlanError, match="by no name but input; give activations"):
        started(plan, adamw(1e-2), model=MODEL, devices=jax.devices()[:2])


GATHERED = {
    "chunks": ({"chunks": 3}, "a layer of each chunk would be fetched for one"),
    "gathered once": ({"gather": "step"}, "weights gathered once a step are on the devices"),
}


@pytest.mark.parametrize(("how", "message"), GATHERED.values(), ids=GATHERED)
def test_parameters_in_host_memory_are_fetched_by_layer_or_refused(how, message):
    plan = plan_of({"stage": 2}, "parameters=1", **how)
    with pytest.raises(PlanError, match=message):
        started(plan, adamw(1e-2), model=MODEL, devices=jax.devices()[:2])


@pytest.mark.catches("stage-reduced-once-in-host-memory")
@pytest.mark.parametrize("share", ["parameters=1", "activations=1"])
def test_what_gradients_reduced_once_need_stays_on_the_devices(share):
    plan = plan_of({"stage": 2, "data": 2}, share, once=True)
    with pytest.raises(PlanError, match="reduce_once: stages that .* give plan.offload optimizer"):
        started(plan, adamw(1e-2), model=MODEL, devices=jax.devices()[:4])
