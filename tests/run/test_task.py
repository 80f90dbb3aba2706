"""A task that is no text, run from Python: trained, evaluated, stopped, resumed, drawn."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.checkpoint import Checkpointer
from colossax.config import OffloadConfig, Plan, to_json
from colossax.errors import InputError
from colossax.nn import param
from colossax.planner.task_step import task_step
from colossax.processes import Group
from colossax.run import RunConfig, RunOptions, train
from colossax.run.plot import metrics_of
from colossax.run.records import read_records
from colossax.step import StepOptions
from colossax.tasks import Task

ROWS, WIDTH, STEPS = 8, 4, 6
PLAN = Plan(mesh={"fsdp": 2})


class TwoLayers(nnx.Module):
    """Regression on `WIDTH` numbers."""

    def __init__(self, rngs, width=8):
        self.into = param(jax.random.normal(rngs.params(), (WIDTH, width)), ("embed", "mlp"))
        self.out = param(jax.random.normal(rngs.params(), (width,)), ("mlp",))

    def __call__(self, x):
        return jnp.tanh(x @ self.into[...]) @ self.out[...]


def squares(model, batch):
    missed = jnp.sum((model(batch["x"]) - batch["y"]) ** 2)
    return {"squares": (missed, jnp.float32(batch["y"].size), 1.0)}, {}


def rows(number):
    x = np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x).sum(axis=1).astype(np.float32)}


def r2(step, state):
    """Share of the variance explained, on rows that no batch has."""
    held_out = rows(10**6)
    total, weight = jax.device_get(step.evaluate(state, held_out))["squares"]
    return {"r2": 1 - total / weight / held_out["y"].var(), "rows_seen": weight}


def toy(*, stop_at=None, **changes):
    @contextlib.contextmanager
    def batches(step, start):
        def endless():
            for number in itertools.count(start):
                if number == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.5)  # the thread that heeds it may have to wait for a processor
                yield rows(number)

        yield endless()

    task = Task(
        name="toy",
        make_model=TwoLayers,
        optimizer=optax.adam(1e-2),
        loss=squares,
        shapes={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in rows(0).items()},
        options=StepOptions(batch_dims={"x": ("batch", None), "y": ("batch",)}),
        batches=batches,
        evaluators={"fit": r2},
        tokens=ROWS,
        flops=ROWS * 6 * (WIDTH * 8 + 8),
        baselines=lambda: {"r2_of_the_mean": 0.0},
        identity=lambda: {"rows": ROWS},
    )
    return dataclasses.replace(task, **changes)


def trained(task, out, *, steps=STEPS, plan=PLAN, **options):
    config = RunConfig(plan=plan, steps=steps, validate_every=2)
    emitted = []
    where = RunOptions(
        out=str(out), devices=lambda: jax.devices()[:2], emit=emitted.append, **options
    )
    outcome = train(task, config, where, Group(None, {}))
    return outcome, {row["step"]: row["loss"] for row in emitted if "loss" in row}


@pytest.mark.catches("evaluators-ignored")
@pytest.mark.catches("resumed-from-the-first-batch")
def test_any_loss_is_trained_evaluated_stopped_resumed_and_drawn(tmp_path, capsys):
    whole, losses = trained(toy(), tmp_path / "whole")
    assert losses[STEPS] < losses[1] and whole.stopped_by is None
    evaluations = metrics_of(read_records(tmp_path / "whole" / "metrics.jsonl"))
    assert [step for step, _ in evaluations["r2"]] == [2, 4, 6]
    assert evaluations["rows_seen"][0] == (2, ROWS)
    assert whole.final["r2"] == evaluations["r2"][-1][1] and whole.final["r2_of_the_mean"] == 0
    assert not {"validation_loss", "unigram_entropy", "completion"} & whole.final.keys()
    assert (tmp_path / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().err
    assert f"step 6: r2 {whole.final['r2']:.4f}, rows seen 8.0000" in shown
    assert "r2 of the mean: 0.0000\nsteps 1 to 6 of 8 tokens into" in shown

    out = tmp_path / "stopped"
    stopped, first = trained(toy(stop_at=2), out)
    assert (stopped.stopped_by, stopped.final["step"]) == ("SIGTERM", max(first))
    resumed, rest = trained(toy(), out, resume=True)
    assert {**first, **rest} == losses and min(rest) == max(first) + 1
    assert resumed.final["r2"] == whole.final["r2"]


@pytest.mark.catches("question-recorded")
def test_a_run_writes_down_what_its_task_says_and_the_plan_that_ran(tmp_path):
    task = toy(
        documents=lambda: {"units": "metres"},
        introduction=lambda: ["made up"],
        conclusion=lambda final: [f"explained {final['r2']:.0%}"],
        complete=lambda step, params: f"out {params['out'].shape}",
    )
    question = PLAN.replace(offload=OffloadConfig(cpu_update="auto", pipelined="auto"))
    done, _ = trained(task, tmp_path, steps=1, plan=question)
    plan = PLAN.replace(offload=OffloadConfig(cpu_update=0.0))
    documents = Checkpointer(tmp_path / "checkpoints").documents(1)
    assert documents["units"] == "metres" and documents["plan"] == to_json(plan)
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["config"] == {"plan": to_json(plan)} and written["identity"] == {"rows": ROWS}
    assert (done.final["completion"], done.final["plan"]) == ("out (8,)", plan.hash)
    with pytest.raises(InputError, match=f"--resume: rows is {ROWS} in .* and 9 here"):
        trained(toy(identity=lambda: {"rows": 9}), tmp_path, resume=True)


def test_metrics_have_names_of_their_own():
    step = task_step(toy(), Plan(), jax.devices()[:1])
    taken = toy(evaluators={"mean": lambda step, state: {"loss": 1.0}})
    twice = toy(evaluators=dict.fromkeys(("one", "other"), lambda step, state: {"r2": 1.0}))
    for task, name, metric in ((taken, "mean", "loss"), (twice, "other", "r2")):
        with pytest.raises(InputError, match=f"evaluator '{name}': gives a metric '{metric}'"):
            task.evaluated(step, {})


@pytest.mark.catches("stopped-and-completed")
def test_told_to_stop_in_the_last_evaluation_it_completes_nothing(tmp_path):
    def told(step, state):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # the thread that heeds it may have to wait for a processor
        return {"told": 1.0}

    task = toy(evaluators={"told": told}, complete=lambda step, params: pytest.fail("completed"))
    outcome, _ = trained(task, tmp_path / "run", steps=2)
    assert outcome.stopped_by == "SIGTERM" and outcome.final["told"] == 1.0
    assert Checkpointer(tmp_path / "run" / "checkpoints").latest() == 2
