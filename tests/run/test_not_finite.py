"""Runs that are no longer finite."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.cli.options.arguments import Parser
from colossax.cli.train import UNFINISHED, add_arguments, run
from colossax.config import LossScale, Precision
from colossax.planner import boost
from colossax.processes import Group
from colossax.run import Outcome, RunConfig, RunOptions, train
from colossax.run.not_finite import first_not_finite
from colossax.run.records import read_records
from tests.run.test_task import PLAN, rows, squares, toy

DIMS = {"x": ("batch", None), "y": ("batch",)}


def infinite_gradient(model, batch):
    """Finite where its derivative by `into` is not."""
    terms, metrics = squares(model, batch)
    root = jnp.sqrt(jnp.sum(model.into[...] * 0.0))
    total, weight, coefficient = terms["squares"]
    return {"squares": (total + root, weight, coefficient)}, metrics


def infinite_loss(model, batch):
    total, weight, coefficient = squares(model, batch)[0]["squares"]
    return {"squares": (total / 0.0, weight, coefficient)}, {}


def first(loss=squares, batch=None, poison=None):
    batch = rows(0) if batch is None else batch
    plan, where = PLAN, {"devices": jax.devices()[:2]}
    state, step = boost(toy().make_model, optax.sgd(0.1), loss, plan, batch_dims=DIMS, **where)
    if poison is not None:
        state["params"][poison] = state["params"][poison] * jnp.nan
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 1
    return first_not_finite(step, state, batch)


@pytest.mark.catches("not-finite-unnamed")
def test_what_is_not_finite_first_is_named():
    assert first(batch={**rows(0), "x": rows(0)["x"] * np.nan}) == "batch 'x'"
    assert first(poison="out") == "parameter 'out'"
    assert first(infinite_loss) == "the loss"
    assert first(infinite_gradient) == "the gradient of 'into'"


@pytest.mark.catches("not-finite-ends-well")
def test_a_run_that_is_not_finite_stops_says_why_and_keeps_its_last_good_checkpoint(
    tmp_path, capsys
):
    @contextlib.contextmanager
    def batches(step, start):
        yield ({**rows(n), "y": rows(n)["y"] * (np.nan if n > 4 else 1)} for n in itertools.count())

    config = RunConfig(plan=PLAN, steps=50, checkpoint_every=2, keep=1, stop_after_skipped=4)
    options = RunOptions(out=str(tmp_path), devices=lambda: jax.devices()[:2])
    outcome = train(toy(batches=batches), config, options, Group(None, {}))
    assert outcome.stopped_by is None and outcome.final["step"] == 9
    assert outcome.failure in capsys.readouterr().err and "\n" not in outcome.failure
    assert outcome.failure.startswith(
        "stopped at step 9: the last 4 steps were skipped, as loss or gradient norm was not finite,"
        f" first batch 'y'; the last good checkpoint is that of step 4, in {tmp_path}"
    )
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert kept == ["4"] and outcome.final["checkpoint"] == 4


def scaled_run(tmp_path, *, steps=14, **scale):
    """A toy whose gradients, in float32, overflow above a scale of about 2^62."""
    precision = Precision(compute="float16", loss_scale=LossScale(**scale))
    plan = PLAN.replace(precision=precision)
    config = RunConfig(plan=plan, steps=steps, checkpoint_every=2, stop_after_skipped=4)
    options = RunOptions(out=str(tmp_path), devices=lambda: jax.devices()[:2])
    outcome = train(toy(), config, options, Group(None, {}))
    rows = [row for row in read_records(tmp_path / "metrics.jsonl") if "loss" in row]
    return outcome, [row["loss_scale"] for row in rows]


@pytest.mark.catches("overflow-ends-the-run")
def test_overflow_above_the_least_scale_does_not_end_a_run(tmp_path, capsys):
    outcome, scales = scaled_run(tmp_path, initial=2.0**70)
    assert outcome.failure is None and outcome.final["step"] == 14
    skipped = outcome.final["skipped"]
    assert skipped > 4
    assert scales == [2.0 ** (70 - min(n, skipped)) for n in range(14)]
    told = capsys.readouterr().err
    why = "its gradients overflow float16 at a loss scale of 1.18059e+21 (1 so far)"
    assert f"step 1 was skipped: {why}" in told
    assert outcome.final["checkpoint"] == 14


@pytest.mark.catches("overflow-never-ends-the-run")
def test_overflow_at_the_least_scale_counts_as_not_finite(tmp_path):
    outcome, scales = scaled_run(tmp_path, initial=2.0**70, minimum=2.0**69)
    assert outcome.failure is not None and scales == [2.0**70, *[2.0**69] * 4]
    assert outcome.failure.startswith(
        "stopped at step 5: the last 5 steps were skipped, as loss or gradient norm was not finite,"
        " first the gradient norm"
    )


def test_a_run_of_nothing_but_overflow_says_so(tmp_path):
    outcome, _ = scaled_run(tmp_path, steps=3, initial=2.0**70)
    assert outcome.failure is not None and outcome.failure.startswith(
        "all 3 steps were skipped, as gradients overflow float16 down to a loss scale of"
        " 2.95148e+20;"
    )
    assert "lower plan.precision.loss_scale.initial" in outcome.failure


@pytest.mark.catches("not-finite-exit")
@pytest.mark.parametrize("failure, code", [("stopped at step 9", UNFINISHED), (None, 0)])
def test_the_command_line_ends_with_its_exit_code(failure, code, tmp_path, monkeypatch):
    parser = Parser(prog="colossax train", description="")
    add_arguments(parser, "train")
    args = parser.parse_args(["llama_tiny", "--out", str(tmp_path)])
    ended = Outcome(final={}, stopped_by=None, failure=failure)
    monkeypatch.setattr("colossax.run.train", lambda *given: ended)
    monkeypatch.setattr("colossax.processes.start_jax", lambda launch: None)
    assert run("train", args, []) == code and UNFINISHED == 3
