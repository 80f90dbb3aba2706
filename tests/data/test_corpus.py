"""Encoded corpora: the documents' tokens, held-out documents, entropy, the cache."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.data import (
    Corpus,
    Tokenizer,
    corpus,
    encode_corpus,
    path_documents,
    train_tokenizer,
    unigram_entropy_nats,
)
from colossax.errors import DataError
from tests.fuzz.judge import called


def _encoded(path, vocab=300, **options):
    documents = path_documents(path, **options)
    tokenizer = train_tokenizer(documents, vocab)
    return encode_corpus(documents, tokenizer), documents, tokenizer


def _texts(split, tokenizer):
    spans = zip(split.starts, split.lengths, strict=True)
    return [tokenizer.decode(split.tokens[start : start + length]) for start, length in spans]


def _made(lengths, hashes=None):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if hashes is None:
        hashes = np.random.default_rng(0).integers(0, 2**63, len(lengths)).astype(np.uint64) * 2
    return Corpus(
        tokens=np.arange(offsets[-1], dtype=np.uint32),
        offsets=offsets,
        hashes=np.array(hashes, np.uint64),
        counts=np.ones(offsets[-1], np.int64),
        vocab_size=int(offsets[-1]),
        eos=0,
        fingerprint="made",
    )


def test_documents_follow_one_another_each_with_its_end(words):
    made, documents, tokenizer = _encoded(words)
    expected = [[*tokenizer.encode(text), tokenizer.eos] for text in documents]
    assert made.tokens[:].tolist() == sum(expected, [])
    assert made.offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert made.document_count == 12 and made.vocab_size == 300 and made.eos == 0
    assert made.counts.tolist() == np.bincount(sum(expected, []), minlength=300).tolist()
    assert made.tokens.dtype == made.tokens[:].dtype == np.uint16
    assert _texts(made.whole(), tokenizer) == [f"{text}<|endoftext|>" for text in documents]


def test_the_order_of_batches_and_pieces_does_not_show(words, cache, monkeypatch):
    first, documents, tokenizer = _encoded(words)
    monkeypatch.setattr(corpus, "_BATCH_DOCUMENTS", 1)
    monkeypatch.setenv("COLOSSAX_CACHE", str(cache / "other"))
    second = encode_corpus(documents, tokenizer)
    assert second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(first.tokens[:], second.tokens[:])
    for name in ("offsets", "hashes", "counts"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_long_documents_are_encoded_in_pieces_of_bounded_size(words, monkeypatch):
    (words / "long.txt").write_text("many words in a line\n" * 50 + "x" * 500 + "\nend")
    documents = path_documents(words)
    tokenizer = train_tokenizer(documents, 300)
    sizes, real = [], Tokenizer.encode_batch

    def watched(self, texts):
        sizes.append(sum(map(len, texts)))
        return real(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    monkeypatch.setattr(corpus, "_BATCH_CHARS", 100)
    pieces = encode_corpus(documents, tokenizer)
    assert max(sizes) <= 100 and sum(sizes) == sum(map(len, documents))
    assert _texts(pieces.whole(), tokenizer) == [f"{text}<|endoftext|>" for text in documents]
    lines = "many words in a line\n" * 50
    in_one = tokenizer.encode(lines)
    at = pieces.offsets[-2]
    # Cut before a line end, the pieces have the tokens of the whole.
    assert pieces.tokens[at : at + len(in_one) - 1].tolist() == in_one[:-1]


def test_large_vocabularies_take_four_bytes(words, tmp_path):
    _, documents, tokenizer = _encoded(words)
    raw = json.loads(tokenizer.definition)
    raw["model"]["vocab"].update({f"filler{i}": i for i in range(300, 70_000)})
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 70_000, "content": "<|far|>"})
    wide = Tokenizer(definition=json.dumps(raw), end="<|far|>")
    assert wide.vocab_size == 70_001
    made = encode_corpus(documents, wide)
    assert made.tokens.dtype == np.uint32 and made.tokens[:][-1] == 70_000
    assert made.fingerprint != encode_corpus(documents, tokenizer).fingerprint


def test_progress_counts_tokens(words, monkeypatch):
    monkeypatch.setattr(corpus, "_BATCH_DOCUMENTS", 5)
    documents = path_documents(words)
    told = []
    made = encode_corpus(documents, train_tokenizer(documents, 300), progress=told.append)
    assert len(told) == 3 and told == sorted(told) and told[-1] == len(made.tokens)


# The cache


def test_a_corpus_is_encoded_once(words, monkeypatch):
    first, documents, tokenizer = _encoded(words)
    monkeypatch.setattr(corpus, "_encode_into", lambda *args: pytest.fail("encoded again"))
    assert (
        encode_corpus(path_documents(words), tokenizer).tokens[:].tolist()
        == first.tokens[:].tolist()
    )
    with pytest.raises(pytest.fail.Exception):
        encode_corpus(documents, train_tokenizer(documents, 301))


_FILES = ["tokens.bin", "offsets.npy", "hashes.npy", "counts.npy", "checksums.npy", "meta.json"]


def _replaced(file, content):
    # Another file under the name: the map of the first corpus must not lose its pages.
    file.unlink()
    file.write_bytes(content)


_DAMAGES = {
    "shortened": lambda old: old[:-5],
    "zeroed": lambda old: bytes(len(old)),
    "one bit": lambda old: old[:-3] + bytes([old[-3] ^ 4]) + old[-2:],
    "empty": lambda old: b"",
    "nested": lambda old: b"[" * 200_000,
}


@pytest.mark.catches("corpus-arrays-not-checked")
@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("damage", [*_DAMAGES, "removed"])
def test_a_damaged_corpus_is_encoded_again(words, cache, name, damage):
    first, documents, tokenizer = _encoded(words)
    expected = first.tokens[:].tolist()
    file = cache / "corpora" / first.fingerprint / name
    content = file.read_bytes()
    if damage == "removed":
        file.unlink()
    else:
        _replaced(file, _DAMAGES[damage](content))
    again = encode_corpus(documents, tokenizer)
    assert again.tokens[:].tolist() == expected
    for array in ("offsets", "hashes", "counts"):
        np.testing.assert_array_equal(getattr(first, array), getattr(again, array))
    assert file.read_bytes() == content


def _made_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.catches("corpus-waits")
@pytest.mark.parametrize("name", [*_FILES, "lock"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(words, cache, name):
    first, documents, tokenizer = _encoded(words)
    expected, folder = first.tokens[:].tolist(), cache / "corpora" / first.fingerprint
    _made_a_pipe(folder / name if name != "lock" else folder.with_name(f"{folder.name}.lock"))
    (folder / "counts.npy").unlink()
    done = called(lambda: encode_corpus(documents, tokenizer).tokens[:].tolist(), limit_s=20)
    assert (done.fault, done.value) == (None, expected)


@pytest.mark.catches("tokenizer-waits")
def test_a_pipe_in_the_place_of_a_tokenizer_is_not_waited_for(words, cache, tmp_path):
    documents = path_documents(words)
    first = train_tokenizer(documents, 300)
    (file,) = (cache / "tokenizers").glob("*.json")
    _made_a_pipe(file)
    assert called(lambda: train_tokenizer(documents, 300), limit_s=20).value == first
    os.mkfifo(tmp_path / "tokenizer.json")
    done = called(lambda: Tokenizer.from_file(tmp_path), limit_s=20)
    assert done.refusal is not None and "it is no file" in done.refusal


@pytest.mark.catches("corpus-meta-not-sealed")
def test_the_folder_of_another_corpus_is_not_taken(words, cache):
    first, documents, tokenizer = _encoded(words)
    other, _, _ = _encoded(words, vocab=280)
    expected = first.tokens[:].tolist()
    folders = [cache / "corpora" / made.fingerprint for made in (first, other)]
    for file in folders[1].iterdir():
        _replaced(folders[0] / file.name, file.read_bytes())
    assert encode_corpus(documents, tokenizer).tokens[:].tolist() == expected


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"null", b'{"checksum": "", "body": "{}"}'])
def test_a_damaged_tokenizer_is_learnt_again(words, cache, content):
    documents = path_documents(words)
    first = train_tokenizer(documents, 300)
    (file,) = (cache / "tokenizers").glob("*.json")
    _replaced(file, content)
    assert train_tokenizer(documents, 300) == first


@pytest.mark.catches("cached-tokenizer-not-sealed")
def test_an_altered_tokenizer_is_learnt_again(words, cache):
    documents = path_documents(words)
    first = train_tokenizer(documents, 300)
    (file,) = (cache / "tokenizers").glob("*.json")
    altered = file.read_text().replace(r"\"e\":", r"\"E\":", 1)
    assert altered != file.read_text()
    _replaced(file, altered.encode())
    assert train_tokenizer(documents, 300) == first


def test_a_document_that_cannot_be_read_leaves_no_corpus(words, cache):
    made, documents, tokenizer = _encoded(words)
    (words / "zz.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="zz.txt: is not UTF-8"):
        encode_corpus(path_documents(words), tokenizer)
    assert [path.name for path in (cache / "corpora").iterdir() if path.is_dir()] == [
        made.fingerprint
    ]
    kept = encode_corpus(path_documents(words, skip_undecodable=True), tokenizer)
    assert kept.tokens[:].tolist() == made.tokens[:].tolist()


# Held-out documents


@given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_every_document_is_on_one_side_and_both_have_one(count, fraction, seed):
    hashes = np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)
    made = _made([2] * count, hashes)
    train, held_out = made.split(fraction)
    assert train.document_count > 0 and held_out.document_count > 0
    assert sorted([*train.starts, *held_out.starts]) == made.offsets[:-1].tolist()
    assert held_out.starts.tolist() == sorted(held_out.starts)


def test_the_share_held_out_is_about_that_asked_for():
    train, held_out = _made([3] * 20_000).split(0.05)
    assert 900 < held_out.document_count < 1100
    assert held_out.token_count == 3 * held_out.document_count
    assert train.token_count + held_out.token_count == 60_000


@pytest.mark.catches("held-out-by-position")
def test_a_text_stays_on_its_side_when_others_come_and_go(words):
    (words / "copy.txt").write_bytes((words / "04.txt").read_bytes())
    made, _, tokenizer = _encoded(words)
    _, held_out = made.split(0.4)
    before = set(_texts(held_out, tokenizer))
    for i in (0, 7):
        (words / f"{i:02}.txt").unlink()
    smaller = encode_corpus(path_documents(words), tokenizer)
    train, held_out = smaller.split(0.4)
    after = set(_texts(held_out, tokenizer))
    assert after <= before and 0 < len(after) < 11
    assert not after & set(_texts(train, tokenizer)), "a copy is on the same side"


@pytest.mark.parametrize(
    ("total", "fraction", "kept"), [(100, 0.1, 90), (1000, 1e-6, 998), (4, 0.9, 2)]
)
def test_of_a_single_document_the_tail_is_held_out(total, fraction, kept):
    train, held_out = _made([total]).split(fraction)
    assert (train.starts.tolist(), train.lengths.tolist()) == ([0], [kept])
    assert (held_out.starts.tolist(), held_out.lengths.tolist()) == ([kept], [total - kept])


def test_a_single_document_too_short_to_cut_is_refused():
    with pytest.raises(DataError, match="one document of 3 tokens leaves nothing to hold out"):
        _made([3]).split(0.1)


# Entropy


def test_unigram_entropy_is_that_of_all_tokens(words):
    made, _, _ = _encoded(words)
    counts = np.bincount(made.tokens[:])
    total = counts.sum()
    plain = -sum(c / total * math.log(c / total) for c in counts.tolist() if c)
    assert unigram_entropy_nats(made) == pytest.approx(plain, rel=1e-12)


@pytest.mark.catches("entropy-in-bits")
def test_unigram_entropy_of_known_distributions():
    assert unigram_entropy_nats(_made([8, 8])) == pytest.approx(math.log(16))
