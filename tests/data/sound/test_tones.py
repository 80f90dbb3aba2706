"""Notes and their names: what a row is, and what it depends on."""

import numpy as np
import pytest

from colossax.data import Tones, log_mel
from colossax.data.sound.tones import FEWEST, FRAMES, MOST, NOTES

START, END = 12, 13


def tones(**changes):
    return Tones(**{"mels": 40, "start": START, "end": END, "seed": 0, **changes})


def test_a_row_is_a_sound_and_the_names_in_it():
    made, counts = tones(), set()
    for number in range(40):
        row, notes = made[number], made.notes(number)
        counts.add(len(notes))
        count = len(notes)
        assert row["targets"].tolist() == [*notes, *[END] * (MOST + 1 - count)]
        assert row["tokens"].tolist() == [START, *row["targets"][:-1]]
        assert row["weights"].tolist() == [1.0] * (count + 1) + [0.0] * (MOST - count)
        assert row["frames"].shape == (FRAMES, 40)
        np.testing.assert_array_equal(row["frames"], log_mel(made.samples(number), mels=40))
        assert np.abs(made.samples(number)).max() < 1
    assert counts == set(range(FEWEST, MOST + 1))


@pytest.mark.catches("notes-out-of-tune")
def test_a_note_sounds_as_its_name_says():
    """The strongest frequency of each is that of c5 times a twelfth of an octave each."""
    made, heard = tones(), 0
    for number in range(10):
        samples = made.samples(number)
        for at, note in enumerate(made.notes(number)):
            middle = samples[1280 * at + 680 : 1280 * at + 1240]  # whatever its ends are
            power = np.abs(np.fft.rfft(middle * np.hanning(560), 16_000)) ** 2
            loudest = int(power[400:1050].argmax()) + 400
            wanted = 523.25 * 2 ** (note / len(NOTES))
            assert abs(loudest - wanted) < wanted * 0.025
            heard += 1
    assert heard > 40


def test_quiet_follows_the_last_note():
    made = tones()
    for number in range(5):
        samples, count = made.samples(number), len(made.notes(number))
        assert samples[1280 * count + 640 :].std() < 0.03 < 0.06 < samples[: 1280 * count].std()


@pytest.mark.catches("tones-held-out-are-trained-on")
def test_a_row_depends_on_seed_part_and_number_alone():
    def same(one, other):
        return all(np.array_equal(one[name], other[name]) for name in one)

    assert same(tones()[3], tones()[3])
    for other in (tones(seed=1), tones(part=1)):
        assert not same(tones()[3], other[3])
    assert not same(tones()[3], tones()[4])


def test_all_notes_are_played():
    played = np.concatenate([tones().notes(number) for number in range(100)])
    assert set(played.tolist()) == set(range(len(NOTES)))
