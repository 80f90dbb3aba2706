"""Killed, told to stop and resumed: the losses are those of the run that nobody touched."""

import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.launching import ROOT, Started, metrics, run, write_text

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


@pytest.fixture(scope="module")
def killed(text, tmp_path_factory):
    """A run killed at a moment that differs each time, a checkpoint nearly always half written."""
    folder = tmp_path_factory.mktemp("killed")
    started = Started(*RUN, f"--out={folder / 'run'}", text=text, log=folder / "log").until(1)
    time.sleep(random.uniform(0, 1.5))
    left = started.send(signal.SIGKILL).finish()
    assert left.code == -signal.SIGKILL, "it had finished; kill it earlier"
    return folder / "run", max(left.losses)


def test_killed_at_random_moments_it_ends_as_if_nothing_had_been(killed, text, whole, tmp_path):
    folder, last = killed
    out = tmp_path / "run"
    shutil.copytree(folder, out)
    again = Started(*RUN, f"--out={out}", "--resume", text=text, log=tmp_path / "log")
    again.until(last + 3).send(signal.SIGKILL).finish()
    done = resume(out, text)
    assert metrics(out) == whole, f"killed after step {last}, resumed at {min(done.losses)}"
    assert not list((out / "checkpoints").glob("*tmp*")), "a half-written checkpoint was left"


def test_on_another_mesh_the_losses_agree_to_rounding(killed, text, whole, tmp_path):
    """Also with microbatches, and the layers in two segments."""
    folder, _ = killed
    out = tmp_path / "run"
    shutil.copytree(folder, out)
    mesh = ("--devices=4", "--plan.preset=zero3+megatron", "--plan.mesh=fsdp=2,tensor=2")
    segments = ("--plan.segments.0.count=1", "--plan.segments.1.count=1")
    resume(out, text, *mesh, *segments, "--plan.batch.accumulation=2")
    resumed = metrics(out)
    assert [row[0] for row in resumed] == [row[0] for row in whole]
    numbers = [loss if held_out is None else held_out for _, loss, held_out in resumed]
    expected = [loss if held_out is None else held_out for _, loss, held_out in whole]
    assert numbers == pytest.approx(expected, rel=1e-5)


def test_told_to_stop_it_saves_and_goes_on_where_it_was(text, whole, tmp_path):
    codes = {signal.SIGTERM: 143, signal.SIGINT: 130}
    endless = ("--steps=100000", f"--optimizer.schedule_steps={STEPS}", "--validate-every=7")
    started = {
        number: Started(
            *endless, f"--out={tmp_path / number.name}", text=text, log=tmp_path / f"{code}.log"
        )
        for number, code in codes.items()
    }
    last = {}
    for number, code in codes.items():
        stopped = started[number].until(5).send(number).finish()
        assert stopped.code == code, stopped.errors
        last[number] = stopped.final["step"]
        assert stopped.final["stopped_by"] == number.name
        assert f"stopped by {number.name} after step {last[number]}" in stopped.errors
        checkpoints = tmp_path / number.name / "checkpoints"
        assert [p.name for p in checkpoints.iterdir()] == [str(last[number])]
    out = tmp_path / "SIGTERM"
    assert min(resume(out, text).losses) == last[signal.SIGTERM] + 1
    assert metrics(out) == whole


STAGES = ("--devices=4", "--plan.mesh=stage=2,tensor=2", "--plan.pipeline.microbatches=2")


@pytest.mark.sweep
@pytest.mark.parametrize("away", ["none", "optimizer=1,activations=1"])
def test_stages_told_to_stop_go_on_as_stages_and_on_another_mesh(away, text, whole, tmp_path):
    endless = ("--steps=100000", f"--optimizer.schedule_steps={STEPS}", "--validate-every=7")
    offload = f"--plan.offload={away}"
    out = tmp_path / "run"
    started = Started(*endless, *STAGES, offload, f"--out={out}", text=text, log=tmp_path / "log")
    stopped = started.until(5).send(signal.SIGTERM).finish()
    assert stopped.code == 143, stopped.errors
    last = stopped.final["step"]
    other = tmp_path / "other"
    shutil.copytree(out, other)
    assert min(resume(out, text, *STAGES, offload).losses) == last + 1
    mesh = ("--devices=4", "--plan.mesh=fsdp=2,tensor=2", "--plan.offload=none")
    assert min(resume(other, text, *mesh).losses) == last + 1
    for folder in (out, other):
        pairs = zip(metrics(folder), whole, strict=True)
        for found, want in pairs:
            assert found[0] == want[0]
            numbers = [[x for x in row[1:] if x is not None] for row in (found, want)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


INTERRUPTED_TWICE = """
import os, signal, time
from colossax.processes import StopSignals
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
