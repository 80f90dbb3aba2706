"""Killed between the disk tier's commit and a record or an evaluation, a run lacks neither."""

import contextlib
import io
import itertools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import pytest

from colossax.config import OffloadConfig, Plan, Segment
from colossax.models import maker
from colossax.optim import adamw
from colossax.planner.counting.flops import Yardstick
from colossax.processes import Group
from colossax.processes.agreement import Gate
from colossax.run import RunConfig, RunOptions, train
from colossax.run.meter import Meter
from colossax.run.progress import Screen
from colossax.run.records import read_records
from colossax.run.run import Hooks, Loop, Schedule
from colossax.run.unfinished import Unfinished, unfinished
from colossax.tasks import Task, next_token_loss
from tests.step.offloaded.streamed import CONFIG, batch

STEPS, MIDDLE = 8, 3
PLAN = Plan(
    segments=(Segment(remat="full"),),
    offload=OffloadConfig(parameters=1.0, optimizer=1.0, disk=1.0),
)
UNKNOWN = {"tokens_per_s", "step_seconds", "data_seconds", "host_bytes"}
"""What nobody knows of a step of a process that is gone."""


def task_of(evaluate, **changes):
    @contextlib.contextmanager
    def batches(step, start):
        yield (batch(number) for number in itertools.count(start))

    return Task(
        name="small",
        make_model=maker(CONFIG),
        optimizer=adamw(1e-3),
        loss=next_token_loss(),
        shapes={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch().items()},
        batches=batches,
        evaluators={"held_out": evaluate},
        learning_rate=lambda updates: 1e-3 / (1 + updates),
        identity=lambda: {"of": "a test"},
        tokens=0,
        flops=0,
        **changes,
    )


def held_out(step, state):
    total, weight = jax.device_get(step.evaluate(state, batch(99)))["cross_entropy"]
    return {"held_out": float(total / weight)}


def trained(out, task, **options):
    config = RunConfig(plan=PLAN, steps=STEPS, validate_every=MIDDLE, checkpoint_every=2)
    told = []
    where = RunOptions(
        out=str(out),
        devices=lambda: jax.devices()[:1],
        trackers=("json",),
        emit=told.append,
        **options,
    )
    return train(task, config, where, Group(None, {})), told


def rows_of(out):
    return list(read_records(out / "metrics.jsonl"))


def known(rows):
    return [{name: x for name, x in row.items() if name not in UNKNOWN} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run's rows and outcome, and its folder as it was at each evaluation, before the record."""
    folder = tmp_path_factory.mktemp("whole")

    def evaluate(step, state):
        shutil.copytree(folder / "run", folder / f"at {int(state['step'])}")
        return held_out(step, state)

    outcome, _ = trained(folder / "run", task_of(evaluate))
    return folder, rows_of(folder / "run"), outcome


def killed(whole, tmp_path, step, keep):
    """The folder of a run that died at a step of which it had recorded so many lines."""
    folder, rows, _ = whole
    out = tmp_path / "run"
    shutil.copytree(folder / f"at {step}", out)
    assert str(step) not in [made.name for made in (out / "checkpoints").iterdir()]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows[:keep])
    (out / "metrics.jsonl").write_text(lines)
    return out


# Of 11 lines the 4th and the 8th are the evaluations of steps 3 and 6, and the last that of step 8.
@pytest.mark.catches("unrecorded-step-is-lost")
@pytest.mark.catches("step-before-is-lost")
@pytest.mark.catches("evaluation-of-the-file-is-lost")
@pytest.mark.catches("state-of-the-file-is-unsaved")
@pytest.mark.parametrize(
    "step, keep",
    [
        (MIDDLE, MIDDLE - 2),
        pytest.param(MIDDLE, MIDDLE - 1, marks=pytest.mark.sweep),
        pytest.param(MIDDLE, MIDDLE, marks=pytest.mark.sweep),
        (MIDDLE, MIDDLE + 1),
        (STEPS, 8),
        pytest.param(STEPS, 10, marks=pytest.mark.sweep),
        (STEPS, 11),
    ],
)
def test_no_record_and_no_evaluation_of_the_steps_that_the_file_holds_is_lost(
    whole, tmp_path, capsys, step, keep
):
    _, rows, ended = whole
    out = killed(whole, tmp_path, step, keep)
    outcome, told = trained(out, task_of(held_out), resume=True)
    errors = capsys.readouterr().err
    assert f"resumed from step {step}, which" in errors and "lacks" not in errors
    assert known(rows_of(out)) == known(rows)
    assert [row["step"] for row in told if "loss" in row] == [
        row["step"] for row in rows[keep:] if "loss" in row
    ]
    assert outcome.failure is None and (out / "checkpoints" / str(STEPS)).is_dir()
    for name in ("step", "loss", "held_out", "checkpoint", "skipped"):
        assert outcome.final[name] == ended.final[name], name


@pytest.mark.catches("callbacks-go-on-from-the-file")
def test_callbacks_go_on_from_a_checkpoint_and_not_from_the_file(whole, tmp_path, capsys):
    out, called = killed(whole, tmp_path, MIDDLE, MIDDLE), []
    task = task_of(held_out, callbacks=[lambda now: called.append(now.done)])
    trained(out, task, resume=True)
    errors = capsys.readouterr().err
    assert "holds step 3, and nothing of the callbacks; resuming from the last" in errors
    assert called == list(range(MIDDLE, STEPS + 1))
    assert known(rows_of(out)) == known(whole[1])


@pytest.mark.catches("skipped-before-the-kill-forgotten")
@pytest.mark.parametrize("before, done", [(1, 6), (2, 5), (3, 4)])
def test_steps_that_were_skipped_before_it_was_killed_count(before, done):
    def step(state, batch):
        state = {"done": state["done"] + 1, "skipped": state["skipped"] + 1}
        numbers = {"loss": math.nan, "grad_norm": 1.0, "tokens": 1.0, "skipped": state["skipped"]}
        return state, {name: jnp.float32(value) for name, value in numbers.items()}

    records = []
    hooks = Hooks(
        record=records.append,
        validate=lambda state: {},
        save=lambda state, done: None,
        progress=Screen(visible=False, stream=io.StringIO()),
    )
    schedule = Schedule(steps=9, validate_every=0, checkpoint_every=0, stop_after_skipped=3)
    meter = Meter(Yardstick(flops_per_token=0, peak=None), skipped=before)
    numbers = {"loss": math.nan, "grad_norm": 1.0, "tokens": 1.0, "skipped": float(before)}
    left = Unfinished(metrics={4: numbers}, skipped_in_a_row=before)
    loop = Loop(step, schedule, hooks, Gate(4), meter)
    ended = loop.run({"done": 4, "skipped": before}, itertools.repeat({}), 4, left)[1]
    assert (ended, loop.hopeless) == (done, True)
    assert [record["step"] for record in records] == list(range(4, done + 1))


def test_skipped_steps_are_counted_in_records_and_in_the_file(tmp_path):
    losses = {1: 5.0, 2: None, 3: 4.0, 4: None, 5: None}
    rows = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in losses.items()]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    held = {step: {"loss": math.nan, "grad_norm": 1.0} for step in (5, 6)}
    left = unfinished(path, held, 6)
    assert (list(left.metrics), left.last, left.skipped_in_a_row) == ([6], rows[-1], 3)
