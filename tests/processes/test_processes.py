"""Two processes of four devices are one of eight; they start and stop together."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from colossax.errors import InputError
from colossax.processes.group import Group
from colossax.processes.launch import Launch
from colossax.processes.wire import Wire
from tests.launching import EXPERTS, free_port, metrics, pair, run, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("processes") / "text")


@pytest.fixture(scope="module")
def together(text, tmp_path_factory):
    """Two processes to the end, four devices each."""
    folder = tmp_path_factory.mktemp("together")
    mesh = ("--devices=4", "--plan.mesh=data=2,fsdp=2,tensor=2")
    started = pair("--steps=5", *mesh, f"--out={folder / 'run'}", text=text, folder=folder)
    return folder, [process.finish() for process in started]


@pytest.mark.slow
def test_two_processes_are_as_one(together, text, tmp_path):
    """Also when one process, with one device, goes on with what two have written."""
    folder, (first, second) = together
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    mesh = ("--devices=8", "--plan.mesh=data=2,fsdp=2,tensor=2", "--optimizer.schedule_steps=5")
    alone = run("--steps=6", *mesh, f"--out={tmp_path / 'run'}", text=text, log=tmp_path / "log")
    expected = list(alone.losses.values())
    assert list(first.losses.values()) == pytest.approx(expected[:5], rel=1e-5)
    out = tmp_path / "copy"
    shutil.copytree(folder / "run", out)
    more = run("--steps=6", "--resume", f"--out={out}", text=text, log=tmp_path / "log")
    assert more.code == 0, more.errors
    assert list(more.losses.values()) == pytest.approx(expected[5:], rel=1e-5)


@pytest.mark.parametrize(
    "mesh",
    [
        ("--plan.mesh=ring=4,ulysses=2",),
        pytest.param(
            ("--plan.mesh=row=2,col=4", "--plan.tensor_layout=2d"), marks=pytest.mark.sweep
        ),
        pytest.param(
            ("--plan.mesh=stage=2,fsdp=2,tensor=2", "--plan.pipeline.microbatches=4"),
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["usp", "2d", "stages"],
)
def test_sequences_matrices_and_layers_split_over_two_processes(mesh, text, tmp_path):
    started = pair("--steps=3", "--devices=4", *mesh, text=text, folder=tmp_path)
    first, second = (process.finish() for process in started)
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    alone = run("--steps=3", "--devices=8", *mesh, text=text, log=tmp_path / "log")
    assert alone.code == 0, alone.errors
    assert list(first.losses.values()) == pytest.approx(list(alone.losses.values()), rel=1e-5)


@pytest.mark.sweep
def test_two_experts_get_all_tokens_of_two_processes_and_others_none(tmp_path):
    """The text is one letter, and tokens that are alike choose alike."""
    text, out = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text("a" * 200)
    asked = ("--steps=3", "--model.vocab=257", "--data.tokenizer_vocab=257")
    split = ("--plan.mesh=expert=8", "--plan.experts.capacity=0.1", "--devices=4", f"--out={out}")
    started = pair(*asked, *split, text=text, folder=tmp_path, small=EXPERTS)
    first, second = (process.finish() for process in started)
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    record = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert record["dispatch_passes"] > 4 and record["dropped_choices"] == 0
    for loads in record["expert_load"]:
        assert loads.count(0) >= 4 and sum(load > 390 for load in loads) == 2
    alone = run(*asked, text=text, log=tmp_path / "log", small=EXPERTS)
    assert alone.code == 0, alone.errors
    assert list(first.losses.values()) == pytest.approx(list(alone.losses.values()), rel=1e-5)


LAYOUTS = (
    ("--plan.mesh=ring=2,ulysses=2,tensor=2",),
    ("--plan.mesh=fsdp=2,row=2,col=2", "--plan.tensor_layout=2d"),
    ("--plan.mesh=depth=2,row=2,col=2", "--plan.tensor_layout=3d"),
    ("--plan.mesh=ring_out=2,ring_in=2,fsdp=2", "--plan.tensor_layout=1d"),
)


@pytest.mark.sweep
def test_a_checkpoint_of_any_layout_is_read_under_any_other(text, tmp_path):
    """Each layout goes on with what the one before has written, as if nothing had changed."""
    out = f"--out={tmp_path / 'run'}"
    losses = {}
    for at, mesh in enumerate(LAYOUTS):
        again = ("--resume",) if at else ()
        done = run(
            f"--steps={2 * at + 2}",
            "--devices=8",
            *mesh,
            *again,
            "--optimizer.schedule_steps=8",
            out,
            text=text,
            log=tmp_path / "log",
        )
        assert done.code == 0, done.errors
        losses |= done.losses
    alone = run(
        "--steps=8",
        "--devices=1",
        "--optimizer.schedule_steps=8",
        text=text,
        log=tmp_path / "log",
    )
    assert list(losses) == list(alone.losses)
    assert list(losses.values()) == pytest.approx(list(alone.losses.values()), rel=1e-4)


@pytest.mark.slow
def test_the_first_process_alone_speaks_and_writes(together):
    folder, (first, second) = together
    assert second.lines == []
    # Collectives between CPU processes tell of their connections, in lines that run together.
    assert not re.search("step|loss|run|colossax", second.errors), second.errors
    assert len(list((folder / "run" / "tensorboard").iterdir())) == 1
    assert len(metrics(folder / "run")) == 6


def test_told_one_of_them_both_stop_after_one_step(text, tmp_path):
    arguments = ("--steps=100000", "--devices=1", f"--out={tmp_path / 'run'}")
    started = pair(*arguments, text=text, folder=tmp_path)
    started[0].until(4)
    started[1].send(signal.SIGTERM)
    first, second = (process.finish() for process in started)
    assert (first.code, second.code) == (143, 143), first.errors + second.errors
    last = first.final["step"]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [str(last)]
    assert [row[0] for row in metrics(tmp_path / "run")] == list(range(1, last + 1))


def test_a_refusal_reaches_both(text, tmp_path):
    arguments = ("--steps=2", "--devices=1", "--resume", f"--out={tmp_path / 'run'}")
    for done in [process.finish() for process in pair(*arguments, text=text, folder=tmp_path)]:
        assert done.code == 2
        assert "--resume: " in done.errors and "holds no run" in done.errors


def test_a_missing_process_is_named_within_the_time(text, tmp_path):
    address = ("--processes=3", f"--coordinator=127.0.0.1:{free_port()}", "--timeout-s=1")
    start = time.monotonic()
    done = run(*address, "--process-id=0", text=text, log=tmp_path / "log")
    assert time.monotonic() - start < 60
    assert done.code == 2
    assert re.fullmatch(
        r"llama_tiny: 100 steps; starting JAX\n"
        r"colossax: processes 1, 2 of 3 did not reach process 0 at 127.0.0.1:\d+ within 1 s;"
        r"[^\n]*\n",
        done.errors,
    )


def test_a_process_that_dies_ends_the_others_with_a_sentence(text, tmp_path):
    arguments = ("--steps=100000", "--devices=1", f"--out={tmp_path / 'run'}")
    started = pair(*arguments, text=text, folder=tmp_path)
    started[0].until(3)
    started[1].send(signal.SIGKILL)
    first, _ = (process.finish() for process in started)
    assert first.code == 1
    assert "process 1 is gone, and the run cannot go on without it" in first.errors


FOREIGN = "c.pthread_create(ctypes.byref(ctypes.c_ulong()), None, c.abort, None); time.sleep(30)"


@pytest.mark.parametrize(
    ("hold", "abort"),
    [
        ("hold_aborts", "c.abort()"),
        ("hold_aborts", "ctypes.PyDLL(None).abort()"),
        ("hold_aborts", FOREIGN),
        ("hold_last_aborts", FOREIGN),
    ],
    ids=["without-lock", "with-lock", "foreign-thread", "at-the-end"],
)
def test_an_abort_from_below_waits_for_the_sentence(hold, abort):
    """As when XLA finds the other process gone before the thread that watches it does."""
    program = f"""
import ctypes, os, sys, threading, time
from colossax.processes.signals import {hold}
{hold}()
def end():
    sys.stderr.write("a sentence")
    sys.stderr.flush()
    os._exit(1)
threading.Timer(1.0, end).start()
c = ctypes.CDLL(None)
{abort}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "a sentence")


@pytest.mark.catches("group-serves-twice")
def test_a_group_that_has_served_a_run_is_refused():
    launch = Launch(coordinator="localhost:1234", processes=2, process_id=0)
    here, there = socket.socketpair()
    there.close()
    group = Group(launch, {1: Wire(here)})
    group.close()
    with pytest.raises(InputError, match="group: it has served a run, at whose end its connect"):
        group.from_first(lambda: 1)
    alone = Group(None, {})
    alone.close()
    assert alone.from_first(lambda: 1) == 1


def test_an_abort_that_nothing_explains_ends_the_process():
    program = """
import ctypes
from colossax.processes import signals
signals._ABORT_WAITS_S = 0.1
signals.hold_aborts()
ctypes.PyDLL(None).abort()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
