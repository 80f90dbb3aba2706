"""Where the cache folder is."""

from pathlib import Path

from colossax.config import cache_folder


def test_the_folder_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("COLOSSAX_CACHE")
    assert cache_folder() == Path("/xdg/colossax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/colossax")
