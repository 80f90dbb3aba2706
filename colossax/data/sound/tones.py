"""Notes that are played one after another, and their names."""

import dataclasses

import numpy as np
from jaxtyping import Float32

from colossax.data.hashing import keyed_uint64
from colossax.data.rows import Row
from colossax.data.sound.log_mel import HOP, RATE, log_mel

NOTES = ("c", "c#", "d", "d#", "e", "f", "f#", "g", "g#", "a", "a#", "b")
"""Names, by token."""

FEWEST, MOST = 4, 7
"""Notes of a row."""

FRAMES_PER_NOTE = 8
FRAMES = FRAMES_PER_NOTE * (MOST + 1)
"""Of a row: notes have about 80 ms each, and quiet follows them."""

_C5_HZ = 523.2511
_OVERTONES = (1.0, 0.5, 0.25)
_NOISE = 0.02
_TONE_KEY = 5
"""Sets tones apart from what else is drawn from one seed: orders, mixtures, masks and spans."""


@dataclasses.dataclass(frozen=True)
class Tones:
    """Row r is a sound of four to seven notes and their names, a function of the seed and r.

    Each note of an octave from 523 Hz is a sum of three sines of drawn phases and loudness, and
    decays; where one ends and the next begins is drawn too, within half a note. Noise lies over
    all. `frames` are `log_mel` of that, `[64, mels]`; `tokens` begin with `start`, `targets` are
    the notes and `end`, `[8]` each, and weights are 1 up to there.

    Attributes:
        mels: Numbers of a frame.
        start: Token that a text begins with; no note's.
        end: Token that it ends with; no note's.
        seed: Of the draw.
        part: Of rows that have nothing in common: 0 to train on, 1 held out.

    Cost: 10,240 samples of three sines, a millisecond or two.
    """

    _: dataclasses.KW_ONLY
    mels: int
    start: int
    end: int
    seed: int
    part: int = 0

    seq_len = MOST + 1
    """Tokens that are written of a row."""

    def __getitem__(self, row: int) -> Row:
        notes = self.notes(row)
        targets = np.full(self.seq_len, self.end, np.int32)
        targets[: len(notes)] = notes
        return {
            "frames": log_mel(self.samples(row), mels=self.mels),
            "tokens": np.insert(targets[:-1], 0, self.start).astype(np.int32),
            "targets": targets,
            "weights": (np.arange(self.seq_len) <= len(notes)).astype(np.float32),
        }

    def notes(self, row: int) -> np.ndarray:
        """Numbers of the notes of a row, in order."""
        count, *drawn = self._drawn(row, 0, MOST + 1)
        notes = np.array(drawn[: FEWEST + int(count * (MOST - FEWEST + 1))])
        return (notes * len(NOTES)).astype(np.int32)

    def samples(self, row: int) -> Float32[np.ndarray, " n"]:
        """The sound of a row, 16,000 samples a second."""
        notes = self.notes(row)
        each = FRAMES_PER_NOTE * HOP
        ends = each * (np.arange(len(notes) + 1) + 0.5 * self._drawn(row, 1, len(notes) + 1))
        loudness = 0.5 + 0.5 * self._drawn(row, 2, len(notes))
        phases = self._drawn(row, 3, len(notes) * len(_OVERTONES)).reshape(len(notes), -1)
        time = np.arange(FRAMES * HOP)
        sound = _NOISE * _normal(self._drawn(row, 4, 2 * len(time)))
        for at, note in enumerate(notes):
            here = slice(int(ends[at]), int(ends[at + 1]))
            hertz = _C5_HZ * 2 ** (note / len(NOTES))
            times = time[here] / RATE
            played = sum(
                share * np.sin(2 * np.pi * (hertz * (n + 1) * times + phases[at, n]))
                for n, share in enumerate(_OVERTONES)
            )
            decay = np.exp(-2 * np.arange(len(times)) / each)
            sound[here] += 0.3 * loudness[at] * decay * played
        return sound.astype(np.float32)

    def _drawn(self, row: int, which: int, count: int) -> np.ndarray:
        """Numbers from 0, below 1."""
        bits = keyed_uint64(self.seed, _TONE_KEY, self.part, row, which, count=count)
        return (bits >> np.uint64(11)) * 2.0**-53


def _normal(uniform: np.ndarray) -> np.ndarray:
    """Half as many normal numbers (Box and Muller 1958)."""
    first, second = np.split(uniform, 2)
    return np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
