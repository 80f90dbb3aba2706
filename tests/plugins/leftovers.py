"""Processes that a failed test leaves behind end with it, and cannot disturb the next one.

pytest tells a running test's name and stage in the environment, which its children inherit, also
those whose own parent has ended. So they are found by what they inherited.
"""

import os
import signal
import uuid
from pathlib import Path

import pytest

_RUN = "COLOSSAX_TEST_RUN"
"""Tells two runs on one machine apart; workers inherit it from the process that starts them."""

os.environ.setdefault(_RUN, uuid.uuid4().hex)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Once a stage of a test has failed, its time limit included, end what it started."""
    report = yield
    if report.failed:
        end_children_of(item.nodeid, call.when)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem):
    """A worker that died in a test can end nothing itself."""
    end_children_of(crashitem)


def end_children_of(test, stage=None):
    """Kill what a test of this run started, in one stage or in any; without /proc, nothing."""
    stages = [stage] if stage else ["setup", "call", "teardown"]
    wanted = {os.fsencode(f"PYTEST_CURRENT_TEST={test} ({one})") for one in stages}
    run = os.fsencode(f"{_RUN}={os.environ[_RUN]}")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            inherited = set((folder / "environ").read_bytes().split(b"\0"))
            if run in inherited and wanted & inherited:
                os.kill(int(folder.name), signal.SIGKILL)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it ended meanwhile, or is another user's
