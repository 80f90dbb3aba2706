"""A disk that is full when a test wants it."""

import resource

import pytest


@pytest.fixture
def file_size_limit():
    """A function that makes the system refuse to write large files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes=None):
        soft = before[0] if size_bytes is None else size_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    limit()
