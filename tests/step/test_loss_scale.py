"""A loss in float16: scaled, found to overflow, skipped; the scale from step to step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.config import (
    BatchConfig,
    LossScale,
    OffloadConfig,
    PipelineConfig,
    Plan,
    Precision,
    Segment,
)
from colossax.errors import PlanError
from colossax.models import maker
from colossax.optim import adamw, sgd
from colossax.planner import build_step
from colossax.step.gradients.loss_scale import first_scale, next_scale
from colossax.tasks import next_token_loss
from tests.fresh import fresh_state
from tests.nn.test_own_updates import batches, inputs, peaks, step_of
from tests.oracle import assert_trees_close
from tests.step.test_step import CONFIG, text_batch, truth

HALF = 2e-2
"""Tolerance of what is computed in 16 bits, as of bfloat16; float16 has three bits more."""

HOSTED = (Segment(offload="parameters+optimizer", remat="full"),)


def half(**scale):
    return Precision(compute="float16", loss_scale=LossScale(**scale))


def started(mesh, precision=None, *, optimizer=None, loss=None, clip_norm=None, **plan):
    count = int(np.prod(list(mesh.values())))
    step = build_step(
        maker(CONFIG),
        optimizer or adamw(1e-2),
        loss or next_token_loss(z_loss=1e-3),
        Plan(mesh=mesh, precision=precision or half(), **plan),
        devices=jax.devices()[:count],
        clip_norm=clip_norm,
    )
    return fresh_state(CONFIG, step), step


def weakened(by):
    """The loss times a small number, as of a model whose gradients are small."""

    def loss(model, batch):
        terms, metrics = next_token_loss(z_loss=1e-3)(model, batch)
        return {name: (t, w, c * by) for name, (t, w, c) in terms.items()}, metrics

    return loss


def scale_of(state):
    return {name: float(x) for name, x in state["loss_scale"].items()}


def by_path(infos, tree):
    """`{path: [layers, ...]}`, whatever the segments."""
    found = {}
    for info, leaf in zip(jax.tree.leaves(infos), jax.tree.leaves(tree), strict=True):
        leaf = np.asarray(leaf)
        part = leaf if info.stacked or info.first_layer is None else leaf[None]
        found.setdefault(info.path, []).append(part)
    return {path: np.concatenate(parts) for path, parts in found.items()}


def after(config, scale, good, *, loss=1.0, finite=True):
    before = {"scale": jnp.float32(scale), "good_steps": jnp.int32(good)}
    found = next_scale(config, before, jnp.float32(loss), jnp.bool_(finite))
    assert found["scale"].dtype == jnp.float32 and found["good_steps"].dtype == jnp.int32
    return float(found["scale"]), int(found["good_steps"])


@pytest.mark.catches("loss-scale-not-backed-off")
@pytest.mark.catches("loss-scale-below-its-minimum")
@pytest.mark.catches("loss-scale-falls-with-the-loss")
def test_the_scale_grows_after_good_steps_and_backs_off_at_an_overflow():
    config = LossScale(growth_interval=3, minimum=2.0)
    assert first_scale(config) == {"scale": 2.0**16, "good_steps": 0}
    assert after(config, 8.0, 0) == (8.0, 1)
    assert after(config, 8.0, 2) == (16.0, 0)
    assert after(config, 8.0, 2, finite=False) == (4.0, 0)
    assert after(config, 2.0, 2, finite=False) == (2.0, 0)
    # No scale is the cure of a loss that is not finite.
    assert after(config, 8.0, 2, loss=np.nan, finite=False) == (8.0, 2)
    # Gradients that never overflow do not make it infinite.
    assert after(config, 2.0**127, 2) == (2.0**127, 0)


def test_numbers_of_the_scale_are_held_to_their_bounds():
    cases = {
        "loss_scale.initial: found 0.5, which is below the minimum 1": {"initial": 0.5},
        "loss_scale.backoff_factor: found 1.0; give a number between 0 and 1": {
            "backoff_factor": 1.0
        },
        "loss_scale.growth_factor: found 0.5; give 1 or more": {"growth_factor": 0.5},
        "loss_scale.growth_interval: found 0; give 1 or more": {"growth_interval": 0},
    }
    for message, fields in cases.items():
        with pytest.raises(PlanError, match=message):
            LossScale(**fields)
    with pytest.raises(
        PlanError, match="precision.params: found 'float16', in which what is added"
    ):
        Precision(params="float16")
    with pytest.raises(PlanError, match="precision.reduction: found 'float16' beside compute"):
        Precision(compute="bfloat16", reduction="float16")


@pytest.mark.sentinel
@pytest.mark.catches("loss-not-scaled")
@pytest.mark.catches("gradients-stay-scaled")
def test_small_gradients_are_kept_by_the_scale_and_come_out_without_it():
    """Of a loss of 1e-5 float16 keeps little without a scale."""
    weak = 2.0**-16
    wanted = jax.tree.map(lambda g: g * weak, truth()[0])
    batch = text_batch()
    state, step = started({"fsdp": 1}, half(initial=2.0**24), loss=weakened(weak))
    found = jax.jit(step.gradients)(state, batch)
    assert found.loss_scale is None
    assert_trees_close(found.grads, wanted, tolerance=HALF)
    np.testing.assert_allclose(found.loss, truth()[1] * weak, rtol=1e-3)
    lowest = {"scale": jnp.float32(1), "good_steps": jnp.int32(0)}
    lost = jax.jit(step.gradients)({**state, "loss_scale": lowest}, batch)
    with pytest.raises(AssertionError):
        assert_trees_close(lost.grads, wanted, tolerance=HALF)


def overflowing(mesh, precision=None, steps=4, **options):
    """Losses, scales and parameters of steps of which the first overflow."""
    precision = precision or half(initial=2.0**24, growth_interval=2, backoff_factor=0.125)
    state, step = started(mesh, precision, **options)
    start = by_path(step.spec.infos, state["params"])
    found = []
    for _ in range(steps):
        state, metrics = step(state, text_batch())
        numbers = {name: float(metrics[name]) for name in ("skipped", "loss_scale", "loss")}
        found.append({**numbers, **scale_of(state), "step": int(state["step"])})
        if found[-1]["skipped"] == len(found):
            now = by_path(step.spec.infos, state["params"])
            jax.tree.map(np.testing.assert_array_equal, now, start)
    return found, state, step


DECISIONS = [
    (1.0, 2.0**24, 2.0**21, 0),
    (2.0, 2.0**21, 2.0**18, 0),
    (2.0, 2.0**18, 2.0**18, 1),
    (2.0, 2.0**18, 2.0**19, 0),
]
"""Skipped so far, scale of the step, scale and good steps after it."""


def decisions(found):
    return [(x["skipped"], x["loss_scale"], x["scale"], x["good_steps"]) for x in found]


@pytest.mark.catches("overflow-is-applied")
def test_a_step_that_overflows_changes_the_scale_alone():
    found, state, _ = overflowing({"fsdp": 1})
    assert decisions(found) == DECISIONS
    assert [x["step"] for x in found] == [1, 2, 3, 4]
    losses = [x["loss"] for x in found]
    assert losses[0] == losses[1] == losses[2] > losses[3]
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state["params"]))


MESHES = {
    "fsdp": ({"fsdp": 8}, {}),
    "tensor": ({"fsdp": 2, "tensor": 4}, {}),
    "ring": ({"fsdp": 2, "ring": 2, "ulysses": 2}, {}),
    "accumulation": ({"fsdp": 4}, {"batch": BatchConfig(accumulation=2)}),
    "reduce_once": ({"data": 4}, {"batch": BatchConfig(accumulation=2, reduce_once=True)}),
    "stages": ({"stage": 2, "fsdp": 2}, {}),
    "zero_bubble": ({"stage": 2}, {"pipeline": PipelineConfig(schedule="zb_h1")}),
    "programs": ({"stage": 2, "fsdp": 2}, {"pipeline": PipelineConfig(cuts=(1, 1))}),
    "stack": ({"fsdp": 2}, {"segments": HOSTED}),
    "two_pass": (
        {"fsdp": 2},
        {"segments": HOSTED, "offload": OffloadConfig(clipping="two_pass")},
    ),
    "speculate": (
        {"fsdp": 2},
        {"segments": HOSTED, "offload": OffloadConfig(clipping="speculate")},
    ),
    "cpu": ({"fsdp": 1}, {"segments": HOSTED, "offload": OffloadConfig(cpu_update=1.0)}),
    "staged_host": ({"stage": 2}, {"segments": HOSTED}),
}


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("name", MESHES)
def test_the_decision_is_that_of_one_device(name, clip_norm):
    """The parameters too, as far as float16 goes: of plain steps, a gradient each."""
    mesh, plan = MESHES[name]
    how = {"optimizer": sgd(0.5), "clip_norm": clip_norm}
    alone, want, one = overflowing({"fsdp": 1}, **how)
    found, got, step = overflowing(mesh, **how, **plan)
    assert decisions(found) == decisions(alone) == DECISIONS
    np.testing.assert_allclose([x["loss"] for x in found], [x["loss"] for x in alone], rtol=2e-3)
    first = by_path(one.spec.infos, fresh_state(CONFIG, one)["params"])
    moved = [
        {path: leaf - first[path] for path, leaf in by_path(each.spec.infos, tree).items()}
        for each, tree in ((step, got["params"]), (one, want["params"]))
    ]
    assert_trees_close(*moved, tolerance=HALF)


@pytest.mark.catches("clipped-with-the-scale")
def test_gradients_are_clipped_by_the_norm_that_they_have_without_the_scale():
    """Under plain SGD of rate 1 the parameters' change is the clipped gradient."""
    state, step = started({"fsdp": 1}, optimizer=sgd(1.0), clip_norm=0.25)
    first = by_path(step.spec.infos, state["params"])
    state, metrics = step(state, text_batch())
    now = by_path(step.spec.infos, state["params"])
    norm = np.sqrt(sum(np.sum((now[path] - first[path]) ** 2) for path in now))
    assert float(metrics["grad_norm"]) > 1
    np.testing.assert_allclose(norm, 0.25, rtol=1e-3)


def test_layers_clipped_by_themselves_would_have_moved_when_one_overflows():
    with pytest.raises(PlanError, match="clipping 'layer': that a gradient overflows float16"):
        started(
            {"fsdp": 2}, segments=HOSTED, clip_norm=1.0, offload=OffloadConfig(clipping="layer")
        )


@pytest.mark.sweep
@pytest.mark.catches("loss-scale-not-saved")
def test_the_scale_is_resumed_exactly_and_restored_onto_another_mesh(tmp_path):
    def run(state, step, steps):
        found = []
        for _ in range(steps):
            state, metrics = step(state, text_batch())
            found.append((float(metrics["loss"]), *scale_of(state).values()))
        return found, state

    precision = half(initial=2.0**22, growth_interval=2)
    state, step = started({"fsdp": 4}, precision)
    first, state = run(state, step, 3)
    step.save(tmp_path, state)
    whole, _ = run(state, step, 4)
    again, _ = run(step.restore(tmp_path), step, 4)
    assert again == whole and first[-1][2] != 2.0**22
    other = started({"fsdp": 2, "tensor": 2}, precision)[1]
    moved = other.restore(tmp_path)
    assert scale_of(moved)["scale"] == first[-1][2]
    assert [x[1:] for x in run(moved, other, 4)[0]] == [x[1:] for x in whole]


@pytest.mark.sweep
def test_a_state_without_a_scale_gets_the_first_one_and_one_with_it_can_do_without(tmp_path):
    narrow, wide = half(initial=2.0**10), Precision(compute="bfloat16")
    step, plain = started({"fsdp": 1}, narrow)[1], started({"fsdp": 1}, wide)[1]
    plain.save(tmp_path / "plain", plain.init(0))
    assert scale_of(step.restore(tmp_path / "plain")) == {"scale": 2.0**10, "good_steps": 0.0}
    step.save(tmp_path / "half", step.init(0))
    assert "loss_scale" not in plain.restore(tmp_path / "half")


@pytest.mark.catches("own-update-without-scale")
def test_a_parameter_with_a_rule_of_its_own_gets_what_its_type_gives():
    """Here the largest input, which no scale has multiplied."""
    step = step_of(Plan(mesh={"fsdp": 1}, precision=half(initial=2.0**8)))
    state, batch = step.init(), batches(1)[0]
    want = inputs(state, batch)
    state, _ = step(state, batch)
    np.testing.assert_allclose(peaks(state), want, rtol=1e-2)


@pytest.mark.catches("gradients-stay-scaled-in-the-update")
def test_optimizers_of_optax_get_gradients_without_a_scale():
    given = []

    def update(grads, state, params=None):
        given.append(grads)
        return jax.tree.map(jnp.zeros_like, grads), optax.tree.norm(grads)

    spy = optax.GradientTransformation(lambda params: jnp.float32(0), update)
    state, step = started({"fsdp": 1}, optimizer=spy)
    state, metrics = step(state, text_batch())
    np.testing.assert_allclose(state["opt_state"], metrics["grad_norm"], rtol=1e-5)
