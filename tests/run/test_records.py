"""What cannot be read of `metrics.jsonl` costs no other line, and is kept."""

import contextlib
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


def written(folder, rows):
    """A file of these rows, as a run writes it."""
    records = Records(about(folder), report=pytest.fail, trackers=("json",))
    with contextlib.closing(records):
        for row in rows:
            records.write(row)
    return folder / "metrics.jsonl"


ROWS = [
    {"step": 1, "loss": 1.25, "tokens": 8},
    {"step": 2, "loss": None, "tokens": 8},
    {"step": 2, "validation_loss": 0.515625},
    {"step": 3, "loss": 1 / 3, "tokens": 8},
]


@pytest.mark.catches("records-without-checksum")
@pytest.mark.catches("records-checksum-optional")
def test_every_flipped_bit_costs_two_records_at_most_and_alters_none(tmp_path):
    """Two where it is a line's end; and what a resumed run leaves out it tells."""
    path = written(tmp_path, ROWS)
    whole = path.read_bytes()
    assert list(read_records(path)) == ROWS
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        found = list(read_records(path))
        assert found in [ROWS[:n] + ROWS[n + 1 :] for n in range(4)] or (
            whole[place] == 10 and found in [ROWS[:n] + ROWS[n + 2 :] for n in range(3)]
        )
        told = []
        keep_until(path, 3, report=told.append)
        assert list(read_records(path)) == found
        assert "lines cannot be read and were left out" in told[0]


@pytest.mark.catches("records-twice")
def test_of_lines_that_stand_there_twice_one_is_kept(tmp_path):
    path, told = written(tmp_path, ROWS), []
    whole = path.read_bytes()
    path.write_bytes(whole * 2)
    keep_until(path, 2, report=told.append)
    assert told == [f"{path}: 3 of 8 lines stood there twice; one is kept"]
    assert list(read_records(path)) == ROWS[:3] and whole.startswith(path.read_bytes())


@pytest.mark.catches("records-cut-unsaid")
def test_an_end_that_is_cut_off_is_told_unless_it_is_of_a_step_to_come(tmp_path):
    path = written(tmp_path, ROWS)
    whole = path.read_bytes()
    for length in range(whole.index(b"0.515625"), whole.index(b"\n", whole.index(b"0.515625"))):
        path.write_bytes(whole[:length])
        told = []
        keep_until(path, 2, report=told.append)
        assert told and "1 of 3 lines cannot be read" in told[0], whole[:length]
        path.write_bytes(whole[:length])
        keep_until(path, 1, report=pytest.fail)


def test_a_file_without_checksums_gets_them_when_a_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    assert list(read_records(path)) == ROWS
    keep_until(path, 3, report=pytest.fail)
    before = path.read_bytes()
    assert list(read_records(path)) == ROWS and before.count(b'"crc32"') == len(ROWS)
    keep_until(path, 3, report=pytest.fail)
    assert path.read_bytes() == before


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
