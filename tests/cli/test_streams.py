"""Readers of a run's output go away, and the run does not; real processes."""

import errno
import io
import json
import os
import signal
import subprocess
import sys

import pytest

from colossax.checkpoint import Checkpointer
from colossax.cli import main
from colossax.processes import EXIT_CODES
from tests.launching import ROOT, SMALL, Started, write_text

STEPS = 3


class Failing(io.StringIO):
    """Takes nothing."""

    def __init__(self, problem):
        super().__init__()
        self._problem = problem

    def write(self, text):
        raise self._problem


@pytest.mark.catches("lost-output-traceback")
@pytest.mark.parametrize("words", [("--help",), ("--version",), ("train", "--list")])
@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), ""),
        (OSError(errno.ENOSPC, "No space left on device"), "(No space left on device); redirect"),
        (ValueError("I/O operation on closed file."), "(I/O operation on closed file.); redirect"),
    ],
)
def test_verbs_whose_output_nobody_takes_end_without_traceback(
    words, problem, said, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stdout", Failing(problem))
    assert main(words) == 1
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == bool(said)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("streams") / "text", documents=10)


def through(shell, text, out, *arguments, steps=STEPS):
    """`colossax train` in a shell's words: `{}` is the command."""
    words = [sys.executable, "-m", "colossax", "train", *SMALL, f"--data={text}", f"--out={out}"]
    words += ["--model.layers=1", "--model.embed=32", f"--steps={steps}", *arguments]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=1",
        "PYTHONPATH": str(ROOT),
        "COLOSSAX_CACHE": str(text.parent / "cache"),
    }
    script = shell.replace("{}", '"$@"')
    return subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def whole(out):
    """Whether the run ended as one that was watched."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)]
    return steps == [1, 2, 3] and Checkpointer(out / "checkpoints").latest() == STEPS


@pytest.mark.catches("reader-gone-ends-run")
@pytest.mark.parametrize(
    "shell, noted",
    [
        ("{} 2> >(head -1 >/dev/null); exit $?", "Broken pipe"),
        ("{} 2>/dev/full", "No space left on device"),
        ("{} 2>&-", "Bad file descriptor"),
    ],
    ids=["pipe", "full", "closed"],
)
def test_nobody_reads_standard_error(text, tmp_path, shell, noted):
    done = through(shell, text, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert whole(tmp_path / "run")
    log = (tmp_path / "run" / "run.log").read_text()
    assert f"standard error can no longer be written ({noted}); training goes on" in log
    assert "checkpoints, metrics and loss.png are in" in log


@pytest.mark.catches("listener-gone-ends-run")
@pytest.mark.parametrize(
    "shell, noted",
    [
        ('{} | head -1; exit "${PIPESTATUS[0]}"', "Broken pipe"),
        ("{} >/dev/full", "No space left on device"),
        ("{} >&-", "Bad file descriptor"),
    ],
    ids=["pipe", "full", "closed"],
)
def test_nobody_reads_standard_output(text, tmp_path, shell, noted):
    done = through(shell, text, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert whole(tmp_path / "run")
    assert f"records are no longer emitted ({noted}); training goes on" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.catches("hangup-unheeded")
def test_a_hangup_saves(text, tmp_path):
    ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # children of `nohup pytest` heed none
    try:
        out = f"--out={tmp_path / 'run'}"
        started = Started("--steps=5000", out, text=text, log=tmp_path / "log")
    finally:
        signal.signal(signal.SIGHUP, ours)
    done = started.until(2).send(signal.SIGHUP).finish()
    assert done.code == EXIT_CODES["SIGHUP"] == 129, done.errors
    assert done.final["stopped_by"] == "SIGHUP"
    assert Checkpointer(tmp_path / "run" / "checkpoints").latest() == done.final["step"] >= 2


@pytest.mark.catches("hangup-heeded-under-nohup")
def test_a_hangup_that_is_ignored_stays_so(text, tmp_path):
    shell = "trap '' HUP; {} & run=$!; sleep 1; for i in $(seq 400); do kill -HUP $run || break;"
    shell += " sleep 0.05; done 2>/dev/null; wait $run"
    done = through(shell, text, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert whole(tmp_path / "run")
