"""Frames of sound against sums written out, bands as defined, and Whisper's feature extractor."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.data import log_mel
from colossax.data.sound.log_mel import mel_filters
from colossax.errors import InputError


def sound(samples, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, samples).astype(np.float32)


def to_mels(hertz):
    """Slaney's: even up to 1 kHz, at 15 mels; 27 mels for a factor of 6.4 from there."""
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * np.log(hertz / 1000) / np.log(6.4)


def slow_filter(hertz, band, mels):
    """Of one frequency in one band: a triangle over mels that are found by bisection."""

    def frequency(number):
        low, high, wanted = 0.0, 8000.0, number * to_mels(8000.0) / (mels + 1)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if to_mels(middle) < wanted else (low, middle)
        return (low + high) / 2

    left, top, right = (frequency(band + i) for i in range(3))
    height = 2 / (right - left)
    if left < hertz <= top:
        return height * (hertz - left) / (top - left)
    return height * (right - hertz) / (right - top) if top < hertz < right else 0.0


@pytest.mark.catches("mels-all-even")
@pytest.mark.parametrize("mels", [5, 80])
def test_filters_are_triangles_of_one_area(mels):
    found = mel_filters(mels)
    assert found.shape == (201, mels)
    bands = sorted({0, 1, mels // 3, mels // 2, mels - 2, mels - 1})
    want = [[slow_filter(40.0 * at, band, mels) for band in bands] for at in range(201)]
    np.testing.assert_allclose(found[:, bands], want, rtol=0, atol=1e-9)


def slow(samples, mels):
    """By its definition: windows, a Fourier sum, bands and logarithms, in loops."""
    mirrored = np.concatenate([samples[200:0:-1], samples, samples[-2:-202:-1]]).astype(float)
    at = np.arange(400)
    waves = np.exp(-2j * np.pi * np.outer(np.arange(201), at) / 400)
    hann = np.sin(np.pi * at / 400) ** 2
    frames = []
    for first in range(0, len(samples) - len(samples) % 160, 160):
        power = np.abs(waves @ (hann * mirrored[first : first + 400])) ** 2
        frames.append(np.log10(np.maximum(power @ mel_filters(mels), 1e-10)))
    told = np.array(frames)
    return (np.maximum(told, told.max() - 8) + 4) / 4


@pytest.mark.catches("windows-not-centred")
@pytest.mark.catches("loudness-without-range")
@pytest.mark.parametrize("samples", [1600, 1700])
def test_frames_are_logarithms_of_energies(samples):
    given = sound(samples)
    given[400:1200] *= 1e-7  # quieter than is told
    found = log_mel(given, mels=20)
    assert found.shape == (10, 20) and found.dtype == np.float32
    np.testing.assert_allclose(found, slow(given, 20), rtol=0, atol=1e-5)


@pytest.mark.catches("windows-not-centred")
def test_frames_are_those_of_the_feature_extractor_of_transformers():
    want = load_file(Path(__file__).parents[2] / "golden/whisper/expected.safetensors")
    found = log_mel(want["samples"])
    assert found.shape == (20, 80) and np.ptp(want["log_mel"]) > 1
    np.testing.assert_allclose(found, want["log_mel"], rtol=0, atol=1e-5)


def test_a_tone_is_loudest_in_the_band_that_it_is_in():
    time = np.arange(16_000) / 16_000
    for hertz in (440.0, 2000.0):
        told = log_mel(np.sin(2 * np.pi * hertz * time).astype(np.float32))
        assert told.shape == (100, 80)
        loudest = int(told.mean(0).argmax())
        assert mel_filters(80)[round(hertz / 40), loudest] > 0


def test_silence_is_finite():
    np.testing.assert_array_equal(log_mel(np.zeros(480, np.float32), mels=4), -1.5)


@pytest.mark.parametrize(
    ("samples", "mels", "message"),
    [
        (np.zeros(200), 80, r"found samples of shape \[200\]; give one channel, of more than 200"),
        (np.zeros((2, 800)), 80, r"found samples of shape \[2, 800\]; give one channel"),
        (np.zeros(800, np.int16), 80, "found samples of int16; give floating ones from -1 to 1"),
        (np.zeros(800), 0, "found 0 mels; give 1 or more"),
    ],
)
def test_what_is_no_sound_is_refused(samples, mels, message):
    with pytest.raises(InputError, match=f"log_mel: {message}"):
        log_mel(samples, mels=mels)
