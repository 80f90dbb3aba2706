"""Metrics in programs of others: by name, never imported otherwise, read back where installed."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from colossax.errors import InputError
from colossax.run.records import Records, read_records
from colossax.run.trackers import About, check_trackers
from tests.launching import ROOT
from tests.run.test_fit import fitted

ROWS = [
    {"step": 1, "loss": 2.0, "learning_rate": 0.5},
    {"step": 2, "loss": float("nan"), "learning_rate": 0.25},
    {"step": 2, "validation_loss": 1.5},
    {"step": 3, "loss": 1.0, "learning_rate": 0.125},
]
NUMBERS = {"loss": [2.0, 1.0], "learning_rate": [0.5, 0.25, 0.125], "validation_loss": [1.5]}

WRITE = """
import sys, json
from pathlib import Path
from colossax.run.records import Records
from colossax.run.trackers import About
name, folder, rows = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
for start, part in ((0, rows[:3]), (2, rows[3:])):  # the second is a resumption
    about = About(folder=folder, name="toy", config={"plan": {"mesh": {}}}, from_step=start)
    records = Records(about, report=print, trackers=(name,))
    for row in part:
        records.write(row)
    records.close()
"""


def written(name, folder, **environment):
    """What a process prints that writes `ROWS` by a tracker, and of its numbers what `read` has."""
    folder.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-c", WRITE, name, str(folder), json.dumps(ROWS)],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert len(list(read_records(folder / "metrics.jsonl"))) == len(ROWS)


def by_name(rows):
    numbers = {}
    for row in rows:
        for name in NUMBERS.keys() & row.keys():
            numbers.setdefault(name, []).append(row[name])
    return numbers


READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
for file in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    data = file.read_bytes()
    assert data[:4] == b":W&B" and len(data) < 2**15, "one block of LevelDB's log format"
    at = 7
    while at + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a whole record"
        record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        items = record.history.item
        if items:
            names = ["/".join(item.nested_key) or item.key for item in items]
            print(json.dumps(dict(zip(names, (json.loads(item.value_json) for item in items)))))
"""

READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
for row in SQLiteStorage.get_logs("toy", "run"):
    print(json.dumps({name: value for name, value in row.items() if name != "timestamp"}))
"""


def read(script, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_weights_and_biases_has_the_numbers_without_a_network(tmp_path):
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    written("wandb", folder)
    rows = read(READ_WANDB, folder)
    assert by_name(rows) == NUMBERS
    assert {row["_step"] for row in rows} == {1, 2, 3}


def test_trackio_has_the_numbers_in_its_folder(tmp_path):
    pytest.importorskip("trackio")
    place = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    written("trackio", tmp_path / "run", **place)
    rows = read(READ_TRACKIO, **place)
    assert by_name(rows) == NUMBERS
    assert [row["step"] for row in rows] == [1, 2, 2, 3]


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A package called wandb that cannot be imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text("raise RuntimeError('it was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def about(folder, from_step=0):
    return About(folder=folder, name="toy", config={}, from_step=from_step)


WANDB = """
ids = []
Settings = dict
class Run:
    def finish(self): pass
def init(*, id, **options):
    ids.append(id)
    return Run()
"""


@pytest.mark.catches("wandb-run-by-its-place")
def test_a_folder_that_was_moved_is_the_same_run_of_weights_and_biases(tmp_path, stub):
    (tmp_path / "site" / "wandb.py").write_text(WANDB)
    folder, moved = tmp_path / "run", tmp_path / "moved"
    for place, steps in ((folder, 0), (folder, 2), (moved, 4), (tmp_path / "other", 0)):
        if place == moved:
            folder.rename(moved)
        place.mkdir(exist_ok=True)
        told = []
        Records(about(place, from_step=steps), report=told.append, trackers=("wandb",)).close()
        assert len(told) == bool(steps)
    first, resumed, after, other = sys.modules.pop("wandb").ids
    assert first == resumed == after != other


@pytest.mark.catches("tracker-unasked")
def test_a_tracker_is_imported_where_it_is_asked_for_and_nowhere_else(stub, tmp_path):
    for names in (("json",), ("tensorboard",)):
        check_trackers((*names, "wandb"))
        Records(about(tmp_path), report=pytest.fail, trackers=names).close()
    assert (tmp_path / "tensorboard").is_dir()
    with pytest.raises(InputError, match=r"trackers: wandb does not begin \(it was imported\)"):
        Records(about(tmp_path), report=pytest.fail, trackers=("wandb",))


@pytest.mark.catches("refused-tracker-leaves-a-run")
def test_a_run_whose_tracker_does_not_begin_has_not_begun(stub, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match="trackers: wandb does not begin"):
        fitted(out, steps=1, trackers=("tensorboard", "wandb"))
    fitted(out, steps=2)
    before = (out / "metrics.jsonl").read_bytes()
    torn = before + b'{"step": 3, "lo'
    (out / "metrics.jsonl").write_bytes(torn)
    with pytest.raises(InputError, match="trackers: wandb does not begin"):
        fitted(out, steps=3, trackers=("wandb",), resume=True)
    assert (out / "metrics.jsonl").read_bytes() == torn
    fitted(out, steps=3, resume=True)
    assert (out / "metrics.jsonl").read_bytes().startswith(before)


def test_json_alone_leaves_metrics_alone(tmp_path):
    records = Records(about(tmp_path), report=pytest.fail, trackers=("json",))
    records.write(ROWS[0])
    records.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_is_unknown_or_not_installed_is_refused_before_a_run(monkeypatch):
    with pytest.raises(InputError, match="trackers: unknown 'wandbb'; did you mean 'wandb'"):
        check_trackers(("tensorboard", "wandbb"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="trackio needs the package 'trackio', which is not inst"):
        check_trackers(("trackio",))


@pytest.mark.catches("failing-tracker-ends-the-run")
def test_a_tracker_that_fails_is_reported_once_and_left_alone(tmp_path):
    told = []
    records = Records(about(tmp_path), report=told.append)

    def fail(step, scalars):
        raise RuntimeError("no room")

    records._trackers["tensorboard"].write = fail
    with contextlib.closing(records):
        for row in ROWS:
            records.write(row)
    assert told == ["tensorboard gets no more metrics (no room); training goes on"]
    assert len(list(read_records(tmp_path / "metrics.jsonl"))) == len(ROWS)
