"""Signals of the system: wishes to stop, and aborts that wait for a sentence."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


_ABORT_WAITS_S = 6.0


class StopSignals:
    """SIGTERM, SIGHUP and Ctrl-C as wishes. A second Ctrl-C ends the process, saving nothing.

    SIGHUP comes of a terminal that is gone; where it is ignored, as under `nohup`, it stays so.
    The handlers only write to a pipe: they run between any two instructions of the main thread,
    which may hold any lock.
    """

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self.wish: str | None = None
        self._interrupts = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopSignals"]:
        """Handle the signals inside the block; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {s: signal.signal(s, self._handle) for s in heeded()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            sys.stderr.write("\ncolossax: interrupted twice; nothing more is saved\n")
            sys.stderr.flush()
            os._exit(EXIT_CODES["SIGINT"])
        self.stop(signal.Signals(number).name)

    def stop(self, reason: str) -> None:
        """Wish to stop, for a reason of one word; the first wish counts. From any thread."""
        if self.wish is None:
            self.wish = reason
            os.write(self._write_end, b"!")

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self.read_end)
        os.close(self._write_end)


def heeded() -> list[signal.Signals]:
    """Signals that ask a run to stop; SIGHUP is none where this process was told to ignore it."""
    found = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _wait(_number: int) -> None:
    time.sleep(_ABORT_WAITS_S)


def hold_aborts() -> None:
    """Let an abort of this process wait for six seconds, once it has Python's lock.

    A thread of XLA that finds another process gone aborts its own from C++, with a trace. The
    thread that watches the processes finds it too, and ends this one with a sentence, if it is
    given the time and Python's lock. The thread that aborts may hold that lock, so what waits is
    Python's `sleep`, which lets go of it, and not libc's.
    """
    _on_abort(_wait)


def hold_last_aborts() -> None:
    """Let an abort wait without Python, which may be gone by then; see `hold_aborts`."""
    _on_abort(ctypes.CDLL(None).sleep)


def _on_abort(handler: Any) -> None:
    """SIGABRT is number 6, and a handler gets the number: libc's `sleep` can be one."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
