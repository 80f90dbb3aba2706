"""What goes wrong with a run's folder is told to all its processes, and ends or serves them all."""

import pytest

from colossax.run.lock import LOCK_FILE, RunLock
from tests.launching import metrics, pair, write_text

BRISK = "from colossax.run import lock; lock._BEAT_S = 0.2"
SMALL = ("--devices=1", "--plan.mesh=fsdp=2", "--model.layers=1", "--model.embed=32")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("faults") / "text", documents=10)


def shape(folder):
    """Every file of a run, but the lock's, with its size and when it was changed."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_a_folder_that_is_taken_over_ends_all_processes(text, tmp_path):
    out = tmp_path / "run"
    arguments = ("--steps=1000000", "--checkpoint-every=3", f"--out={out}", *SMALL)
    started = pair(*arguments, text=text, folder=tmp_path, before=BRISK)
    started[0].until(7)
    taker = RunLock(out)
    taker.take(by_force=True)
    left = shape(out)
    first, second = (process.finish() for process in started)
    assert (first.code, second.code) == (3, 3), first.errors + second.errors
    assert f"{out} was taken over by process " in first.errors
    assert first.final["failure"].startswith(f"stopped after step {first.final['step']}: ")
    assert shape(out) == left
    assert taker.check() is None
    taker.release()


@pytest.mark.catches("fall-back-alone")
def test_processes_fall_back_together_from_steps_that_are_damaged(text, tmp_path):
    """The last has no manifest; of the one before, a value is wrong that one process reads."""
    out = tmp_path / "run"
    arguments = ("--steps=8", "--checkpoint-every=2", "--keep=9", f"--out={out}", *SMALL)
    for done in [process.finish() for process in pair(*arguments, text=text, folder=tmp_path)]:
        assert done.code == 0, done.errors
    expected, checkpoints = metrics(out), out / "checkpoints"
    (checkpoints / "8" / "arrays" / "manifest.json").unlink()
    values = checkpoints / "6" / "arrays" / "model" / "params" / "embed.table" / "c"
    parts = sorted(path for path in values.rglob("*") if path.is_file())
    assert len(parts) == 2, "one of each process"
    with parts[1].open("r+b") as file:
        file.seek(100)
        file.write(b"damaged")
    first, second = (
        process.finish() for process in pair(*arguments, "--resume", text=text, folder=tmp_path)
    )
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert metrics(out) == expected
    for told in (
        "checkpoint of step 8 is broken ('arrays/manifest.json' is missing in it); it was moved to",
        "checkpoint of step 6 is broken (checkpoint '",
        f"resumed from step 4 of {out}",
    ):
        assert first.errors.count(told) == 1, first.errors
    assert "broken" not in second.errors
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["2", "4", "6", "6.broken", "8", "8.broken"]
