"""Pytest, many times, in children of a process that has imported already what takes long.

`Forks` starts such a process: this file, which reads a JSON line for each run and answers with one.
A child is forked before anything of the tree was imported, so that each run is as if new.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_POLL_S = 0.02


class Forks:
    """A process from which runs of pytest are forked, one at a time."""

    def __init__(self, env: Mapping[str, str], modules: Sequence[str]):
        """Start it.

        Args:
            env: Of the process and all runs.
            modules: What it imports first; no plugins of pytest, which rewrites those.
        """
        self._process = subprocess.Popen(
            (sys.executable, "-P", __file__, *modules),
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pytest(
        self, tree: Path, arguments: Sequence[str], longest_s: float
    ) -> tuple[int | None, str]:
        """Run pytest in a folder: exit status, None if it took too long, and what it printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r", errors="replace") as printed:
            asked = {"tree": str(tree), "out": printed.name, "longest_s": longest_s}
            self._process.stdin.write(json.dumps({**asked, "arguments": [*arguments]}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError("the process that forks runs of pytest has ended")
            return json.loads(answer), printed.read()

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def _child(tree: str, out: str, arguments: Sequence[str]) -> int:
    """Be `python -m pytest` in a folder."""
    os.chdir(tree)
    sys.path.insert(0, tree)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    return int(pytest.main([*arguments]))


def _forked(asked: dict) -> int | None:
    """The status of one child; None, and it is killed with its own children, if it is too long."""
    pid = os.fork()
    if not pid:
        status = 70
        try:
            os.setsid()
            status = _child(asked["tree"], asked["out"], asked["arguments"])
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    ends = time.monotonic() + asked["longest_s"]
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> None:
    """Answer on standard output what is asked on standard input."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
