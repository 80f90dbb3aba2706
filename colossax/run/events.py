"""TensorBoard events."""

import importlib
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
        folder.mkdir(exist_ok=True, parents=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = (folder / name).open("wb")
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if from_step:
            # TensorBoard drops what an earlier file says about later steps.
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=from_step + 1, session_log=start))

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
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
