"""Sound as Whisper reads it: the logarithm of its energy in bands, a hundred times a second."""

import functools

import numpy as np
from jaxtyping import Float32

from colossax.errors import InputError

RATE = 16_000
"""Samples a second."""

WINDOW, HOP = 400, 160
"""Samples of a window, 25 ms, and from one window to the next, 10 ms."""

_LINEAR_MELS, _LINEAR_HZ, _OCTAVES = 15.0, 1000.0, 27.0 / np.log(6.4)
_FLOOR, _RANGE = 1e-10, 8.0


def log_mel(samples: np.ndarray, *, mels: int = 80) -> Float32[np.ndarray, "frames mels"]:
    """A frame for each 10 ms of sound at 16 kHz, about from -1 to 1.5.

    Of windows around each hop, weighted by Hann's function, the squared Fourier transform is summed
    in bands (`mel_filters`); of the decimal logarithm l of those sums, not below that of 1e-10 or 8
    below the largest of the sound, it is `(l + 4) / 4`. At both ends the sound is mirrored.

    Args:
        samples: `[n]`, floating, from -1 to 1, 16,000 a second; more than 200, and of frames that
            Whisper is to read a multiple of 320.
        mels: Bands, 1 or more.

    Raises:
        InputError: There are too few samples, several channels, whole numbers or no bands.

    Cost: a Fourier transform of 400 samples for each frame.
    Source: Radford et al. 2022, Robust Speech Recognition via Large-Scale Weak Supervision, whose
    published feature extractor this follows.
    """
    if samples.ndim != 1 or len(samples) <= WINDOW // 2:
        raise InputError(
            f"log_mel: found samples of shape {list(samples.shape)}; give one channel, of more than"
            f" {WINDOW // 2} samples at {RATE:,} a second"
        )
    if not np.issubdtype(samples.dtype, np.floating):
        raise InputError(
            f"log_mel: found samples of {samples.dtype}; give floating ones from -1 to 1, those of"
            " 16 bits divided by 32,768"
        )
    if mels < 1:
        raise InputError(f"log_mel: found {mels} mels; give 1 or more")
    around = np.pad(samples.astype(np.float64), WINDOW // 2, mode="reflect")
    cut = np.lib.stride_tricks.sliding_window_view(around, WINDOW)[::HOP][: len(samples) // HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(cut * hann)) ** 2
    # No matmul: threads of a BLAS that wait for its next one keep cores from the step of a run.
    energy = np.einsum("fw,wm->fm", power, mel_filters(mels))
    told = np.log10(np.maximum(energy, _FLOOR))
    told = np.maximum(told, told.max() - _RANGE)
    return ((told + 4) / 4).astype(np.float32)


@functools.lru_cache(maxsize=8)
def mel_filters(mels: int) -> np.ndarray:
    """Weights `[201, mels]` of the frequencies 0, 40, ... 8000 Hz in each band.

    Band i rises from the i-th of `mels + 2` frequencies to the next and falls to the one behind it;
    those are spaced evenly in mels, and each band's area is 1. Below 1 kHz a mel is 200 / 3 Hz,
    above it 1 / 27 of the way to 6.4 times the frequency, as a logarithm (Slaney's).

    Args:
        mels: Bands.
    """
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    edges = _hertz(np.linspace(0, _mels(RATE / 2), mels + 2))
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies - low) / (middle - low)
    falling = (high - frequencies) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


def _mels(hertz: float) -> float:
    """Of a frequency above 1 kHz."""
    return _LINEAR_MELS + float(np.log(hertz / _LINEAR_HZ) * _OCTAVES)


def _hertz(mels: np.ndarray) -> np.ndarray:
    slow = mels * _LINEAR_HZ / _LINEAR_MELS
    return np.where(
        mels < _LINEAR_MELS, slow, _LINEAR_HZ * np.exp((mels - _LINEAR_MELS) / _OCTAVES)
    )
