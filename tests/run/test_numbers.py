"""Runs that are given no folder and begin at once: each has a number of its own."""

import os
import subprocess
import sys
import threading

import jax
import pytest

from colossax.config import OffloadConfig, Plan
from colossax.errors import InputError
from colossax.optim import adamw
from colossax.processes.group import Group
from colossax.run import RunConfig, RunOptions, train
from colossax.run.holding import held
from colossax.run.lock import RunLock
from colossax.run.prepared import OFFLOADED, Prepared
from colossax.run.run_dir import RunFolder
from tests.launching import ROOT, metrics
from tests.run.test_task import toy
from tests.step.offloaded.streamed import FULL, started

CHILD = """
import sys
from pathlib import Path
from colossax.processes.group import Group
from colossax.run.holding import held
from colossax.run.run_dir import find_run_folder

def another():
    return find_run_folder(None, recipe="r", resume=False).path

print("ready", flush=True)
sys.stdin.readline()
options = dict(by_force=False, check=print, on_lost=print, another=another)
with held(Path("runs/r-001"), Group(None, {}), **options) as lock:
    sys.stdin.readline()
"""


@pytest.mark.parametrize("count", [3])
def test_processes_that_begin_at_once_number_on(tmp_path, count):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) for _ in range(count)
    ]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * count
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    found = {child.stdout.readline() for child in children}
    assert found == {f"runs/r-{number:03d}\n" for number in range(1, count + 1)}
    for child in children:
        child.communicate("\n", timeout=60)


@pytest.mark.catches("number-taken-is-refused")
def test_runs_that_chose_one_number_each_get_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen, outcomes = threading.Barrier(2), []

    def devices():
        chosen.wait(60)
        return jax.devices()[:1]

    def run():
        options = RunOptions(devices=devices, trackers=("json",))
        config = RunConfig(plan=Plan(), steps=3, validate_every=0)
        outcomes.append(train(toy(), config, options, Group(None, {})))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(one.final["out"] for one in outcomes) == ["runs/toy-001", "runs/toy-002"]
    for one in outcomes:
        assert one.failure is None
        out = tmp_path / one.final["out"]
        assert [row[0] for row in metrics(out) if row[1] is not None] == [1, 2, 3]
        assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["3"]


def test_a_folder_that_was_named_is_not_changed_for_another(tmp_path):
    other = RunLock(tmp_path / "run")
    other.take()
    with pytest.raises(InputError, match="writes there"):
        with held(tmp_path / "run", Group(None, {}), by_force=False, check=print, on_lost=print):
            pass
    other.release()


def test_where_no_folder_can_be_made_the_run_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    first = tmp_path / "runs" / "r-001"
    options = {"by_force": False, "check": print, "on_lost": print, "another": lambda: first}
    with pytest.raises(InputError, match="cannot be written"):
        with held(first, Group(None, {}), **options):
            pass


@pytest.mark.catches("disk-tier-stays-behind")
@pytest.mark.parametrize("own", [False, True])
def test_a_run_in_the_next_folder_has_its_disk_tier_there(tmp_path, own):
    """But where its step was given a folder for it."""
    before, after = tmp_path / "r-001", tmp_path / "r-002"
    place = tmp_path / "fast" if own else before / OFFLOADED
    plan = FULL.replace(offload=OffloadConfig(parameters=1.0, optimizer=1.0, disk=1.0))
    _, step = started(plan, adamw(1e-3), disk=place)
    prepared = Prepared(
        task=toy(),
        config=RunConfig(plan=plan, steps=1),
        options=RunOptions(),
        group=Group(None, {}),
        plan=plan,
        step=step,
        folder=RunFolder(path=before),
        identity={},
    )
    moved = prepared.at(after)
    assert moved.folder.path == after
    assert moved.step.disk.path.parent == (place if own else after / OFFLOADED)
    step.disk.close()
