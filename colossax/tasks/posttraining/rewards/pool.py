"""Workers that give rewards, watched: each has so long and so much memory, and is begun anew."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from colossax.config import above, at_least
from colossax.errors import InputError
from colossax.tasks.posttraining.rewards.answer import Answer

_TOGETHER = 16
"""Answers of one call at most."""

_STARTER = concurrent.futures.ThreadPoolExecutor(1, "colossax-rewards")
"""Begins processes: its thread lives until Python ends."""

_START_S = 60.0
"""A module may take so long to be imported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewarded:
    """Rewards of answers.

    Attributes:
        values: float64 `[n]`; of an answer that could not be judged what was said to stand for it,
            or NaN where nothing was.
        failures: How many could not be judged, by why: `time`, `memory`, `error`, `died`; of a
            judge `unread`, `not finite`.
        said: Of the first of those, for people; empty where there is none.
    """

    values: np.ndarray
    failures: Mapping[str, int]
    said: str = ""


class RewardWorkers(contextlib.AbstractContextManager):
    """Rewards by a plain function of Python, `module:function`, in processes of their own.

    The function takes a list of `Answer` and returns a number for each. It runs where it can harm
    nothing of a run: what it raises, what takes it too long or too much memory, and what ends its
    process costs an answer its reward and no more, and is counted. Answers that failed together are
    judged once more, each alone, so that one does not cost its neighbours theirs.

    Args:
        name: `package.module:function`, found as Python finds it and then in the working folder.
        workers: Processes.
        seconds: That a call may take.
        memory_gb: Of each process, that it may address.
        failed: Reward of an answer that could not be judged.

    Raises:
        InputError: There is no such function; when called, it returns no number for each answer.

    Cost: a process each, that imports the module; answers and rewards as JSON through pipes.
    """

    def __init__(
        self,
        name: str,
        *,
        workers: int = 2,
        seconds: float = 10.0,
        memory_gb: float = 4.0,
        failed: float = 0.0,
    ):
        module, colon, attribute = name.partition(":")
        if not (module and colon and attribute.isidentifier()):
            raise InputError(f"rewards: found '{name}'; write it package.module:function")
        at_least(1).check(workers, "rewards: workers")
        above(0).check(seconds, "rewards: seconds")
        above(0).check(memory_gb, "rewards: memory_gb")
        self._name, self._seconds, self._failed = name, seconds, failed
        self._lock = threading.Lock()
        self._workers = [_Worker(name, int(memory_gb * 1e9)) for _ in range(workers)]
        try:
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __call__(self, answers: Sequence[Answer]) -> Rewarded:
        """Rewards of these answers, in their order; one call after another.

        Raises:
            InputError: The function gives another number of rewards, or one that is not finite.
        """
        with self._lock:
            return self._rewarded(answers)

    def _rewarded(self, answers: Sequence[Answer]) -> Rewarded:
        asked = [dataclasses.asdict(one) for one in answers]
        values = np.full(len(asked), self._failed, np.float64)
        failures: collections.Counter[str] = collections.Counter()
        said: list[str] = []
        work: queue.SimpleQueue[range] = queue.SimpleQueue()
        size = max(1, min(_TOGETHER, -(-len(asked) // len(self._workers))))
        for start in range(0, len(asked), size):
            work.put(range(start, min(start + size, len(asked))))
        problems: list[BaseException] = []

        def judge(worker: "_Worker", some: Sequence[int]) -> None:
            told = worker.ask([asked[i] for i in some], self._seconds)
            if "failed" not in told:
                values[list(some)] = self._numbers(told, len(some))
            elif len(some) > 1:
                for i in some:
                    judge(worker, [i])
            else:
                failures[told["failed"]] += 1
                said.append(told["said"])

        def serve(worker: "_Worker") -> None:
            try:
                while not problems:
                    judge(worker, work.get_nowait())
            except queue.Empty:
                return
            except BaseException as problem:  # noqa: BLE001 (raised where it is waited for)
                problems.append(problem)

        threads = [
            threading.Thread(target=serve, args=(one,), daemon=True) for one in self._workers
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as problem:  # Ctrl-C: nothing more is begun
            problems.append(problem)
            self.close()
            raise
        if problems:
            raise problems[0]
        return Rewarded(values=values, failures=dict(failures), said=said[0] if said else "")

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _numbers(self, told: Mapping[str, Any], count: int) -> list[float]:
        """The rewards of a call."""
        if "wrong" in told:
            raise InputError(
                f"rewards: {self._name} returns {told['wrong']}, which are no numbers; return a"
                " list of one number for each answer"
            )
        found = told["rewards"]
        if len(found) != count:
            raise InputError(
                f"rewards: {self._name} returns {len(found)} rewards for {count} answers; return"
                " one for each, in their order"
            )
        odd = next((one for one in found if not math.isfinite(one)), None)
        if odd is not None:
            raise InputError(
                f"rewards: {self._name} returns {odd} for an answer; return a finite number, such"
                " as 0 for one that cannot be judged"
            )
        return found


class _Worker:
    """A process, begun again after it failed."""

    def __init__(self, name: str, memory_bytes: int):
        self._name, self._memory_bytes = name, memory_bytes
        self._ended = False
        self._begin()

    def _begin(self) -> None:
        # -P: the working folder comes last, so that no file in it stands for a module of Python's.
        words = ("-P", "-m", "colossax.tasks.posttraining.rewards.worker", self._name)

        def begin() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                (sys.executable, *words, str(self._memory_bytes)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # what the function begins ends with its process
            )

        # By a thread that lives on: it counts as the parent, with which the process ends.
        self._process = _STARTER.submit(begin).result()
        self._read, self._ready = b"", False

    def wait_until_ready(self) -> None:
        """Until the function is there.

        Raises:
            InputError: It cannot be imported.
        """
        if (why := self._why_not_ready()) is not None:
            raise InputError(
                f"rewards: {self._name} cannot be imported ({why}); name a function of a module"
                " that Python finds, or that lies in the working folder"
            )

    def _why_not_ready(self) -> str | None:
        """Why it cannot be asked; None: it can."""
        if self._ready:
            return None
        told = self._line(_START_S)
        if told is not None:
            self._ready = "ready" in told
            return told.get("problem")
        code = self._process.poll()
        if code is None:
            return f"it does not begin within {_START_S:.0f} s"
        return f"its process ends with {code}"

    def ask(self, answers: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        """What the process says of these answers, or why it says nothing."""
        why = self._why_not_ready()
        told = None
        if why is None:
            # What JSON does not know, as times of a Parquet file, goes as its text.
            asked = (json.dumps(answers, default=str) + "\n").encode()
            with contextlib.suppress(OSError, ValueError):  # it has ended
                self._send(asked)
                told = self._line(seconds)
        if told is not None:
            return told
        late = why is None and self._process.poll() is None
        self._kill()
        if not self._ended:
            self._begin()
        if late:
            return {"failed": "time", "said": f"it takes longer than {seconds:g} s"}
        return {"failed": "died", "said": why or "its process ended"}

    def end(self) -> None:
        """Kill the process and what it began, and begin none anew."""
        self._ended = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        while content:
            content = content[self._process.stdin.write(content) :]

    def _line(self, seconds: float) -> dict[str, Any] | None:
        """The next line that it says; None where it ends, or says nothing for so long."""
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                left = until - time.monotonic()
                if left <= 0 or not waiting.select(left):
                    return None
                more = self._process.stdout.read(1 << 16)
                if not more:
                    self._process.wait()
                    return None
                self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)
