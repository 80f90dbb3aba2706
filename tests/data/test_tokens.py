"""Tokens on disk: every block is verified before its first token is handed out."""

import threading

import numpy as np
import pytest

from colossax.data import encode_corpus, path_documents, tokens, train_tokenizer
from colossax.data.tokens import CheckedTokens, block_checksums
from colossax.errors import DataError

_BLOCK = 64
_LENGTH = 1000


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tokens, "BLOCK_BYTES", _BLOCK)


class _File:
    """Tokens in a file, and how often they were repaired."""

    def __init__(self, folder):
        self.path = folder / "tokens.bin"
        self.right = np.arange(_LENGTH, dtype=np.uint16)
        self.repairs = 0
        self._write(self.right)
        self.opened = CheckedTokens(
            self.path, self.right.dtype, block_checksums(self.path), repair=self.repair
        )

    def _write(self, values):
        part = self.path.with_name("part")
        part.write_bytes(values.tobytes())
        part.replace(self.path)

    def repair(self):
        self.repairs += 1
        self._write(self.right)

    def damage(self, token):
        """Alter one token in place, so that what is mapped shows it."""
        with self.path.open("r+b") as file:
            file.seek(2 * token)
            file.write(b"\xff\xff")


@pytest.fixture
def file(tmp_path, small_blocks):
    return _File(tmp_path)


def _places(*indices):
    return np.array(indices, np.int64)


@pytest.mark.parametrize(
    "index",
    [slice(None), slice(10, 20), slice(31, 33), slice(-5, None), slice(5, 5)]
    + [_places(999, 0, 0, 512), np.empty(0, np.int64), np.full((2, 3), 40)],
)
def test_what_is_read_is_what_was_written(file, index):
    np.testing.assert_array_equal(file.opened[index], file.right[index])
    assert len(file.opened) == _LENGTH and file.repairs == 0


@pytest.mark.catches("token-block-not-verified")
@pytest.mark.parametrize("token", [0, 31, 32, 500, _LENGTH - 1])
@pytest.mark.parametrize("as_slice", [True, False])
def test_a_damaged_block_is_repaired_before_it_is_read(file, token, as_slice):
    file.damage(token)
    index = slice(token, token + 1) if as_slice else _places(token)
    assert file.opened[index].tolist() == [token] and file.repairs == 1
    np.testing.assert_array_equal(file.opened[:], file.right)
    assert file.repairs == 1


def test_blocks_that_nobody_reads_are_not_verified(file):
    file.damage(500)
    file.opened[:480]
    file.opened[_places(512, 999)]
    assert file.repairs == 0


@pytest.mark.catches("token-block-verified-each-time")
def test_a_block_is_verified_once(file, monkeypatch):
    file.opened[:]
    monkeypatch.setattr(tokens, "checksum", lambda data: pytest.fail("verified again"))
    file.opened[10:900]
    file.opened[_places(999, 3)]


def test_a_repair_that_gives_other_tokens_is_refused(file):
    file.damage(3)
    file.right[3] = 7
    with pytest.raises(DataError, match="block 0 is wrong again right after.*start again"):
        file.opened[:5]


def test_threads_that_meet_a_damaged_block_repair_it_once(file):
    file.damage(100)
    gate, seen = threading.Barrier(4), []

    def run():
        gate.wait()
        seen.append(file.opened[96:128].tolist())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [list(range(96, 128))] * 4 and file.repairs == 1


@pytest.mark.catches("corpus-repaired-from-damage")
@pytest.mark.parametrize("vanished", [False, True])
def test_a_corpus_damaged_while_in_use_is_encoded_again_from_its_text(
    words, cache, small_blocks, vanished
):
    documents = path_documents(words)
    tokenizer = train_tokenizer(documents, 300)
    made = encode_corpus(documents, tokenizer)
    expected = made.tokens[:].tolist()
    opened = encode_corpus(documents, tokenizer)
    stored = cache / "corpora" / made.fingerprint / "tokens.bin"
    content = stored.read_bytes()
    with stored.open("r+b") as file:
        file.write(bytes(200))
    if vanished:
        (words / "03.txt").unlink()
        with pytest.raises(DataError, match="03.txt: cannot be read"):
            opened.tokens[:]
    else:
        assert opened.tokens[:].tolist() == expected
        assert stored.read_bytes() == content
