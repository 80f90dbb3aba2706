"""What the checksum detects, and that it is what its docstring says."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.offload.disk.checksum import DIGEST_BYTES, LANES, checksum


def slow_checksum(data):
    """The definition, word by word."""
    words = data.view(np.uint64)
    digest = hashlib.blake2b(len(words).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    for lanes in LANES:
        sums = np.zeros(min(lanes, len(words)), np.uint64)
        np.add.at(sums, np.arange(len(words)) % lanes, words)
        digest.update(sums.tobytes())
    return digest.digest()


def noise(words, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, words, np.uint64).view(np.uint8)


@pytest.mark.parametrize("words", [0, 1, 512, LANES[1], LANES[0] + 1, 2 * LANES[0] - 3, 100_000])
def test_it_is_its_definition(words):
    data = noise(words)
    assert checksum(data) == slow_checksum(data)
    assert len(checksum(data)) == DIGEST_BYTES


@settings(max_examples=200)
@given(st.integers(0, 80_000 * 8 - 1), st.integers(1, 255))
def test_any_changed_byte_is_seen(place, change):
    data = noise(80_000)
    before = checksum(data)
    data[place] ^= change
    assert checksum(data) != before


@settings(max_examples=100)
@given(st.integers(0, 79_999), st.integers(0, 79_999))
def test_two_flipped_signs_are_seen(one, other):
    data = noise(80_000)
    before, words = checksum(data), data.view(np.uint64)
    words[one] ^= np.uint64(2**63)
    words[other] ^= np.uint64(2**63)
    assert (checksum(data) != before) == (one != other)


@pytest.mark.catches("checksum-one-sum")
@pytest.mark.parametrize("apart", [512, *LANES, 2 * LANES[0]])
def test_exchanged_blocks_are_seen(apart):
    words = noise(80_000).view(np.uint64)
    moved = words.copy()
    moved[:512], moved[apart : apart + 512] = words[apart : apart + 512], words[:512]
    assert checksum(words.view(np.uint8)) != checksum(moved.view(np.uint8))


def test_a_stale_or_zeroed_stretch_and_another_length_are_seen():
    data = noise(80_000)
    before = checksum(data)
    assert checksum(data[:-4096]) != before
    assert checksum(np.zeros(4096, np.uint8)) != checksum(np.zeros(8192, np.uint8))
    for begin, size in ((0, 4096), (4096, 300_000), (0, len(data))):
        stale = data.copy()
        stale[begin : begin + size] = noise(80_000, seed=1)[begin : begin + size]
        assert checksum(stale) != before
        stale[begin : begin + size] = 0
        assert checksum(stale) != before
