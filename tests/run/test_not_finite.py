"""Runs that are no longer finite."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.cli.arguments import Parser
from colossax.cli.train import UNFINISHED, add_arguments, run
from colossax.planner import boost
from colossax.processes import Group
from colossax.run import Outcome, RunConfig, RunOptions, train
from colossax.run.not_finite import first_not_finite
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
