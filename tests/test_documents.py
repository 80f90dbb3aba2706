"""Whatever stands in a JSON file, reading it gives a value of the kind asked or one sentence."""

import json
import os

import pytest

from colossax.documents import as_kind, member, parse_json, read_json
from colossax.errors import CheckpointError, InputError


def test_what_json_can_say_comes_back(tmp_path):
    value = {"a": [1, -2.5, None, True, "zwölf 😀"], "b": {"c": [[]]}, "big": -(2**63)}
    for ascii_only in (True, False):
        file = tmp_path / "a.json"
        file.write_text(json.dumps(value, ensure_ascii=ascii_only), encoding="utf-8")
        assert read_json(file, remedy="none") == value


HOSTILE = {
    "nested 200,000 deep": (b"[" * 200_000 + b"]" * 200_000, "nested deeper than 64"),
    "nested and never closed": (b'{"a":' * 200_000, "nested deeper than 64"),
    "nested 65 deep": (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper than 64"),
    "10,000 digits": (b'{"a": ' + b"9" * 10_000 + b"}", "an integer of 10000 digits"),
    "20 digits": (b'{"a": -18446744073709551616}', "an integer of 20 digits"),
    "latin-1": ('{"a": "zwölf"}'.encode("latin-1"), "not UTF-8 at byte 9"),
    "half a character": (b'{"a": {"\\ud83d": 1}}', "half a character"),
    "empty": (b"", "no JSON: Expecting value"),
    "cut off": (b'{"a": 1', "no JSON"),
    "zeroes": (bytes(64), "no JSON"),
    "another kind": (b"[]", "it is a list, not an object"),
}


@pytest.mark.catches("documents-unbounded")
@pytest.mark.catches("documents-any-integer")
@pytest.mark.catches("documents-half-characters")
@pytest.mark.parametrize("case", HOSTILE)
def test_each_is_refused_in_one_sentence_that_names_the_file(tmp_path, case):
    content, reason = HOSTILE[case]
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_json(file, remedy="copy it anew", error=CheckpointError)
    text = str(refused.value)
    assert text.startswith(f"{file}: cannot be read (it ") and text.endswith("; copy it anew")
    assert reason in text and "\n" not in text


@pytest.mark.catches("documents-any-size")
def test_what_is_no_small_file_is_refused_unread(tmp_path):
    file, pipe = tmp_path / "a.json", tmp_path / "pipe"
    file.touch()
    os.truncate(file, 1 << 40)
    os.mkfifo(pipe)
    for path, reason in (
        (file, "has 1099511627776 bytes, and at most"),
        (pipe, "it is no file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "b", "No such file"),
    ):
        with pytest.raises(InputError, match=reason):
            read_json(path, remedy="none")


def test_members_are_of_the_kind_asked():
    value = {"n": 3, "yes": True, "none": None}
    assert member(value, "n", int) == member(value, "n", float) == 3
    assert member(value, "none", (str, type(None))) is None
    for name, kind, text in (
        ("yes", int, "'yes' is true or false, not an integer"),
        ("none", (dict, list), "'none' is null, not an object or a list"),
        ("other", int, "its head has no 'other'"),
    ):
        with pytest.raises(ValueError, match=text):
            member(value, name, kind, of="its head")
    with pytest.raises(ValueError, match="it is a text, not a number"):
        as_kind(parse_json('"a"', str), float, "it")


def test_a_name_given_twice_is_refused_where_asked():
    text = '{"a": [{"b": 1, "b": 2}]}'
    assert parse_json(text) == {"a": [{"b": 2}]}
    with pytest.raises(ValueError, match="it has 'b' twice in an object"):
        parse_json(text, unique=True)
    assert parse_json('{"a": {"a": 1}}', unique=True) == {"a": {"a": 1}}
