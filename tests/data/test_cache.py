"""Cache entries: built once, whole or absent, rebuilt when damaged."""

import errno
import threading

import pytest

from colossax.data.cache import built_once
from colossax.errors import DataError


def _intact(path):
    return path.is_file() and path.read_text().endswith(".")


def test_an_entry_is_built_once_even_by_several_at_a_time(cache):
    built = []
    gate = threading.Barrier(4)

    def build(path):
        built.append(threading.get_ident())
        path.write_text("half ")
        path.write_text("half and half.")

    def run():
        gate.wait()
        built_once(cache / "entry", build, intact=_intact)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (cache / "entry").read_text() == "half and half."


@pytest.mark.catches("cache-entry-half-written")
def test_a_builder_that_fails_leaves_no_entry(cache):
    def build(path):
        path.mkdir()
        (path / "a").write_text("half")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        built_once(cache / "entry", build, intact=_intact)
    assert [file.name for file in cache.iterdir()] == ["entry.lock"]


def test_what_a_killed_builder_left_is_removed(cache):
    (cache / "entry.part").mkdir(parents=True)
    (cache / "entry.part" / "a").write_text("half")
    built_once(cache / "entry", lambda path: path.write_text("whole."), intact=_intact)
    assert sorted(file.name for file in cache.iterdir()) == ["entry", "entry.lock"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_damaged_entry_is_built_again(cache, folder):
    entry = cache / "entry"
    cache.mkdir()
    if folder:
        entry.mkdir()
        (entry / "a").write_text("half")
    else:
        entry.write_text("half")
    built_once(entry, lambda path: path.write_text("whole."), intact=_intact)
    assert entry.read_text() == "whole."


def test_a_full_disk_is_one_sentence(cache):
    def build(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"cache.*\(No space left on device\); make room.*COLOSSAX"):
        built_once(cache / "entry", build, intact=_intact)


def test_a_cache_that_is_a_file_is_one_sentence(cache):
    cache.write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        built_once(cache / "sub" / "entry", lambda path: None, intact=_intact)
