"""A file is the old one or the new one, and nothing is left beside it."""

from pathlib import Path

import pytest

from colossax.files import write_whole


def test_it_makes_the_folder_and_replaces_the_file(tmp_path):
    file = tmp_path / "a" / "b.json"
    for text in ("one", "zwölf"):
        write_whole(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.catches("file-written-in-place")
def test_what_was_there_stays_where_it_cannot_be_written(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    write_whole(file, "whole")
    write = Path.write_text

    def half(path, text, **options):
        write(path, text[:2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "another")
    assert (file.read_text(), list(tmp_path.iterdir())) == ("whole", [file])
