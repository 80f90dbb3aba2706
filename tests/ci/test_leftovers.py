"""What a failed test started ends with it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import os, pathlib, subprocess, sys, time

def start(name):
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    pathlib.Path(name).write_text(str(child.pid))

def test_passes():
    start("passes")

def test_times_out():
    start("times_out")
    time.sleep(100)

def test_crashes():
    start("crashes")
    os._exit(1)
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Process ids by test, after a run of the three."""
    folder = tmp_path_factory.mktemp("leftovers")
    (folder / "test_three.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n1", "--timeout=1", "-pxdist", "-ppytest_timeout"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COLOSSAX"))}
    done = subprocess.run(
        [*command, "-ptests.plugins.leftovers", "test_three.py"],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    pids = {name: int((folder / name).read_text()) for name in ("passes", "times_out", "crashes")}
    yield pids
    for pid in pids.values():
        if _runs(pid):
            os.kill(pid, 9)


@pytest.mark.parametrize("test", ["times_out", "crashes"])
def test_a_failed_test_leaves_no_process(left, test):
    deadline = time.monotonic() + 5
    while _runs(left[test]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(left[test])


def test_of_others_nothing_is_touched(left):
    assert _runs(left["passes"])


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
