"""Stopping: SIGTERM and Ctrl-C end a run after a step that all its processes agree on.

No collective is added to a step for it. Each step asks a gate in its own process, a microsecond.
When some process is told to stop, its thread tells process 0, which has every process close its
gate and say how many steps it has let through, and then opens all of them up to the highest
count. The gates are closed by a thread of their own: the main thread may be waiting on the device
for a step that a slower process has yet to start, so it cannot be asked. No process has let
through more than the highest count, and all let through that many, so every step that one
started is finished by all, and the state is saved at one step.
"""

import contextlib
import os
import selectors
import sys
import threading
from typing import Any

from colossax.processes.group import Group
from colossax.processes.signals import StopSignals, hold_aborts, hold_last_aborts
from colossax.processes.wire import Wire

_LOST_EXIT_CODE = 1

_LOST_WITHIN_S = 2.0
"""From an exception of the main thread to the end of a connection that it came of."""


class Gate:
    """Lets steps through, and can be closed while the last one is agreed on."""

    def __init__(self, steps_done: int = 0):
        self._condition = threading.Condition()
        self._through = steps_done
        self._closed = False
        self._last: int | None = None
        self.reason: str | None = None

    def enter(self, index: int) -> bool:
        """Whether step `index`, counted from 0, may start; waits while the gate is closed."""
        with self._condition:
            while self._closed and self._last is None:
                self._condition.wait()
            if self._last is not None and index >= self._last:
                return False
            self._through = index + 1
            return True

    def close(self) -> int:
        """Close the gate; the number of steps let through, at most this many have started."""
        with self._condition:
            self._closed = True
            return self._through

    def open_until(self, last: int, reason: str) -> None:
        """Let steps through up to `last` of them and no further."""
        with self._condition:
            self._last, self.reason = last, reason
            self._condition.notify_all()


class StopAgreement:
    """The thread that turns a wish of any process into one last step of all.

    Args:
        group: The processes; their connections are this thread's from now on.
        signals: Wishes of this process.
        gate: Asked by the loop before each step.

    Attributes:
        failure: Why the run failed for this process, where it did; to be set before it leaves.
        failure_of_first: Why it did for process 0; known to all when they have left.
    """

    def __init__(self, group: Group, signals: StopSignals, gate: Gate):
        self._group = group
        self._signals = signals
        self._gate = gate
        self._counts: dict[int, int] = {}
        self._reason: str | None = None
        self.failure: str | None = None
        self.failure_of_first: str | None = None
        self._left: set[int] = set()
        self._leave_read, self._leave_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="colossax-stop", daemon=True)

    def __enter__(self) -> "StopAgreement":
        if self._group.wires:
            hold_aborts()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Leave in order; after an exception just go, so that the others learn of it.

        Where that came of a process that is gone, the thread is given the time to end this one with
        a sentence: of connections that are closed here it hears nothing more.
        """
        if kind is None:
            os.write(self._leave_write, b"!")
            self._thread.join()
        elif self._group.wires:
            self._thread.join(_LOST_WITHIN_S)
        if self._group.wires:
            hold_last_aborts()
        self._group.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._signals.read_end, selectors.EVENT_READ, "signal")
            ready.register(self._leave_read, selectors.EVENT_READ, "leave")
            for process_id, wire in self._group.wires.items():
                wire.connection.settimeout(None)
                ready.register(wire.connection, selectors.EVENT_READ, process_id)
                self._heed(process_id, wire.buffered())
            leaving = False
            while not (leaving and self._settled()):
                for key, _ in ready.select():
                    if key.data == "leave":
                        leaving = True
                        ready.unregister(key.fileobj)
                    elif key.data == "signal":
                        os.read(key.fd, 1)
                        self._wish(self._signals.wish or "SIGTERM")
                    elif not self._heed(key.data, self._group.wires[key.data].arrived()):
                        ready.unregister(key.fileobj)
        for wire in self._group.wires.values():
            self._send(wire, {"kind": "bye", "step": self._gate.close(), "failure": self.failure})

    def _settled(self) -> bool:
        """Whether no process waits for this one to finish an agreement, nor this for process 0."""
        if not self._group.first:
            return 0 in self._left
        return self._reason is None or len(self._counts) == self._group.processes

    def _wish(self, reason: str) -> None:
        if self._group.first:
            self._begin(reason)
        else:
            self._send(self._group.wires[0], {"kind": "stop", "reason": reason})

    def _begin(self, reason: str) -> None:
        """On process 0: close every gate and ask for the counts, once."""
        if self._reason is not None:
            return
        self._reason = reason
        for wire in self._group.wires.values():
            self._send(wire, {"kind": "close"})
        self._counted(0, self._gate.close())

    def _counted(self, process_id: int, count: int) -> None:
        self._counts[process_id] = count
        if self._reason is not None and len(self._counts) == self._group.processes:
            last, reason = max(self._counts.values()), self._reason
            for wire in self._group.wires.values():
                self._send(wire, {"kind": "until", "step": last, "reason": reason})
            self._gate.open_until(last, reason)

    def _heed(self, process_id: int, messages: list[dict[str, Any] | None]) -> bool:
        """Act on what a process sent; False when nothing more can come from it."""
        for message in messages:
            if message is None:
                if process_id not in self._left:
                    self._lost(process_id)
                return False
            self._act(process_id, message)
        return True

    def _act(self, process_id: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "bye":
            self._left.add(process_id)
            if process_id == 0:
                self.failure_of_first = message["failure"]
            self._counted(process_id, message["step"])
        elif kind == "stop":
            self._begin(message["reason"])
        elif kind == "close":
            count = self._gate.close()
            self._send(self._group.wires[0], {"kind": "count", "step": count})
        elif kind == "count":
            self._counted(process_id, message["step"])
        elif kind == "until":
            self._gate.open_until(message["step"], message["reason"])

    def _send(self, wire: Wire, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its absence shows when it is read from
            wire.send(message)

    def _lost(self, process_id: int) -> None:
        """Without this process no step can finish: the main thread may wait on it for ever."""
        sys.stderr.write(
            f"\ncolossax: process {process_id} is gone, and the run cannot go on without it;"
            f" start all processes again with --resume\n"
        )
        sys.stderr.flush()
        os._exit(_LOST_EXIT_CODE)
