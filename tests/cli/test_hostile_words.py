"""Words, files and streams that nobody meant: one sentence each, exit code 2, nothing written."""

import argparse
import io
import json
import os
import sys

import numpy as np
import pytest

from colossax.cli import main
from colossax.cli.generate import prompt_tokens
from colossax.config import cache_folder, user_path
from colossax.data.cache import sealed, unsealed
from colossax.data.files import file_hashes
from colossax.errors import InputError
from colossax.tasks import SampleConfig
from tests.cli.test_own_recipes import colossax

DEEP = "[" * 200_000 + "]" * 200_000
DIGITS = "9" * 10_000
LONG = "x" * 5_000


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working folder that nothing may appear in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refused(*words):
    """What is said; one short line, exit code 2, and nothing in the working folder."""
    before = sorted(os.listdir("."))
    code, told, said = colossax(*words)
    assert (code, told, said.count("\n")) == (2, "", 1), said[-2000:]
    assert len(said) < 2000  # the names of options are most of it
    assert sorted(os.listdir(".")) == before
    return said


WORDS = {
    "an empty folder": (("train", "llama_tiny", "--out", ""), "--out: is empty"),
    "an empty folder resumed": (("train", "--resume", "--out", ""), "--out: is empty"),
    "nobody's folder": (("train", "llama_tiny", "--out", "~nouser/a"), "the home '~nouser'"),
    "nobody's text": (("train", "llama_tiny", "--data", "~nouser/a"), "the home '~nouser'"),
    "nobody's tokenizer": (
        ("train", "llama_tiny", "--data.tokenizer=~nouser/a"),
        "tokenizer ~nouser/a: nobody has the home",
    ),
    "nobody's recipe": (("train", "--config", "~nouser/a.json"), "the home '~nouser'"),
    "nobody's checkpoint": (("train", "--init", "~nouser/a"), "the home '~nouser'"),
    "nobody's model": (("generate", "~nouser/a", "--prompt", "a"), "the home '~nouser'"),
    "no model": (("generate", "", "--prompt", "a"), "CHECKPOINT: is empty"),
    "nobody's import": (("import", "~nouser/a", "out"), "the home '~nouser'"),
    "an empty import": (("import", "", "out"), "HF_DIR: is empty"),
    "an import into nothing": (("import", "somewhere", ""), "OUT: is empty"),
    "an export into nothing": (("export", "somewhere", ""), "HF_DIR: is empty"),
    "a long folder": (("train", "llama_tiny", "--out", LONG), "--out: no path can be called so"),
    "a long recipe": (("train", LONG), "no recipe is called 'xxx"),
    "a long option": (("train", f"--{LONG}"), "unknown option"),
    "a long override": (("train", f"--optimizer.{LONG}=1"), "unknown override"),
    "a long verb": ((LONG,), "no verb is called"),
    "a long checkpoint": (("generate", LONG, "--prompt", "a"), "CHECKPOINT: no path"),
    "a long config": (("train", "--config", f"{LONG}.json"), "--config: no path"),
    "digits": (("train", "llama_tiny", f"--steps={DIGITS}"), "steps: expected int, found '999"),
    "400 digits": (("train", "llama_tiny", f"--steps={'9' * 400}"), "steps: found 999"),
    "digits of a share": (("train", "llama_tiny", f"--z-loss={DIGITS}"), "found inf"),
    "a text named in bytes": (("train", "llama_tiny", "--data=\udcff"), "data.path: character 1"),
    "a tokenizer named in bytes": (
        ("train", "llama_tiny", "--data.tokenizer=a\udcff"),
        "data.tokenizer: character 2",
    ),
    "an import into bytes": (("import", "somewhere", "a\udcff"), "OUT: character 2"),
    "an import of bytes": (("import", "\udcff", "out"), "config.json: is missing"),
    "an export into bytes": (("export", "somewhere", "a\udcff"), "HF_DIR: character 2"),
    "an export of bytes": (("export", "\udcff", "out"), "CHECKPOINT: character 1"),
    "a model of bytes": (("generate", "a\udcff", "--prompt", "a"), "CHECKPOINT: character 2"),
    "a folder of bytes": (("train", "llama_tiny", "--out=a\udcff"), "--out: character 2"),
    "a start of bytes": (("train", "llama_tiny", "--init=a\udcff"), "--init: character 2"),
    "bytes as prompt": (("train", "llama_tiny", "--sample.prompt=\udcff"), "sample.prompt: char"),
}


@pytest.mark.catches("out-empty")
@pytest.mark.catches("data-of-bytes")
@pytest.mark.catches("paths-of-bytes")
@pytest.mark.catches("home-of-nobody")
@pytest.mark.catches("endless-words")
@pytest.mark.parametrize("case", WORDS)
def test_words(case):
    words, sentence = WORDS[case]
    assert sentence in refused(*words)


FILES = {
    "nested 200,000 deep": f'{{"recipe": {DEEP}}}',
    "10,000 digits": f'{{"recipe": "llama_tiny", "steps": {DIGITS}}}',
    "20 digits": '{"recipe": "llama_tiny", "steps": 18446744073709551615}',
    "a name of 5,000 letters": json.dumps({"recipe": "llama_tiny", LONG: 1}),
    "a value of 5,000 letters": json.dumps({"recipe": "llama_tiny", "steps": LONG}),
    "half a character": '{"recipe": "llama_tiny", "sample": {"prompt": "\\ud800"}}',
    "not UTF-8": b'{"recipe": "\xff"}',
    "an integer for a part": '{"recipe": "llama_tiny", "data": 3}',
    "a list for a recipe": '{"recipe": ["llama_tiny"]}',
    "a list for a family": '{"recipe": "x", "model": {"family": ["llama"]}}',
    "a text for a model": '{"recipe": "llama_tiny", "model": "llama"}',
}


@pytest.mark.parametrize("case", FILES)
def test_a_recipe_in_json(case, tmp_path):
    text = FILES[case]
    file = tmp_path / "mine.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "mine.json" in refused("train", "--config", str(file))


@pytest.mark.parametrize("text", [f"recipe = {DEEP}", b'recipe = "\xff"', f"steps = {DIGITS}"])
def test_a_recipe_in_toml(text, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "mine.toml" in refused("train", "--config", str(file))


def test_a_name_that_is_not_utf_8(tmp_path):
    """A name like any other; it is told with its bytes."""
    strange = tmp_path / os.fsdecode(b"\xff.json")
    strange.write_text('{"recipe": "llama_tony"}')
    assert "no recipe is called 'llama_tony'" in refused("train", "--config", str(strange))


@pytest.mark.catches("prompt-surrogate")
def test_a_prompt_of_bytes():
    asked = argparse.Namespace(prompt=["a\udcff"], prompt_tokens=None, checkpoint="there")
    with pytest.raises(InputError, match="--prompt: character 2 is none"):
        prompt_tokens(asked, tokenizer=object())
    with pytest.raises(InputError, match=r"sample.prompt: character 1 is none"):
        SampleConfig(prompt="\ud800")


@pytest.mark.catches("ascii-output")
def test_standard_output_of_ascii(monkeypatch):
    """What the encoding has no place for is written in escapes, and nothing fails."""
    bytes_out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, encoding="ascii"))
    assert main(["--version"]) == 0
    sys.stdout.write("größe\n")
    sys.stdout.flush()
    assert bytes_out.getvalue().endswith(b"gr\\xf6\\xdfe\n")


@pytest.mark.parametrize("name", ["COLOSSAX_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_folder_of_nobody(monkeypatch, name):
    monkeypatch.delenv("COLOSSAX_CACHE", raising=False)
    monkeypatch.setenv(name, "~nouser/a")
    with pytest.raises(InputError, match=f"{name} ~nouser/a: nobody has the home '~nouser'"):
        cache_folder()


@pytest.mark.catches("folder-of-bytes")
def test_a_working_folder_of_bytes_counts_where_a_path_begins_there(tmp_path, monkeypatch):
    place = os.fsencode(tmp_path) + b"/a\xff"
    try:
        os.mkdir(place)
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    monkeypatch.chdir(place)
    with pytest.raises(InputError, match=r"OUT out: from the root on: character \d+ is none"):
        user_path("out", "OUT")
    assert user_path(tmp_path / "out", "OUT") == tmp_path / "out"


def test_a_path_in_a_working_folder_that_was_deleted_is_taken(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert str(user_path("out", "OUT")) == "out"


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """A text, its hash, and the file that remembers it."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("some text")
    os.utime(text, (1, 1))
    monkeypatch.setattr("colossax.data.files._RACY_S", -10.0)
    before = file_hashes([text])
    (kept,) = (tmp_path / "cache" / "hashes").iterdir()
    return text, before, kept


@pytest.mark.catches("hashes-forged")
@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: 3,
        lambda entry: entry[:3],
        lambda entry: [*entry[:3], 5],
        lambda entry: [*entry[:3], "abc"],
        lambda entry: {"a": entry},
        lambda entry: [DEEP],
    ],
)
def test_a_forged_file_of_hashes_is_made_anew(hashed, damage):
    text, before, kept = hashed
    body = json.loads(unsealed(kept.read_text(), kept.stem))
    known = {path: damage(entry) for path, entry in body.items()}
    kept.write_text(sealed(json.dumps(known).replace(json.dumps(DEEP), DEEP), kept.stem))
    assert file_hashes([text]) == before
    assert json.loads(unsealed(kept.read_text(), kept.stem)) == body


@pytest.mark.catches("hashes-without-checksum")
def test_a_damaged_file_of_hashes_is_made_anew(hashed):
    """Every bit of it; and one of another text's."""
    text, before, kept = hashed
    whole = kept.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        kept.write_bytes(damaged)
        assert file_hashes([text]) == before
        assert kept.read_bytes() == whole, f"bit {place % 8} of byte {place}"
    kept.write_text(sealed(unsealed(whole.decode(), kept.stem), "another"))
    assert file_hashes([text]) == before and kept.read_bytes() == whole
    kept.write_bytes(np.random.default_rng(0).bytes(64))
    assert file_hashes([text]) == before and kept.read_bytes() == whole
