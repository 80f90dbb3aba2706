"""What cannot be read of `metrics.jsonl` costs no other line, and is kept."""

import json
import os
from pathlib import Path

import pytest

from colossax.errors import InputError
from colossax.run.records import Records, keep_until, read_records
from colossax.run.trackers import About

BAD = [
    b"{",
    b"\xff\xfe",
    b'{"step": 2, "loss": 1.0\x00}',
    b"[1]",
    b'{"loss": 1.0}',
    b'{"step": "2", "loss": 1.0}',
    b'{"step": 2, "loss": "1.0"}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b"[" * 9**5,
    b"",
]


def line(step):
    return json.dumps({"step": step, "loss": 1.0 / step}).encode()


def steps(path):
    return [record["step"] for record in read_records(path)]


@pytest.mark.catches("records-end-at-damage")
@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_one_bad_line_costs_one_record_and_is_kept_aside(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    content = b"\n".join([line(1), bad, line(3), line(4), b""])
    path.write_bytes(content)
    assert steps(path) == [1, 3, 4]
    told = []
    keep_until(path, 3, report=told.append)
    assert steps(path) == [1, 3]
    aside = tmp_path / "metrics.jsonl.damaged"
    assert told == [
        f"{path}: 1 of 4 lines cannot be read and were left out; the file as it was is {aside}",
        f"{path}: lacks 1 of the 3 steps that were done, the first is step 2",
    ]
    assert aside.read_bytes() == content


@pytest.mark.catches("records-damage-overwritten")
def test_what_was_kept_aside_before_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text in (b"{\n", b"}\n"):
        path.write_bytes(text)
        keep_until(path, 1, report=lambda told: None)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "metrics.jsonl": b"",
        "metrics.jsonl.damaged": b"{\n",
        "metrics.jsonl.damaged-2": b"}\n",
    }


def test_every_flipped_bit_costs_one_record_at_most(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b"".join(line(step) + b"\n" for step in (1, 2, 3, 4))
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        # A line's end is that of two lines.
        assert len(steps(path)) >= (2 if whole[place] == 10 else 3)


@pytest.mark.catches("records-gone-unsaid")
def test_records_that_are_gone_are_counted(tmp_path):
    path, told = tmp_path / "metrics.jsonl", []
    keep_until(path, 0, report=pytest.fail)
    keep_until(path, 7, begun=7, report=pytest.fail)
    path.unlink()
    os.mkfifo(path)
    keep_until(path, 7, begun=5, report=told.append)
    assert told == [f"{path}: lacks 2 of the 2 steps that were done, the first is step 6"]
    assert path.is_file()


def test_an_end_that_is_half_written_is_no_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + b'\n{"step": 2, "lo')
    keep_until(path, 1, report=pytest.fail)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"] and steps(path) == [1]


def about(folder: Path):
    return About(folder=folder, name="toy", config={}, from_step=0)


@pytest.mark.parametrize("place", ["metrics.jsonl", "tensorboard"])
def test_a_file_that_cannot_be_made_is_refused_in_one_sentence(tmp_path, place):
    if place == "tensorboard":
        (tmp_path / place).write_text("in the way")
        told = "trackers: tensorboard does not begin .*; mend that, or leave it out"
    else:
        (tmp_path / place).mkdir()
        told = r"metrics.jsonl: cannot be written \(Is a directory\); make room, or"
    with pytest.raises(InputError, match=told):
        Records(about(tmp_path), report=pytest.fail)
