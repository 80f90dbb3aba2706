"""Every test of this room has a cache of its own."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, in force."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("COLOSSAX_CACHE", str(folder))
    return folder


@pytest.fixture
def words(tmp_path):
    """A folder of twelve small text files."""
    folder = tmp_path / "words"
    folder.mkdir()
    for i in range(12):
        text = "".join(f"line {j} of {i}: naïve größe {j * i} 漢字\n" for j in range(3 + i))
        (folder / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return folder
