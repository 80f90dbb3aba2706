"""Byte-level BPE: lossless, deterministic, cached; Hugging Face files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.data import Tokenizer, path_documents, tokenizer, train_tokenizer
from colossax.errors import DataError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer of 512 tokens."""
    folder = tmp_path_factory.mktemp("trained")
    text = "".join(f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(300))
    (folder / "a.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        yield train_tokenizer(path_documents(folder / "a.py"), 512)


def test_512_tokens_are_the_end_of_text_all_bytes_and_255_merges(trained):
    assert trained.vocab_size == 512 and trained.eos == 0
    assert len(json.loads(trained.definition)["model"]["merges"]) == 255
    assert trained.decode([trained.eos]) == "<|endoftext|>"
    assert len(trained.encode("def function_7(argument):")) < 8


@given(st.text())
def test_every_text_comes_back(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert trained.eos not in ids and all(0 < i < trained.vocab_size for i in ids)


@pytest.mark.catches("special-token-in-text")
@pytest.mark.parametrize(
    "text", ["<|endoftext|>", "a<|endoftext|>b", "\x00\r\n\t \ufeff", "漢字😀"]
)
def test_special_text_comes_back_as_text(trained, text):
    ids = trained.encode(text)
    assert trained.eos not in ids and trained.decode(ids) == text


@pytest.mark.catches("marked-text-is-text")
def test_what_a_template_wrote_has_special_tokens(trained):
    assert trained.specials == {"<|endoftext|>": 0}
    text = trained.encode("a"), trained.encode("b")
    assert trained.encode_marked("a<|endoftext|>b") == [*text[0], 0, *text[1]]
    assert trained.encode_marked("plain") == trained.encode("plain")


@given(st.text())
def test_bytes_of_tokens_are_the_bytes_of_their_text(trained, text):
    assert trained.is_byte_level
    assert b"".join(map(trained.token_bytes, trained.encode(text))) == text.encode()
    assert trained.token_bytes(0) == b"<|endoftext|>" and trained.token_bytes(10**6) == b""


def test_a_batch_equals_its_texts_one_by_one(trained):
    texts = ["def f():", "", "<|endoftext|>", "x" * 1000]
    assert trained.encode_batch(texts) == [trained.encode(text) for text in texts]


def test_json_gives_the_same_tokenizer_back(trained):
    again = Tokenizer.from_json(trained.to_json())
    assert again.to_json() == trained.to_json()
    assert (again.fingerprint, again.eos) == (trained.fingerprint, trained.eos)
    assert again.encode("return argument") == trained.encode("return argument")


@pytest.mark.parametrize("threads", ["true", "false"])
def test_training_again_gives_the_same(words, cache, monkeypatch, threads):
    first = train_tokenizer(path_documents(words), 400)
    monkeypatch.setenv("COLOSSAX_CACHE", str(cache / "other"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
    assert train_tokenizer(path_documents(words), 400).to_json() == first.to_json()


def test_a_trained_tokenizer_is_kept(words, monkeypatch):
    first = train_tokenizer(path_documents(words), 300)
    monkeypatch.setattr(tokenizer, "_trained", lambda *args: pytest.fail("trained again"))
    assert train_tokenizer(path_documents(words), 300) == first
    with pytest.raises(pytest.fail.Exception):
        train_tokenizer(path_documents(words), 301)


def test_changed_text_trains_another(words):
    first = train_tokenizer(path_documents(words), 300)
    (words / "more.txt").write_text("zebra " * 1000)
    assert train_tokenizer(path_documents(words), 300).fingerprint != first.fingerprint


def test_the_sample_is_even_bounded_and_the_same_each_time(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"{i:02} " * 20_000)
    documents = path_documents(tmp_path)
    sample = list(tokenizer._sample(documents, 480_000))
    assert sample == list(tokenizer._sample(documents, 480_000))
    size = sum(len(piece) for piece in sample)
    assert abs(size - 480_000) <= 16_384
    assert len({piece.split()[1] for piece in sample}) > 25, "few files give two of the 30 pieces"
    whole = "".join(tokenizer._sample(documents, 10**9))
    assert whole == "".join(documents)


def test_a_vocabulary_without_room_for_all_bytes_is_refused(words):
    with pytest.raises(DataError, match="tokenizer_vocab: found 256; give 257 or more"):
        train_tokenizer(path_documents(words), 256)
    assert train_tokenizer(path_documents(words), 257).vocab_size == 257


# Hugging Face files


def _save(folder, trained, **config):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(trained.definition)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_hugging_face_file_or_its_folder_is_read(trained, tmp_path):
    folder = _save(tmp_path / "hf", trained)
    for path in (folder, folder / "tokenizer.json", str(folder)):
        loaded = Tokenizer.from_file(path)
        assert loaded.eos == trained.eos and loaded.encode("def f") == trained.encode("def f")


@pytest.mark.parametrize("form", [lambda end: end, lambda end: {"content": end, "special": True}])
def test_the_config_beside_it_names_the_end(trained, tmp_path, form):
    raw = json.loads(trained.definition)
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 512, "content": "<|done|>"})
    changed = Tokenizer(definition=json.dumps(raw), end="<|done|>")
    folder = _save(tmp_path / "hf", changed, eos_token=form("<|done|>"))
    loaded = Tokenizer.from_file(folder)
    assert (loaded.eos, loaded.vocab_size) == (512, 513)
    assert loaded.decode(loaded.encode("a<|done|>")) == "a<|done|>"
    assert 512 not in loaded.encode("a<|done|>")
    assert Tokenizer.from_file(folder, end="<|endoftext|>").eos == 0


@pytest.mark.catches("tokenizer-adds-tokens")
def test_nothing_is_added_cut_or_padded(trained, tmp_path):
    raw = json.loads(trained.definition)
    raw["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    raw["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    loaded = Tokenizer.from_file(tmp_path)
    text = "def function_1(argument): return one two three"
    assert loaded.encode(text) == trained.encode(text)
    assert loaded.encode_batch([text, "x"]) == trained.encode_batch([text, "x"])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, r"tokenizer.json: cannot be read \(No such file.*name a tokenizer.json"),
        (b"\xff", "tokenizer.json: is no tokenizer.json, for it is not UTF-8"),
        (b"{", "tokenizer.json: is no tokenizer.json .*; name the file"),
        (b"[]", "tokenizer.json: is no tokenizer.json .*; name the file"),
        (b'{"added_tokens": []}', "none of its special tokens is known to end a document"),
        (
            b'{"added_tokens": [{"content": "</s>"}]}',
            "is no tokenizer.json that the tokenizers library reads",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, content, match):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=match):
        Tokenizer.from_file(tmp_path)


def test_an_end_the_tokenizer_lacks_is_refused(trained, tmp_path):
    folder = _save(tmp_path / "hf", trained)
    with pytest.raises(DataError, match="has no token '<eot>' to end documents with"):
        Tokenizer.from_file(folder, end="<eot>")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="tokenizer_config.json: names no end of text"):
        Tokenizer.from_file(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"end": "x"}'])
def test_what_was_not_saved_here_is_refused(text):
    with pytest.raises(DataError, match="tokenizer: is no saved tokenizer; save"):
        Tokenizer.from_json(text)
