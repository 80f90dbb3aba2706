"""Killed, told to stop and resumed: the losses are those of the run that nobody touched."""

import random
import signal
import subprocess
import sys
import time

import pytest

from tests.train.launching import ROOT, Started, metrics, run, write_text

STEPS = 40
RUN = (f"--steps={STEPS}", "--validate-every=7", "--checkpoint-every=2")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("resume") / "text")


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nobody touched, and what it recorded."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(*RUN, f"--out={folder / 'run'}", text=text, log=folder / "log")
    assert done.code == 0, done.errors
    rows = metrics(folder / "run")
    assert [row[0] for row in rows if row[1] is not None] == list(range(1, STEPS + 1))
    return rows


def resume(out, text, *more):
    done = run(*RUN, f"--out={out}", "--resume", *more, text=text, log=out.with_suffix(".again"))
    assert done.code == 0, done.errors
    return done


def test_killed_at_random_moments_it_ends_as_if_nothing_had_been(text, whole, tmp_path):
    """A checkpoint is nearly always being written; the moment differs from run to run."""
    out = tmp_path / "run"
    started = Started(*RUN, f"--out={out}", text=text, log=tmp_path / "log").until(1)
    time.sleep(random.uniform(0, 1.5))
    killed = started.send(signal.SIGKILL).finish()
    assert killed.code == -signal.SIGKILL, "it had finished; kill it earlier"
    first = max(killed.losses)

    again = Started(*RUN, f"--out={out}", "--resume", text=text, log=tmp_path / "log2").until(first + 3)
    again.send(signal.SIGKILL).finish()

    done = resume(out, text)
    assert metrics(out) == whole, f"killed after step {first}, resumed at {min(done.losses)}"
    assert not list((out / "checkpoints").glob("*tmp*")), "a half-written checkpoint was left"


def test_on_another_mesh_the_losses_agree_to_rounding(text, whole, tmp_path):
    out = tmp_path / "run"
    started = Started(*RUN, f"--out={out}", text=text, log=tmp_path / "log").until(9)
    started.send(signal.SIGKILL).finish()
    mesh = ("--devices=4", "--plan.preset=zero3+megatron", "--plan.mesh=fsdp=2,tensor=2")
    done = resume(out, text, *mesh, "--plan.batch.accumulation=2", "--plan.segments.0.count=1",
                  "--plan.segments.1.count=1")  # fmt: skip
    assert "resumed from step" in done.errors
    resumed = metrics(out)
    assert [row[0] for row in resumed] == [row[0] for row in whole]
    numbers = [loss if held_out is None else held_out for _, loss, held_out in resumed]
    expected = [loss if held_out is None else held_out for _, loss, held_out in whole]
    assert numbers == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_told_to_stop_it_saves_and_goes_on_where_it_was(text, whole, tmp_path, number, code):
    out = tmp_path / "run"
    arguments = (f"--steps={STEPS}", "--validate-every=7", f"--out={out}")
    started = Started(*arguments, text=text, log=tmp_path / "log").until(5)
    stopped = started.send(number).finish()
    assert stopped.code == code, stopped.errors
    assert stopped.final["stopped_by"] == number.name
    assert [int(p.name) for p in (out / "checkpoints").iterdir()] == [stopped.final["step"]]
    assert f"stopped by {number.name} after step {stopped.final['step']}" in stopped.errors
    if number == signal.SIGTERM:
        done = resume(out, text)
        assert min(done.losses) == stopped.final["step"] + 1
        assert metrics(out) == whole


INTERRUPTED_TWICE = """
import os, signal, time
from colossax.train.signals import StopSignals
with StopSignals().installed() as signals:
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.wish == "SIGINT"
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def test_a_second_interrupt_ends_it_at_once():
    start = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_TWICE], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 130, process.stderr
    assert "interrupted twice; nothing more is saved" in process.stderr
    assert time.monotonic() - start < 60


def test_more_steps_keep_the_schedule_unless_another_is_asked(text, tmp_path):
    """Longer by resuming equals longer from the start with the same schedule."""
    out, other = tmp_path / "run", tmp_path / "other"
    short = run("--steps=6", f"--out={out}", text=text, log=tmp_path / "log")
    longer = run("--steps=9", f"--out={out}", "--resume", text=text, log=tmp_path / "log")
    assert list(longer.losses) == [7, 8, 9]
    schedule = "--optimizer.schedule_steps=6"
    once = run("--steps=9", schedule, f"--out={other}", text=text, log=tmp_path / "log")
    assert {**short.losses, **longer.losses} == once.losses
