"""Programs of stages in several processes give what they give in one."""

import itertools

import jax
import numpy as np
import pytest

from colossax.config import Plan
from colossax.optim import adamw
from colossax.step.programs import forms, passes, processes, sending
from colossax.step.programs.processes import Way
from tests.launching import free_port
from tests.step import test_parallel_oracle as oracle
from tests.step.stages import several
from tests.step.stages.test_many_devices import assert_equal, started
from tests.step.stages.test_programs import uneven
from tests.step.stages.test_stages import devices_of, step_of


def told_by(count, name, folder):
    """What processes of a case have found."""
    words = ("-m", "tests.step.stages.several", f"127.0.0.1:{free_port()}", str(count))
    devices = several.DEVICES // count
    assert_equal(
        *(started(*words, str(at), name, str(folder), devices=devices) for at in range(count))
    )
    return np.load(folder / f"{name}-{count}.npz")


def assert_as_one(name, count, folder, rtol=0.0):
    """Losses, norms, totals, and what is on disk."""
    want, got = told_by(1, name, folder), told_by(count, name, folder)
    assert want.files == got.files
    for key in want.files:
        np.testing.assert_allclose(got[key], want[key], rtol=rtol, err_msg=key)


@pytest.mark.slow
@pytest.mark.catches("programs-processes-all")
def test_a_stage_of_each_process_is_as_in_one(tmp_path):
    """Four of them: each sends to its neighbours alone. Layers count, and what they count goes to
    the last."""
    assert_as_one("sums", 4, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["one", "two", "chunks", "zb_h1", "tied", "gpipe", "host"])
def test_two_processes_with_whole_stages_are_as_one(name, tmp_path):
    """Bit for bit, and so is what lies on disk, which another mesh reads."""
    assert_as_one(name, 2, tmp_path)
    if name == "chunks":
        _, plan, _ = several.cases()[name]
        elsewhere = Plan(mesh={"fsdp": 4}, segments=plan.segments)
        step = step_of("gpt2", elsewhere, jax.devices()[:4], adamw(1e-2))
        states = [step.restore(tmp_path / f"{name}-{count}") for count in (1, 2)]
        jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, states))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["beside", "crossed", "host_beside"])
def test_stages_that_span_both_processes_are_as_one(name, tmp_path):
    """To rounding: collectives within a stage add in another order between processes."""
    assert_as_one(name, 2, tmp_path, rtol=1e-6)


FORMS = [
    pytest.param("gpt2", uneven({"stage": 2, "fsdp": 2}, 5, 3), id="tied"),
    pytest.param(
        "llama",
        uneven({"stage": 2, "fsdp": 2}, 1, 3, 2, 2, chunks=2),
        id="interleaved",
        marks=pytest.mark.sweep,
    ),
    pytest.param(
        "llama",
        uneven({"stage": 2, "tensor": 2}, 3, 5, schedule="zb_h1"),
        id="zb_h1",
        marks=pytest.mark.sweep,
    ),
]


def losses(model, plan):
    """Of two steps and an evaluation, and the parameters then."""
    step = step_of(model, plan, devices_of(plan), adamw(1e-2))
    state, told = step.init(3), []
    for _ in range(2):
        state, metrics = step(state, oracle.batch(model, rows=8))
        told.append(jax.tree.map(np.asarray, metrics))
    told.append(jax.tree.map(np.asarray, step.evaluate(state, oracle.batch(model, rows=8))))
    return told, jax.tree.map(np.asarray, state["params"])


@pytest.fixture
def as_if_apart(monkeypatch):
    """Stages send to one another as those of different processes do; what is done, in order."""
    done = []

    def noted(fn, name):
        def noting(*args, **more):
            done.append((name, args))
            return fn(*args, **more)

        return noting

    for module in (processes, passes, sending):
        monkeypatch.setattr(module, "way", lambda *_: Way.ACROSS)
    monkeypatch.setattr(forms, "in_several", lambda _: True)
    monkeypatch.setattr(processes, "sent_between", noted(processes.sent_between, "connect"))
    monkeypatch.setattr(passes, "sent", noted(passes.sent, "send"))
    monkeypatch.setattr(passes.BothWays, "_do", noted(passes.BothWays._do, "do"))
    return done


@pytest.mark.catches("programs-processes-first-found")
@pytest.mark.parametrize(("model", "plan"), FORMS)
def test_what_is_sent_by_programs_of_both_sides_is_the_same(model, plan, request):
    want = losses(model, plan)
    request.getfixturevalue("as_if_apart")
    jax.tree.map(np.testing.assert_array_equal, losses(model, plan), want)


@pytest.mark.catches("programs-processes-unconnected")
@pytest.mark.catches("programs-processes-send-at-once")
def test_sends_stand_between_ticks(as_if_apart):
    """A program that waits for another process holds up what is dispatched behind it. Both sides
    have met before: a first meeting gives up when one of them comes too late."""
    plan = uneven({"stage": 2, "fsdp": 2}, 5, 3)
    step = step_of("llama", plan, devices_of(plan), adamw(1e-2))
    step(step.init(3), oracle.batch("llama", rows=8))
    (form,) = step.jitted.forms.values()
    ticks = [tick for tick, _, _ in form.table.operations()]
    ends = {0, *itertools.accumulate(len(list(of)) for _, of in itertools.groupby(ticks))}
    names = [name for name, _ in as_if_apart]
    before = {names[:at].count("do") for at, name in enumerate(names) if name == "send"}
    assert before and before <= ends
    met = {(args[2], args[3]) for name, args in as_if_apart if name == "connect"}
    sent = {(args[1].mesh, args[2].mesh) for name, args in as_if_apart if name == "send"}
    assert sent and sent <= met
