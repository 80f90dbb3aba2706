"""Documents out of text, JSONL, Parquet and the standard library; refusals by message."""

import codecs
import json
import os
import re
import shutil
import sysconfig
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from colossax.data import files, path_documents, stdlib_documents
from colossax.errors import DataError
from tests.fuzz.judge import called


def _write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _parquet(path, texts, *, type_=None, column="text", **options):
    table = pa.table({"n": list(range(len(texts))), column: pa.array(texts, type_)})
    pq.write_table(table, path, **options)
    return path


def _refused(path, match, **options):
    with pytest.raises(DataError, match=match):
        list(path_documents(path, **options))


# Text


def test_a_text_file_is_one_document_whatever_its_name(tmp_path):
    file = _write(tmp_path / "a.weird", "one\r\ntwo\n\x00ü")
    assert list(path_documents(file)) == ["one\r\ntwo\n\x00ü"]
    assert list(path_documents(str(file))) == ["one\r\ntwo\n\x00ü"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert list(path_documents(_write(tmp_path / "a", codecs.BOM_UTF8 + b"x"))) == ["x"]


def test_a_folder_gives_its_files_by_relative_path(tmp_path):
    root = tmp_path / "root"
    for name in ("b.txt", "a/z.md", "a/b/c", "a.txt", "B"):
        _write(root / name, name)
    _write(root / ".git" / "config", b"\xff")
    _write(root / ".hidden", b"\xff")
    _write(root / "empty.txt", "")
    expected = ["B", "a.txt", "a/b/c", "a/z.md", "b.txt"]
    assert list(path_documents(root)) == expected
    assert list(path_documents(root)) == expected


def test_a_folder_may_mix_formats(tmp_path):
    root = tmp_path / "root"
    _write(root / "a.txt", "plain")
    _write(root / "b.jsonl", '{"text": "json"}\n')
    _parquet(root / "c.parquet", ["column"])
    assert list(path_documents(root)) == ["plain", "json", "column"]


def test_a_file_that_is_not_utf8_is_named_or_left_out_when_asked(tmp_path):
    root = tmp_path / "root"
    _write(root / "a.txt", "good")
    bad = _write(root / "b.txt", b"abc\xff")
    _refused(root, rf"^{re.escape(str(bad))}: is not UTF-8 \(byte 3 is 0xff\).*skip_undecodable")
    assert list(path_documents(root, skip_undecodable=True)) == ["good"]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda root: "", "data path: is empty; name a file"),
        (lambda root: root / "nowhere", "nowhere: does not exist; name a file"),
        (lambda root: _write(root / "a.txt", ""), "a.txt: holds no text; name"),
        (lambda root: _write(root / "sub/a.txt", "").parent, "sub: holds no text; name"),
        (lambda root: _write(root / "sub/.a", "x").parent, "sub: holds no files; name"),
    ],
)
def test_a_path_without_documents_is_refused(tmp_path, make, match):
    _refused(make(tmp_path), match)


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    _refused(tmp_path / "pipe", "pipe: is no regular file; save what it gives")


def test_a_file_that_vanishes_is_named(tmp_path):
    documents = path_documents(_write(tmp_path / "a.txt", "x"))
    (tmp_path / "a.txt").unlink()
    for use in (list, lambda d: d.fingerprint, lambda d: d.size_bytes):
        with pytest.raises(DataError, match=r"a.txt: cannot be read \(No such file"):
            use(documents)


# JSONL


def test_jsonl_gives_the_field_asked_for(tmp_path):
    lines = [{"text": "a\nb", "body": "A"}, {"text": "ü😀", "body": "B"}, {"text": "", "body": "C"}]
    raw = "\n\n".join(json.dumps(line) for line in lines) + "\n  \n"
    file = _write(tmp_path / "a.jsonl", codecs.BOM_UTF8 + raw.encode())
    assert list(path_documents(file)) == ["a\nb", "ü😀"]
    assert list(path_documents(file, text_field="body")) == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"texts": 1}', r"no field 'text'; did you mean 'texts'\?; name the one .* text_field"),
        ('{"body": "x"}', r"has no field 'text'; known: body; name the one"),
        ('{"text": 3}', "field 'text' is a number; it must hold a string"),
        ('{"text": null}', "field 'text' is null"),
        ('{"text": true}', "field 'text' is a truth value"),
        ('["text"]', "found a list; write one object per line"),
        ('{"text": "x"', r"is not JSON \(Expecting ',' delimiter at column 13\); write one object"),
        ('{"text": "\\ud800"}', r"is not UTF-8 \(half a surrogate pair\)"),
        (b'{"text": "\xff"}', r"is not UTF-8 \(byte 10 is 0xff\)"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, match):
    bad = line if isinstance(line, bytes) else line.encode()
    file = _write(tmp_path / "a.jsonl", b'{"text": "ok"}\n\n' + bad + b'\n{"text": "ok"}\n')
    _refused(file, rf"^{re.escape(str(file))}, line 3: .*{match}")


def test_only_undecodable_lines_are_left_out_when_asked(tmp_path):
    raw = b'{"text": "a"}\n{"text": "\xff"}\n{"text": "\\ud800"}\n{"text": "\\u00e4"}\n'
    file = _write(tmp_path / "a.jsonl", raw)
    assert list(path_documents(file, skip_undecodable=True)) == ["a", "ä"]
    _refused(_write(tmp_path / "b.jsonl", "{}"), "no field", skip_undecodable=True)


# Parquet


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_gives_the_column_over_all_row_groups(tmp_path, type_):
    texts = [f"row {i % 7} ü" for i in range(5000)]
    file = _parquet(tmp_path / "a.parquet", texts, type_=type_, column="body", row_group_size=1500)
    assert list(path_documents(file, text_field="body")) == texts


def test_parquet_is_read_by_row_group(tmp_path):
    texts = [f"{i:08}" * 50 for i in range(4000)]
    file = _parquet(
        tmp_path / "a.parquet", texts, row_group_size=2000, use_dictionary=False, compression="zstd"
    )
    group = pq.ParquetFile(file).metadata.row_group(1).column(1)
    raw = bytearray(file.read_bytes())
    start = group.data_page_offset
    raw[start : start + group.total_compressed_size] = bytes(group.total_compressed_size)
    file.write_bytes(raw)
    got = []
    with pytest.raises(DataError, match="a.parquet: is no whole Parquet file"):
        for text in path_documents(file):
            got.append(text)
    assert got == texts[: len(got)] and len(got) >= 1024


@pytest.mark.parametrize("keep", [0, 3, 100, -1, -9])
def test_a_truncated_parquet_file_is_refused(tmp_path, keep):
    file = _parquet(tmp_path / "a.parquet", ["some text"] * 100)
    file.write_bytes(file.read_bytes()[:keep])
    _refused(file, r"a.parquet: is no whole Parquet file \(.*\); copy or write it again")


def test_columns_that_hold_no_text_are_refused(tmp_path):
    file = _parquet(tmp_path / "a.parquet", ["x"], column="texts")
    _refused(file, r"has no column 'text'; did you mean 'texts'\?; name the one")
    _refused(file, "column 'n' holds int64; it must hold strings", text_field="n")
    nulls = _parquet(tmp_path / "b.parquet", ["x", None])
    _refused(nulls, "b.parquet, row 2: column 'text' is null")


def test_a_parquet_row_that_is_not_utf8_is_named(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": broken}), file)
    _refused(file, r"a.parquet, row 2: is not UTF-8 \(byte 0 is 0xff\)")
    assert list(path_documents(file, skip_undecodable=True)) == ["a"]


# Arrow and what `datasets` saves


def _arrow(path, texts, *, as_file=False, column="text"):
    table = pa.table({"n": list(range(len(texts))), column: texts})
    new = pa.ipc.new_file if as_file else pa.ipc.new_stream
    path.parent.mkdir(parents=True, exist_ok=True)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def _saved(folder, shards):
    """A data set as `datasets` 4 saves it: shards in the order of `state.json`."""
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        _arrow(folder / name, texts)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    _write(folder / "state.json", json.dumps(state))
    _write(folder / "dataset_info.json", json.dumps({"features": {}}))


@pytest.mark.parametrize("as_file", [False, True])
def test_arrow_gives_the_column_over_all_batches(tmp_path, as_file):
    texts = [f"document {i}" for i in range(5)]
    file = _arrow(tmp_path / "a.arrow", texts, as_file=as_file, column="body")
    assert list(path_documents(file, text_field="body")) == texts
    _refused(file, "a.arrow: has no column 'text'")
    file.write_bytes(file.read_bytes()[:-40])
    _refused(file, "a.arrow: is no whole Arrow file", text_field="body")


@pytest.mark.catches("data-set-waits")
@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
def test_a_pipe_beside_a_saved_data_set_is_not_waited_for(tmp_path, name):
    _saved(tmp_path / "set", [["b"]])
    (tmp_path / "set" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "set" / name)
    done = called(lambda: path_documents(tmp_path / "set"), limit_s=20)
    assert done.refusal is not None and f"{name}: has no list" in done.refusal


@pytest.mark.catches("data-set-read-as-files")
def test_a_saved_data_set_gives_its_rows_alone_in_its_order(tmp_path):
    _saved(tmp_path / "set", [["b", "a"], ["c"]])
    assert list(path_documents(tmp_path / "set")) == ["b", "a", "c"]


def test_of_several_splits_train_is_read(tmp_path):
    _saved(tmp_path / "train", [["learn"]])
    _saved(tmp_path / "test", [["ask"]])
    _write(tmp_path / "dataset_dict.json", json.dumps({"splits": ["train", "test"]}))
    assert list(path_documents(tmp_path)) == ["learn"]
    assert list(path_documents(tmp_path / "test")) == ["ask"]
    _write(tmp_path / "dataset_dict.json", json.dumps({"splits": ["test"]}))
    _refused(tmp_path, r"has the splits \['test'\] and no 'train'; name one's folder")
    _write(tmp_path / "dataset_dict.json", "{}")
    _refused(tmp_path, "dataset_dict.json: has no list 'splits'")


# Standard library


def test_the_standard_library_comes_without_tests_and_packages():
    documents = stdlib_documents()
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(root).as_posix() for file, _ in documents.files]
    assert names == sorted(names) and len(names) == len(set(names))
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    for name in names:
        parts = set(name.split("/"))
        assert name.endswith(".py") and not parts & {"site-packages", "test", "tests", "idle_test"}
    texts = list(documents)
    assert sum(map(len, texts)) > 5_000_000
    assert any("def makedirs(" in text for text in texts)


def test_python_source_is_decoded_by_its_coding_line(tmp_path, monkeypatch):
    _write(tmp_path / "a.py", b"# coding: latin-1\ns = '\xe4'\n")
    _write(tmp_path / "test" / "b.py", b"\xff")
    _write(tmp_path / "notes.txt", b"\xff")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(stdlib_documents()) == ["# coding: latin-1\ns = 'ä'\n"]
    _write(tmp_path / "c.py", b"s = '\xe4'\n")
    with pytest.raises(DataError, match="c.py: cannot be decoded as Python source"):
        list(stdlib_documents())


def test_a_library_without_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python.zip")})
    with pytest.raises(DataError, match="Python's standard library in .*: holds no source; name a"):
        stdlib_documents()


# Fingerprints


def test_the_fingerprint_follows_content_and_reading_only(words, tmp_path):
    first = path_documents(words).fingerprint
    copy = tmp_path / "elsewhere"
    shutil.copytree(words, copy)
    assert path_documents(copy).fingerprint == first
    assert path_documents(copy, text_field="body").fingerprint != first
    assert path_documents(copy, skip_undecodable=True).fingerprint != first
    (copy / "00.txt").rename(copy / "zz.txt")
    assert path_documents(copy).fingerprint != first, "the order of documents changed"


def test_the_same_bytes_read_in_another_way_have_another_fingerprint(tmp_path):
    line = '{"text": "x"}'
    text, jsonl = _write(tmp_path / "a.txt", line), _write(tmp_path / "a.jsonl", line)
    assert path_documents(text).fingerprint != path_documents(jsonl).fingerprint


def test_a_change_that_keeps_the_size_changes_the_fingerprint(words):
    first = path_documents(words).fingerprint
    file = words / "03.txt"
    file.write_text(file.read_text(encoding="utf-8").replace("3", "4"), encoding="utf-8")
    assert path_documents(words).fingerprint != first


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files whose content is hashed from here on."""
    read, real = [], files._hash_file
    monkeypatch.setattr(files, "_hash_file", lambda file: read.append(file.name) or real(file))
    return read


def test_unchanged_files_are_hashed_once(words, hashed, monkeypatch):
    # Files too young for the clock to tell a change are read every time: let them age.
    now_ns = time.time_ns()
    monkeypatch.setattr(files.time, "time_ns", lambda: now_ns + 60 * 10**9)
    first = path_documents(words).fingerprint
    assert len(hashed) == 12
    assert path_documents(words).fingerprint == first and len(hashed) == 12
    (words / "05.txt").write_text("new")
    assert path_documents(words).fingerprint != first and hashed[12:] == ["05.txt"]


@pytest.mark.catches("names-of-bytes")
def test_a_file_whose_name_is_no_utf_8_is_read_as_any_other(tmp_path):
    plain, strange = (
        _write(tmp_path / "a/b.txt", "a dog"),
        tmp_path / "b" / os.fsdecode(b"\xff.txt"),
    )
    assert path_documents(_write(strange, "a dog")).fingerprint == path_documents(plain).fingerprint


def test_files_just_written_are_not_trusted_to_their_times(words, hashed):
    first = path_documents(words).fingerprint
    assert path_documents(words).fingerprint == first
    assert len(hashed) == 24


def test_a_cache_that_cannot_be_written_only_costs_time(words, cache):
    cache.write_text("in the way")
    assert path_documents(words).fingerprint == path_documents(words).fingerprint
