"""What is fetched of other projects: one folder of it, once, or a sentence that says why not."""

import io
import tarfile

import pytest

from ci import outside


def archive(place, *names):
    """Sources of a package that has these files."""
    file = place / "flax-1.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"flax-1/{name}")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"#"))
    return file


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(outside.importlib.metadata, "version", lambda package: "1")
    return tmp_path / "cache"


def test_one_folder_is_fetched_once(kept, monkeypatch, tmp_path):
    sources = archive(tmp_path, "flax/core.py", "examples/gemma/layers.py")
    calls = []
    monkeypatch.setattr(outside, "downloaded", lambda *given: calls.append(given) or sources)
    for _ in range(2):
        assert [file.name for file in outside.folder().iterdir()] == ["layers.py"]
    assert len(calls) == 1
    assert {p.name for p in kept.rglob("*") if p.is_file()} == {"layers.py"}


def test_sources_without_the_folder_are_refused(kept, monkeypatch, tmp_path):
    sources = archive(tmp_path, "flax/core.py")
    monkeypatch.setattr(outside, "downloaded", lambda *given: sources)
    with pytest.raises(outside.Refusal, match="^flax-1.tar.gz has no examples/gemma; say where"):
        outside.folder()
    assert not list((kept / "outside").iterdir())


def test_without_an_index_the_lane_fails_in_one_sentence(kept, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert outside.main() == 2
    told = capsys.readouterr()
    assert not told.out and "\n" not in told.err.strip()
    assert told.err.startswith("NOT RUN: the sources of flax==1 cannot be had from the package")
