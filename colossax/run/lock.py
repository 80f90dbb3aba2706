"""One run at a time writes into a folder.

A lock file in the folder says who: host, process, when it began and when it last gave a sign of
life. The kernel's lock on it (`flock`) goes with its process, so that a run that was killed is
resumed at once. Where the file system has no such lock, or another machine may not see it, the sign
of life decides: one older than `STALE_S` is of a run that is gone.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from colossax.documents import as_kind, parse_json
from colossax.errors import InputError

LOCK_FILE = "run.lock"
STALE_S = 60.0
_BEAT_S = 5.0
_HANDOVER_S = 30.0
_SETTLE_S = 0.2
_PATIENCE = 4
_LONGEST = 1024
"""Bytes of the document, of one write, so that no reader sees half of one.

A byte after it is of a run that made the folder and came too late to have it: it is empty when the
other one gives it back, and goes."""

_held: set[int] = set()
"""Open lock files of this process, which a forked child must not keep locked."""


def _close_in_child() -> None:
    for file in list(_held):
        with contextlib.suppress(OSError):
            os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """Who a lock file says writes into its folder.

    Attributes:
        host: Name of the machine.
        kernel: Of the machine since it started: containers of one machine share it.
        process: Its number there.
        begun: Seconds since 1970.
        seen: When it last gave a sign of life, by its own clock.
    """

    host: str
    kernel: str
    process: int
    begun: float
    seen: float

    @property
    def stale(self) -> bool:
        """Whether its last sign of life is too old for a run that goes on."""
        return time.time() - self.seen > STALE_S

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.begun).isoformat(" ", "seconds")
        ago = max(0, round(time.time() - self.seen))
        return f"process {self.process} on {self.host}, since {since}, last seen {ago} s ago"


def _myself() -> Holder:
    now = time.time()
    return Holder(
        host=socket.gethostname(), kernel=_kernel(), process=os.getpid(), begun=now, seen=now
    )


def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return socket.gethostname()


class RunLock:
    """The lock of a run's folder; of several processes the first holds it for all.

    Attributes:
        folder: The run's.
        lost: Why this run may no longer write there, in one clause; None while it may.
    """

    def __init__(self, folder: Path):
        """Name the folder; nothing is written yet."""
        self.folder = folder
        self._path = folder.absolute() / LOCK_FILE
        self._file: int | None = None
        self._made = False
        self._guard = threading.RLock()
        self._me = _myself()
        self._place: tuple[int, int] | None = None
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: str | None = None

    def check_free(self) -> None:
        """Refuse a folder that another run writes into; writes nothing.

        Raises:
            InputError: With whose it is.
        """
        with contextlib.suppress(OSError), self._opened(os.O_RDONLY) as file:
            self._refuse_unless_free(file, alone=False)

    def take(self, *, by_force: bool = False) -> None:
        """Make the folder this run's, and the folder itself where it is missing.

        By force it also takes that of a run that goes on, and waits until that one has noticed.

        Raises:
            InputError: It is another run's, with whose; or it cannot be written.
        """
        try:
            self._made = not self._path.parent.exists()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._place = _identity(os.stat(self._path.parent))
            patience = _PATIENCE
            while self._file is None:
                try:
                    self._try(by_force=by_force and not patience)
                except InputError:
                    if not patience:
                        raise
                    patience -= 1  # one that looks whether it is free has it for a moment
                    time.sleep(0.05)
        except OSError as problem:
            raise InputError(
                f"--out {self.folder}: cannot be written ({problem.strerror}); choose another"
                " folder"
            ) from problem

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Give signs of life from now on, and call once when the lock is lost, from a thread."""
        self._thread = threading.Thread(
            target=self._beat, args=(on_lost,), name="colossax-lock", daemon=True
        )
        self._thread.start()

    def check(self) -> str | None:
        """Look whether the folder is still this run's; `lost`, as it is then."""
        with self._guard:
            if self._file is not None and self.lost is None and not self._is_mine(self._file):
                self.lost = self._why_lost()
            return self.lost

    def release(self) -> None:
        """Give the folder back, and take away a lock file of one's own; an empty folder goes.

        Whoever took it over waits for this.
        """
        self._leave.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if self.check() is None:
                made = self._made or os.fstat(self._file).st_size > _LONGEST
                self._path.unlink()
                if made:
                    self._path.parent.rmdir()
        self._close()

    def _try(self, *, by_force: bool) -> None:
        """Take the lock, or find that it changed hands meanwhile, or refuse."""
        try:
            self._adopt(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            pass
        else:
            return
        with contextlib.suppress(FileNotFoundError), self._opened() as file:
            try:
                usable = self._refuse_unless_free(file)
            except InputError:
                if not by_force:
                    if self._made:
                        os.pwrite(file, b"\n", _LONGEST)
                    raise
                self._replace(file)
                return
            if not self._is_mine(file):
                return  # given back, or replaced, since it was opened
            if usable:
                self._adopt(os.dup(file))
            else:
                self._replace(file)

    @contextlib.contextmanager
    def _opened(self, how: int = os.O_RDWR) -> Iterator[int]:
        file = os.open(self._path, how)
        try:
            yield file
        finally:
            os.close(file)

    def _refuse_unless_free(self, file: int, *, alone: bool = True) -> bool:
        """Whether the file can be used as it is, this process having the kernel's lock of it.

        Raises:
            InputError: Another run has it, or may have it.
        """
        locked = _flock(file, alone=alone)
        if locked is False or self._may_live(file, locked):
            raise InputError(self._refusal(_read(file), killed=locked is not False))
        return locked is True

    def _may_live(self, file: int, locked: bool | None) -> bool:
        """Whether a file's holder gave a sign of life lately, and no lock of the kernel tells."""
        holder = _read(file)
        away = holder is not None and holder.kernel != self._me.kernel
        seen = os.fstat(file).st_mtime if holder is None else holder.seen
        return (locked is None or away) and time.time() - seen <= STALE_S

    def _refusal(self, holder: Holder | None, *, killed: bool) -> str:
        wait = ""
        if killed and holder is not None:
            rest = max(1, round(STALE_S - (time.time() - holder.seen)))
            wait = f" if it was killed, wait {rest} s;"
        whose = "another run, which has just begun" if holder is None else f"a run ({holder})"
        return (
            f"--out {self.folder}: {whose} writes there;{wait} choose another folder, or stop it"
            " and resume, which --take-over does at once"
        )

    def _replace(self, file: int) -> None:
        """Put a lock file of one's own in the place of another, and let its holder notice."""
        # Containers on several machines often have one number for all their processes.
        part = self._path.with_name(f"{LOCK_FILE}.{secrets.token_hex(8)}.part")
        self._adopt(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
        os.replace(part, self._path)
        time.sleep(_SETTLE_S)
        if self._file is not None and not self._is_mine(self._file):
            self._close()  # two took it at once, and the other came last
            return
        deadline = time.monotonic() + _HANDOVER_S
        while _flock(file) is False and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._may_live(file, _flock(file)):
            time.sleep(2 * _BEAT_S)  # by then it has noticed; no lock tells when it has ended

    def _adopt(self, file: int) -> None:
        """Hold a file, and sign it, unless another has locked it since it was made."""
        if _flock(file) is False:
            os.close(file)
            return
        self._file = file
        _held.add(file)
        self._sign(file)

    def _sign(self, file: int) -> None:
        now = dataclasses.replace(self._me, seen=time.time())
        text = json.dumps(dataclasses.asdict(now)).encode()
        os.pwrite(file, text.ljust(_LONGEST - 1) + b"\n", 0)

    def _beat(self, on_lost: Callable[[], None]) -> None:
        while not self._leave.wait(_BEAT_S):
            if self.check() is not None:
                on_lost()
                return
            with contextlib.suppress(OSError):  # a full disk: there was room for it before
                if self._file is not None:
                    self._sign(self._file)

    def _is_mine(self, file: int) -> bool:
        """Whether the file is the one at its path; a failure to look is no loss."""
        try:
            with self._opened(os.O_RDONLY) as there:
                return _identity(os.fstat(there)) == _identity(os.fstat(file))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _why_lost(self) -> str | None:
        """In one clause; None where the lock file alone was deleted, and is there again."""
        try:
            same = _identity(os.stat(self._path.parent)) == self._place
        except OSError:
            same = False
        with contextlib.suppress(OSError), self._opened(os.O_RDONLY) as file:
            return f"{self.folder} was taken over by {_read(file) or 'another run'}"
        if not same:
            return self._where_it_went()
        before = self._file
        with contextlib.suppress(OSError, InputError):
            self._try(by_force=False)
        if before is not None and self._file != before:
            _held.discard(before)
            os.close(before)
            return None
        return f"{self.folder} was taken over by another run"

    def _where_it_went(self) -> str:
        try:
            now = Path(os.readlink(f"/proc/self/fd/{self._file}"))
        except OSError:
            return f"{self.folder} was deleted or moved"
        if now.name == LOCK_FILE and now.exists():
            return f"{self.folder} was moved to {now.parent}"
        return f"{self.folder} was deleted"

    def _close(self) -> None:
        with self._guard:
            if self._file is not None:
                _held.discard(self._file)
                os.close(self._file)
                self._file = None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _flock(file: int, *, alone: bool = True) -> bool | None:
    """Whether the kernel's lock of a file is had now; None where its file system has none."""
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(file: int) -> Holder | None:
    """Whom a lock file names; None where it is not, or not yet, a whole document."""
    try:
        found = parse_json(os.pread(file, _LONGEST, 0))
        return Holder(
            host=as_kind(found["host"], str, "host"),
            kernel=as_kind(found["kernel"], str, "kernel"),
            process=as_kind(found["process"], int, "process"),
            begun=_moment(found["begun"]),
            seen=_moment(found["seen"]),
        )
    except (OSError, ValueError, KeyError):
        return None


def _moment(value: Any) -> float:
    """Seconds since 1970, before the year 2242."""
    if not 0 <= as_kind(value, (int, float), "it") < 1 << 33:
        raise ValueError(f"{value} is no moment")
    return float(value)
