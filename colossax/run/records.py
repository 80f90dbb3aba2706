"""What a run leaves behind beside checkpoints: `metrics.jsonl` and TensorBoard events."""

import importlib
import json
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from colossax.files import write_whole

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"

Record = dict[str, Any]


def finite(record: Record) -> Record:
    """The record with None for numbers JSON cannot write."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def spelt(name: str) -> str:
    """The name of a metric, for people."""
    return name.replace("_", " ")


def read_records(path: Path) -> Iterator[Record]:
    """Records of a `metrics.jsonl`; a line that a killed process left half written ends them."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def keep_until(path: Path, step: int) -> None:
    """Drop the records after `step`, which a resumed run will write again."""
    kept = [record for record in read_records(path) if record["step"] <= step]
    write_whole(path, "".join(f"{json.dumps(record)}\n" for record in kept))


class Records:
    """Appends to `metrics.jsonl` and to TensorBoard events.

    When the disk is full this is reported once, and the run goes on without records.
    """

    def __init__(self, folder: Path, *, from_step: int, report: Callable[[str], None]):
        self._report = report
        self._broken = False
        path = folder / METRICS_FILE
        keep_until(path, from_step)
        self._lines = path.open("a", encoding="utf-8")
        self._events = EventFile(folder / EVENTS_FOLDER, from_step=from_step)

    def write(self, record: Record) -> None:
        """Add one record; numbers other than `step` become TensorBoard scalars."""
        if self._broken:
            return
        clean = finite(record)
        try:
            self._lines.write(f"{json.dumps(clean)}\n")
            self._lines.flush()
            self._events.write(record["step"], {k: v for k, v in clean.items() if k != "step"})
        except OSError as problem:
            self._broken = True
            self._report(f"metrics are no longer written ({problem.strerror}); training goes on")

    def close(self) -> None:
        """Flush and close both files."""
        for file in (self._lines, self._events):
            try:
                file.close()
            except OSError as problem:
                if not self._broken:
                    self._report(f"the last metrics were not written ({problem.strerror})")


class EventFile:
    """A TensorBoard event file, written from the caller's thread.

    tensorboardX's own writers either hand events to a thread, whose death on a full disk would
    leave the run waiting on its queue, or wait for the disk at every flush, milliseconds a step.
    """

    def __init__(self, folder: Path, *, from_step: int):
        # The messages of these modules are made at run time, where no type checker sees them.
        events: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        Event, SessionLog = events.Event, events.SessionLog
        Summary: Any = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary, self._checksum = Event, Summary, masked_crc32c
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = (folder / name).open("wb")
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if from_step:
            # TensorBoard drops what an earlier file says about later steps.
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=from_step + 1, session_log=start))

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        """One event with all scalars that have a value."""
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
            if value is not None
        ]
        self._add(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        """Length, its checksum, the event, its checksum: the framing of TFRecord files."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        parts = (length, self._crc(length), data, self._crc(data))
        self._file.write(b"".join(parts))
        self._file.flush()

    def _crc(self, data: bytes) -> bytes:
        return struct.pack("<I", self._checksum(data))
