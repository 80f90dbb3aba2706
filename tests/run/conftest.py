"""Locks as they are elsewhere, and in less time."""

import errno

import pytest

from colossax.run import lock as locks


@pytest.fixture
def without_flock(monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)


@pytest.fixture
def brisk(monkeypatch):
    monkeypatch.setattr(locks, "_BEAT_S", 0.01)


@pytest.fixture
def slept(monkeypatch):
    """Seconds that a lock slept, which are none."""
    found = []
    monkeypatch.setattr(locks.time, "sleep", found.append)
    return found
