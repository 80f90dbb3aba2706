"""One run at a time writes into a folder; others are told whose it is."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from colossax.errors import InputError
from colossax.processes.group import Group
from colossax.run import lock as locks
from colossax.run.holding import held
from colossax.run.lock import LOCK_FILE, STALE_S, RunLock
from tests.launching import ROOT

CHILD = """
import sys, time
from pathlib import Path
from colossax.errors import InputError
from colossax.run.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
try:
    lock.take()
except InputError as problem:
    print(problem, flush=True)
    sys.exit(2)
print("mine", flush=True)
sys.stdin.readline()
lock.release()
"""


def child(folder):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def let_go(*children):
    for one in children:
        one.communicate("\n", timeout=60)


@contextlib.contextmanager
def taken(folder, **how):
    lock = RunLock(folder)
    try:
        lock.take(**how)
        yield lock
    finally:
        lock.release()


def forge(folder, *, age_s, **changes):
    """A lock file as a run of elsewhere leaves it, that long after its last sign of life."""
    seen = time.time() - age_s
    holder = dataclasses.replace(
        locks._myself(), host="elsewhere", kernel="another", process=7, begun=seen, seen=seen
    )
    text = json.dumps(dataclasses.asdict(dataclasses.replace(holder, **changes)))
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_text(text)
    os.utime(folder / LOCK_FILE, (seen, seen))


def machine(folder, number):
    """The lock as a run on another machine has it."""
    lock = RunLock(folder)
    lock._me = dataclasses.replace(lock._me, host=f"m{number}", kernel=f"k{number}", process=7)
    return lock


def at_once(begin, count):
    """Call `begin(number)` in that many threads, and wait for all."""
    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def wait_for(true):
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def message(folder, **how):
    with pytest.raises(InputError) as refusal, taken(folder, **how):
        pass
    return str(refusal.value)


@pytest.mark.catches("lock-shared")
@pytest.mark.parametrize("count", [2, 5])
def test_of_runs_that_begin_at_once_one_wins_and_the_others_are_told_by_whom(tmp_path, count):
    folder = tmp_path / "run"
    children = [child(folder) for _ in range(count)]
    said = [one.stdout.readline() for one in children]
    assert said.count("mine\n") == 1
    winner = children[said.index("mine\n")]
    for text in said:
        if text != "mine\n":
            assert text.startswith(f"--out {folder}: ")
            assert f"process {winner.pid} on {socket.gethostname()}, since " in text
            assert "--take-over" in text
    let_go(*children)
    assert sorted(one.returncode for one in children) == [0] + [2] * (count - 1)
    assert not folder.exists(), "the folder was made for the lock alone"


@pytest.mark.catches("lock-maker-too-late")
def test_a_folder_made_by_one_that_came_too_late_goes_with_the_lock(tmp_path, monkeypatch):
    folder, first = tmp_path / "run", RunLock(tmp_path / "run")
    late, tried = RunLock(folder), RunLock._try

    def overtaken(lock, **how):
        if lock is late:
            first.take()
        tried(lock, **how)

    with monkeypatch.context() as patched, pytest.raises(InputError, match="writes there"):
        patched.setattr(RunLock, "_try", overtaken)
        late.take()
    assert folder.exists()
    first.release()
    assert not folder.exists()


@pytest.mark.catches("lock-needs-time")
def test_a_killed_run_leaves_its_folder_to_the_next_at_once(tmp_path):
    one = child(tmp_path)
    assert one.stdout.readline() == "mine\n"
    assert f"process {one.pid} on" in message(tmp_path)
    with pytest.raises(InputError, match=f"process {one.pid} on"):
        RunLock(tmp_path).check_free()
    one.send_signal(signal.SIGKILL)
    let_go(one)
    assert (tmp_path / LOCK_FILE).exists()
    RunLock(tmp_path).check_free()
    with taken(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_looking_writes_nothing(tmp_path):
    RunLock(tmp_path / "none").check_free()
    RunLock(tmp_path).check_free()
    assert not list(tmp_path.iterdir())


@pytest.mark.catches("lock-of-elsewhere")
@pytest.mark.parametrize("flock", [True, False])
def test_a_run_on_another_machine_has_it_while_it_gives_signs_of_life(tmp_path, flock, request):
    if not flock:
        request.getfixturevalue("without_flock")
    forge(tmp_path, age_s=STALE_S / 2)
    before = (tmp_path / LOCK_FILE).read_bytes()
    text = message(tmp_path)
    assert "process 7 on elsewhere, since " in text and "last seen 30 s ago" in text
    assert f"if it was killed, wait {round(STALE_S / 2)} s" in text
    assert (tmp_path / LOCK_FILE).read_bytes() == before
    forge(tmp_path, age_s=STALE_S + 1)
    with taken(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()


@pytest.mark.catches("lock-handover-at-once")
@pytest.mark.parametrize("flock", [True, False])
def test_a_run_on_another_machine_is_given_the_time_to_notice(tmp_path, flock, request, slept):
    if not flock:
        request.getfixturevalue("without_flock")
    forge(tmp_path, age_s=0)
    with taken(tmp_path, by_force=True) as lock:
        assert max(slept) == 2 * locks._BEAT_S
        assert lock.check() is None
    slept.clear()
    forge(tmp_path, age_s=STALE_S + 1)
    with taken(tmp_path, by_force=True) as lock:
        assert max(slept, default=0) < 1, "it is gone"
        assert lock.check() is None


@pytest.mark.catches("lock-of-elsewhere")
@pytest.mark.parametrize("left", [False, True])
def test_of_runs_on_five_machines_that_begin_at_once_one_wins(tmp_path, without_flock, left):
    """Where no lock is shared; in a new folder, and in one that a killed run left long ago."""
    if left:
        forge(tmp_path, age_s=STALE_S + 1)
    together, had, told = threading.Barrier(5), [], []

    def begin(number):
        lock = machine(tmp_path, number)
        together.wait()
        try:
            lock.take()
        except InputError as problem:
            told.append(str(problem))
        else:
            had.append(lock)

    at_once(begin, 5)
    (winner,) = had
    assert winner.check() is None
    assert len(told) == 4
    for text in told:
        assert re.search(f"(a run .process 7 on {winner._me.host}|which has just begun)", text)
    winner.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.catches("lock-part-shared")
def test_of_processes_of_one_number_that_replace_at_once_one_wins(
    tmp_path, without_flock, monkeypatch
):
    """As the first processes of containers are, on two machines."""
    forge(tmp_path, age_s=STALE_S + 1)
    together, replace = threading.Barrier(2), os.replace

    def replaced(source, target):
        together.wait(20)
        replace(source, target)

    monkeypatch.setattr(locks.os, "replace", replaced)
    had = []

    def begin(number):
        with contextlib.suppress(InputError):
            lock = machine(tmp_path, number)
            lock.take()
            had.append(lock)

    at_once(begin, 2)
    (winner,) = had
    winner.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.catches("lock-of-elsewhere")
def test_without_flock_two_runs_of_one_machine_do_not_share(tmp_path, without_flock):
    with taken(tmp_path):
        assert f"process {os.getpid()} on" in message(tmp_path)
    with taken(tmp_path):
        pass


def test_an_empty_or_damaged_lock_file_counts_by_its_age_without_flock(tmp_path, without_flock):
    file = tmp_path / LOCK_FILE
    forge(tmp_path, age_s=0, begun=1e300)
    for text in ("", "{", '{"host": 3}', "[]", file.read_text()):
        file.write_text(text)
        assert "another run, which has just begun" in message(tmp_path)
        os.utime(file, (time.time() - STALE_S - 1,) * 2)
        with taken(tmp_path):
            pass


def test_a_damaged_lock_file_that_nobody_holds_is_no_obstacle(tmp_path):
    (tmp_path / LOCK_FILE).write_text("\xff{")
    with taken(tmp_path) as lock:
        assert lock.check() is None


@pytest.mark.catches("lock-taken-unnoticed")
@pytest.mark.catches("lock-given-back-early")
def test_a_run_that_is_taken_over_is_told_by_whom(tmp_path, brisk):
    told = []
    with taken(tmp_path) as first:
        first.watch(lambda: told.append(first.lost))

        def end():
            wait_for(lambda: told)
            time.sleep(0.3)
            told.append("ended")
            first.release()

        run = threading.Thread(target=end)
        run.start()
        with taken(tmp_path, by_force=True) as second:
            assert f"{tmp_path} was taken over by process {os.getpid()} on" in told[0]
            assert told[1:] == ["ended"], "the folder was had before the other run had ended"
            run.join()
            assert second.check() is None, "the lock file of another is left alone"


@pytest.mark.catches("lock-folder-gone")
def test_a_folder_that_goes_away_is_lost(tmp_path, brisk):
    for away, told in (
        (lambda folder: shutil.rmtree(folder), "was deleted"),
        (lambda folder: folder.rename(tmp_path / "moved"), f"was moved to {tmp_path / 'moved'}"),
    ):
        folder, lost = tmp_path / "run", []
        with taken(folder) as lock:
            lock.watch(lambda lost=lost: lost.append(1))
            away(folder)
            wait_for(lambda lost=lost: lost)
            assert lock.lost == f"{folder} {told}"
        assert not folder.exists()


def test_a_lock_file_that_alone_is_deleted_comes_back(tmp_path):
    with taken(tmp_path) as lock:
        (tmp_path / LOCK_FILE).unlink()
        assert lock.check() is None
        assert f"process {os.getpid()} on" in message(tmp_path)


def test_signs_of_life_are_given(tmp_path, brisk):
    with taken(tmp_path) as lock:
        lock.watch(lambda: None)
        first = locks._read(lock._file).seen
        wait_for(lambda: locks._read(lock._file).seen > first)


@pytest.mark.filterwarnings("ignore:.*fork:")
def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """As a worker that loads data, left over when the run is killed."""
    with taken(tmp_path) as lock:
        if not (process := os.fork()):
            try:
                os.fstat(lock._file)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_a_check_that_refuses_gives_the_lock_back(tmp_path):
    def refuse(folder):
        raise InputError("no")

    group, folder = Group(None, {}), tmp_path / "run"
    with pytest.raises(InputError, match="^no$"):
        with held(folder, group, by_force=False, check=refuse, on_lost=print):
            pass
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written (Not a directory)" in message(tmp_path / "file" / "run")
