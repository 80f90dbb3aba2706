"""Programs of stages whose weights are gathered, and whose gradients are reduced, once a step.

The default run takes a few cases, `-m sweep` all others.
"""

import jax
import numpy as np
import pytest

from colossax.aot import collectives
from colossax.config import BatchConfig, PipelineConfig, Plan, Segment
from colossax.errors import PlanError
from colossax.optim import adamw
from tests.oracle import assert_losses_close, assert_trees_close
from tests.step import test_parallel_oracle as oracle
from tests.step.stages.test_programs import (
    KEEPING,
    assert_equals_one_device,
    cut,
    start,
    uneven,
)
from tests.step.stages.test_stages import devices_of, step_of


def once(mesh, *cuts, reduced=True, gather="step", **more):
    plan = uneven(mesh, *cuts, gather=gather, **more)
    return plan.replace(batch=BatchConfig(reduce_once=reduced))


QUICK = {
    "gathered": ("llama", once({"stage": 2, "fsdp": 4}, 5, 3, reduced=False)),
    "gathered and reduced, tied": (
        "gpt2",
        once({"stage": 2, "fsdp": 2}, 1, 3, 2, 2, count=2, schedule="zb_v"),
    ),
}
CASES = {
    "two": ("llama", once({"stage": 2, "fsdp": 4}, 5, 3)),
    "four": ("llama", once({"stage": 4, "fsdp": 2}, 3, 1, 2, 2, reduced=False)),
    "chunks": ("gpt2", once({"stage": 2, "fsdp": 4}, 1, 3, 2, 2, chunks=2)),
    "a ring": ("packed", once({"stage": 2, "ring": 2, "fsdp": 2}, 3, 5)),
    "a ring, chunks": ("packed", once({"stage": 2, "ring": 2, "fsdp": 2}, 2, 1, 3, 2, chunks=2)),
    "tensor": ("bloom", once({"stage": 2, "fsdp": 2, "tensor": 2}, 5, 3)),
    "2d": (
        "llama",
        once({"stage": 2, "fsdp": 2, "row": 2}, 3, 5, reduced=False, count=2, layout="2d"),
    ),
    "data alone": ("llama", once({"stage": 2, "data": 2}, 3, 5, gather="microbatch", name="ddp")),
    "zb_h1": ("llama", once({"stage": 2, "fsdp": 2}, 3, 5, schedule="zb_h1")),
    "four, tied": ("gpt2", once({"stage": 4, "fsdp": 2}, 3, 2, 2, 1)),
    "all kept": ("llama", once({"stage": 2, "fsdp": 2}, 3, 5, segments=(Segment(),))),
}


@pytest.mark.catches("programs-reduced-by-one")
@pytest.mark.parametrize(("model", "plan"), QUICK.values(), ids=QUICK)
def test_once_a_step_equals_one_device(model, plan):
    assert_equals_one_device(model, plan)


@pytest.mark.sweep
@pytest.mark.parametrize(("model", "plan"), CASES.values(), ids=CASES)
def test_every_form_once_a_step_equals_one_device(model, plan):
    assert_equals_one_device(model, plan)


def stepped(model, plan, steps):
    """Losses, and parameters in one stack."""
    step = step_of(
        model, plan, devices_of(plan) if plan.mesh else oracle.ONE, adamw(1e-2, eps=1e-3)
    )
    params = cut(start(model), plan)
    state = step.init_from(jax.device_put(params, step.shardings["params"]))
    losses = []
    for _ in range(steps):
        state, metrics = step(state, oracle.batch(model, rows=8))
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.tree.map(np.asarray, state["params"]), step, state


@pytest.mark.sweep
def test_three_steps_are_those_of_one_device_and_go_on_elsewhere(tmp_path):
    plans = [once({"stage": 2, "fsdp": 4}, 5, 3), once({"stage": 4, "fsdp": 2}, 3, 2, 2, 1)]
    want, right, one, _ = stepped("llama", Plan(), 3)
    for plan in plans:
        losses, params, step, state = stepped("llama", plan, 3)
        assert_losses_close(losses, want)
        assert_trees_close(params, cut(right, plan))
    step.save(tmp_path, state)
    batch = oracle.batch("llama", rows=8)
    counted = step.evaluate(state, batch), one.evaluate(one.restore(tmp_path), batch)
    assert_losses_close(*(np.array(each["cross_entropy"]) for each in counted))
    (_, on), (_, elsewhere) = (each(each.restore(tmp_path), batch) for each in (step, one))
    assert_losses_close(on["loss"], elsewhere["loss"])


def sent(plan, monkeypatch):
    """What each kind of program sends, by kind of collective: bytes of every call."""
    real, found = jax.jit, {}

    def recording(fn, **options):
        jitted, name = real(fn, **options), getattr(fn, "func", fn).__name__

        def call(*args):
            for each in collectives(jitted.lower(*args).compile().as_text(), mesh):
                found.setdefault((name, each.kind), []).append(each.bytes)
            return jitted(*args)

        return call

    step = step_of("llama", plan, devices_of(plan), KEEPING)
    mesh = step.bound.stage(0).mesh
    params = cut(start("llama"), plan)
    state = step.init_from(jax.device_put(params, step.shardings["params"]))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", recording)
        step(state, oracle.batch("llama", rows=8))
    return found, sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.catches("programs-gather-again")
def test_weights_are_gathered_once(monkeypatch):
    plan = once({"stage": 2, "fsdp": 2}, 5, 3, reduced=False)
    found, size = sent(plan, monkeypatch)
    # float32, in which these are computed; numbers of looked-up rows are gathered for gradients.
    assert sum(found.pop(("gathered", "all-gather"))) == 4 * size
    gathered = {name: max(each) for (name, kind), each in found.items() if kind == "all-gather"}
    assert gathered == {"backward": 256}
    again, _ = sent(uneven({"stage": 2, "fsdp": 2}, 5, 3), monkeypatch)
    assert sum(again["forward", "all-gather"]) > 2 * 4 * size


@pytest.mark.catches("programs-reduce-again")
def test_gradients_are_reduced_once_and_chunks_send_nothing(monkeypatch):
    found, size = sent(once({"stage": 2, "fsdp": 2}, 5, 3), monkeypatch)
    assert sum(found["reduced", "all-reduce"]) == sum(found["gathered", "all-gather"]) == 4 * size
    assert not {"forward", "backward"} & {name for name, _ in found}


def test_gradients_of_weights_that_are_gathered_again_are_not_reduced_once():
    plan = Plan(
        mesh={"stage": 2, "fsdp": 2},
        pipeline=PipelineConfig(cuts=(5, 3)),
        batch=BatchConfig(reduce_once=True),
    )
    with pytest.raises(PlanError, match=r"reduce_once: .* give plan.pipeline.gather step"):
        step_of("llama", plan, devices_of(plan), KEEPING)
