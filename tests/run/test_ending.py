"""A run ends well only with what it promises on disk, and says what is there otherwise."""

import os
import re
import resource
import shutil
import time

import numpy as np
import pytest

from colossax.checkpoint import Checkpointer
from colossax.checkpoint.commit import Attempt
from colossax.config import user_path
from colossax.errors import InputError
from colossax.run import lock as locks
from colossax.run.ending import clear_old_place
from colossax.run.lock import LOCK_FILE, STALE_S, RunLock
from colossax.run.run_dir import RunFolder
from tests.launching import metrics
from tests.run.test_fit import fitted
from tests.run.test_lock import forge
from tests.run.test_task import rows

STEPS = 3


def at(step, act, *, folder):
    """A callback that acts after a step, once the checkpoint of the one before is whole."""

    def call(now):
        if now.done == step:
            deadline = time.monotonic() + 20
            while Checkpointer(folder / "checkpoints").latest() != step - 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            act()

    return [call]


def held(folder):
    """Files, their sizes and when they were changed."""
    stats = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.catches("unsaved-is-success")
def test_a_run_whose_last_state_is_not_on_disk_has_failed(tmp_path, capsys):
    (tmp_path / "checkpoints").write_text("in the way")
    _, outcome = fitted(tmp_path, steps=STEPS, checkpoint_every=1)
    assert outcome.failure == (
        f"the state after step {STEPS} is not on disk, as it could not be saved; no checkpoint was"
        " saved before; make room and go on with --resume"
    )
    errors = capsys.readouterr().err
    assert outcome.failure in errors
    assert f"\nmetrics and loss.png are in {tmp_path}\n" in errors


@pytest.mark.catches("unsaved-is-success")
def test_files_that_may_not_grow_leave_the_earlier_step(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))

    try:
        _, outcome = fitted(
            tmp_path,
            steps=STEPS,
            checkpoint_every=1,
            callbacks=at(2, full, folder=tmp_path),
            validate_every=0,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"the last checkpoint is that of step 1, in {tmp_path}" in outcome.failure
    errors = capsys.readouterr().err
    assert "loss.png was not drawn (File too large)" in errors
    assert "checkpoints and metrics are in" in errors
    _, outcome = fitted(tmp_path, steps=STEPS, resume=True)
    assert outcome.failure is None
    assert Checkpointer(tmp_path / "checkpoints").latest() == STEPS


@pytest.mark.catches("all-skipped-is-success")
@pytest.mark.parametrize("stop_after_skipped", [0, STEPS + 1])
def test_a_run_whose_steps_were_all_skipped_has_failed(tmp_path, stop_after_skipped):
    def bad(number):
        return {**rows(number), "y": rows(number)["y"] * np.nan}

    _, outcome = fitted(tmp_path, bad, steps=STEPS, stop_after_skipped=stop_after_skipped)
    assert re.match(
        f"all {STEPS} steps were skipped, as loss or gradient norm was not finite, first batch"
        " 'y';",
        outcome.failure,
    )


def test_one_good_step_is_no_failure(tmp_path):
    def once(number):
        return {**rows(number), "y": rows(number)["y"] * (np.nan if number else 1)}

    assert fitted(tmp_path, once, steps=STEPS, stop_after_skipped=0)[1].failure is None


@pytest.mark.catches("lock-not-taken")
def test_a_folder_that_another_run_writes_into_is_refused_and_left_alone(tmp_path):
    other = RunLock(tmp_path)
    other.take()
    with pytest.raises(InputError, match=f"process {os.getpid()} on .* writes there"):
        fitted(tmp_path, steps=STEPS)
    assert names(tmp_path) == [LOCK_FILE]
    other.release()
    _, outcome = fitted(tmp_path, steps=STEPS)
    assert outcome.failure is None and LOCK_FILE not in names(tmp_path)
    other.take()
    with pytest.raises(InputError, match="writes there"):
        fitted(tmp_path, steps=STEPS + 1, resume=True)
    other.release()


@pytest.mark.catches("lock-not-taken")
def test_a_run_that_began_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    """Between the look at the folder and the lock."""
    fitted(tmp_path, steps=1)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("colossax.run.own_step.settle_folder", _blind)
    with pytest.raises(InputError, match="already holds a run"):
        fitted(tmp_path, steps=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def _blind(name, options, group):
    return options, RunFolder(path=user_path(options.out, "--out"))


@pytest.mark.catches("lock-lost-goes-on")
@pytest.mark.catches("save-barred")
@pytest.mark.catches("records-after-loss")
@pytest.mark.parametrize("noticed", [True, False])
def test_a_run_that_is_taken_over_stops_and_writes_no_more(
    tmp_path, brisk, capsys, monkeypatch, noticed
):
    other = RunLock(tmp_path)
    monkeypatch.setattr(locks, "_HANDOVER_S", 0.5)
    if not noticed:  # until it saves
        monkeypatch.setattr(locks, "_BEAT_S", 1000.0)
        monkeypatch.setattr(locks, "_HANDOVER_S", 0.0)
    steps = 500 if noticed else STEPS
    _, outcome = fitted(
        tmp_path,
        steps=steps,
        checkpoint_every=1,
        validate_every=0,
        callbacks=at(2, lambda: other.take(by_force=True), folder=tmp_path),
    )
    done = outcome.final["step"]
    assert outcome.failure == (
        f"stopped after step {done}: {other.folder} was taken over by"
        f" {outcome.failure.partition('taken over by ')[2]}"
    )
    assert f"process {os.getpid()} on" in outcome.failure
    assert outcome.failure.endswith("; nothing more was written there")
    assert 2 <= done < 500
    if noticed:
        assert outcome.stopped_by == "lock"
        assert [row[0] for row in metrics(tmp_path)] == [1]
    assert names(tmp_path / "checkpoints") == ["1"]
    assert "loss.png" not in names(tmp_path)
    assert other.check() is None
    assert outcome.failure in capsys.readouterr().err
    other.release()
    assert fitted(tmp_path, steps=STEPS, resume=True)[1].failure is None


@pytest.mark.catches("lock-of-elsewhere")
@pytest.mark.parametrize("flock", [True, False])
def test_a_run_that_another_machine_has_is_not_resumed_here(tmp_path, flock, request):
    if not flock:
        request.getfixturevalue("without_flock")
    fitted(tmp_path, steps=1)
    before = held(tmp_path)
    forge(tmp_path, age_s=STALE_S / 2)
    with pytest.raises(
        InputError, match="a run .process 7 on elsewhere, since .* writes there; if"
    ):
        fitted(tmp_path, steps=STEPS, resume=True)
    (tmp_path / LOCK_FILE).unlink()
    assert held(tmp_path) == before
    forge(tmp_path, age_s=STALE_S + 1)
    assert fitted(tmp_path, steps=STEPS, resume=True)[1].failure is None
    assert LOCK_FILE not in names(tmp_path)


@pytest.mark.catches("lock-lost-goes-on")
@pytest.mark.parametrize("flock", [True, False])
def test_a_run_that_another_machine_takes_over_ends_here(tmp_path, brisk, flock, request):
    if not flock:
        request.getfixturevalue("without_flock")

    def take_over():
        forge(tmp_path / "elsewhere", age_s=0)
        (tmp_path / "elsewhere" / LOCK_FILE).replace(tmp_path / LOCK_FILE)

    _, outcome = fitted(
        tmp_path,
        steps=500,
        checkpoint_every=1,
        validate_every=0,
        callbacks=at(2, take_over, folder=tmp_path),
    )
    assert outcome.stopped_by == "lock" and outcome.final["step"] < 500
    assert f"{tmp_path} was taken over by process 7 on elsewhere" in outcome.failure
    assert '"elsewhere"' in (tmp_path / LOCK_FILE).read_text(), "its lock file is left alone"


@pytest.mark.catches("lock-folder-gone")
@pytest.mark.catches("save-barred")
@pytest.mark.parametrize("moved", [True, False])
def test_a_run_whose_folder_goes_away_has_failed(tmp_path, capsys, moved):
    folder, there = tmp_path / "run", tmp_path / "there"
    away = (lambda: folder.rename(there)) if moved else (lambda: shutil.rmtree(folder))
    _, outcome = fitted(
        folder, steps=STEPS, checkpoint_every=1, callbacks=at(3, away, folder=folder)
    )
    told = f"was moved to {there}" if moved else "was deleted"
    assert outcome.failure.endswith(f": {folder} {told}; nothing more was written there")
    assert not (folder / "run.json").exists()
    assert not Checkpointer(folder / "checkpoints").steps()
    assert f"nothing of the run is in {folder}" in capsys.readouterr().err
    if moved:
        assert fitted(there, steps=STEPS, resume=True)[1].failure is None


@pytest.mark.catches("old-place-littered")
def test_a_folder_that_is_moved_amid_a_save_leaves_nothing_at_its_old_place(tmp_path, monkeypatch):
    folder, there, write = tmp_path / "run", tmp_path / "there", Attempt.write

    def moving(attempt, part):
        if attempt.step == 2:
            folder.rename(there)
        write(attempt, part)

    monkeypatch.setattr(Attempt, "write", moving)
    _, outcome = fitted(folder, steps=STEPS, checkpoint_every=1, validate_every=0)
    assert outcome.failure.endswith(
        f"{folder} was moved to {there}; nothing more was written there"
    )
    assert names(tmp_path) == ["there"]
    monkeypatch.setattr(Attempt, "write", write)
    assert fitted(there, steps=STEPS, resume=True)[1].failure is None
    assert names(there / "checkpoints") == ["1", "3"]


def test_an_old_place_that_holds_more_or_is_anothers_is_left_alone(tmp_path):
    folder = RunFolder(path=tmp_path / "run")
    clear_old_place(folder)
    unfinished = folder.checkpoints / "2.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    (folder.path / "notes").write_text("")
    clear_old_place(folder)
    (folder.path / "notes").unlink()
    (folder.checkpoints / "1").mkdir()
    clear_old_place(folder)
    assert (folder.checkpoints / "1").exists() and not unfinished.exists()
    assert names(folder.path) == ["checkpoints"]


def test_resuming_a_finished_run_writes_nothing(tmp_path):
    fitted(tmp_path, steps=STEPS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        fitted(tmp_path, steps=STEPS, resume=True)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after


def test_others_read_while_a_run_goes_on(tmp_path):
    """As `export`, `generate` and `init` do: steps that are whole need no lock."""
    found = []

    def read():
        checkpoint = Checkpointer(tmp_path / "checkpoints")
        found.append((checkpoint.latest(), checkpoint.documents()["position"]))

    fitted(tmp_path, steps=STEPS, checkpoint_every=1, callbacks=at(2, read, folder=tmp_path))
    assert found == [(1, {"batch": 1})]
