"""A run's folder, held for all its processes; one that was not named is the next free number."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from colossax.errors import InputError
from colossax.processes.group import Group
from colossax.run.lock import RunLock


@contextlib.contextmanager
def held(
    folder: Path,
    group: Group,
    *,
    by_force: bool,
    check: Callable[[Path], object],
    on_lost: Callable[[], None],
    another: Callable[[], Path] | None = None,
) -> Iterator[RunLock]:
    """Hold the lock of a folder inside the block, for all processes of a group.

    Args:
        folder: The run's.
        group: Its first process holds it.
        by_force: Also take that of a run that goes on.
        check: Called with the folder when it is held: what has to be true of it from now on.
        on_lost: Called on the first process, from a thread, when the lock is lost.
        another: Gives the folder to try where one is refused; None where it has to be this one.

    Raises:
        InputError: See `RunLock.take`; or `check` raised it.
    """
    mine: list[RunLock] = []

    def take() -> str:
        mine.append(_taken(folder, by_force=by_force, check=check, another=another))
        return str(mine[0].folder)

    try:
        where = group.from_first(take)
        lock = mine[0] if mine else RunLock(Path(where))
        if group.first:
            lock.watch(on_lost)
        yield lock
    finally:
        for one in mine:
            one.release()


def _taken(
    folder: Path,
    *,
    by_force: bool,
    check: Callable[[Path], object],
    another: Callable[[], Path] | None,
) -> RunLock:
    """The lock of the first folder that is not refused."""
    while True:
        lock = RunLock(folder)
        try:
            lock.take(by_force=by_force)
            check(folder)
        except InputError:
            lock.release()
            tried, folder = folder, folder if another is None else another()
            if folder == tried:
                raise
        else:
            return lock
