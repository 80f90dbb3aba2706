"""What a run leaves behind beside checkpoints: `metrics.jsonl`, and what trackers write."""

import contextlib
import dataclasses
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from colossax.documents import as_kind, member, parse_json
from colossax.errors import InputError
from colossax.files import write_whole
from colossax.run.experts import scalars
from colossax.run.run_dir import RunFolder
from colossax.run.trackers import DEFAULT_TRACKERS, About, open_trackers

Record = dict[str, Any]

_CHECKSUM = "crc32"
_CHECKSUM_BYTES = f'"{_CHECKSUM}"'.encode()
_BEGINS = re.compile(rb'\{"step": (\d{1,19}),')


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
    """Records of a `metrics.jsonl`; lines that are none are passed over."""
    return (record for record, _ in _lines(path) if record is not None)


def keep_until(
    path: Path,
    step: int,
    *,
    begun: int = 0,
    coming: Collection[int] = (),
    report: Callable[[str], None],
) -> None:
    """Drop the records after `step`, which a resumed run will write again.

    Lines that are no records, or whose checksum is not that of their numbers, are reported in one
    sentence, and the file that has them is kept beside, as `metrics.jsonl.damaged`. An end that a
    killed process left half written is dropped where it was of a step to come. Of records that
    stand there twice one is kept, and that is reported, as are steps after `begun` that have none
    and of which none is `coming`.

    Raises:
        InputError: The file cannot be read or written; what was there stays.
    """
    try:
        found = _found(path, step)
        if found.unread:
            aside = _beside(path)
            shutil.copyfile(path, aside)
            report(
                f"{path}: {found.unread} of {found.lines} lines cannot be read and were left out;"
                f" the file as it was is {aside}"
            )
        if found.again:
            report(f"{path}: {found.again} of {found.lines} lines stood there twice; one is kept")
        write_whole(path, "".join(found.kept))
        known = set(found.kept.values()) | set(coming)
        if gone := [number for number in range(begun + 1, step + 1) if number not in known]:
            report(
                f"{path}: lacks {len(gone)} of the {step - begun} steps that were done, the first"
                f" is step {gone[0]}"
            )
    except OSError as problem:
        raise InputError(
            f"{path}: cannot be written ({problem.strerror}); make room, or make it writable"
        ) from problem


@dataclasses.dataclass(kw_only=True)
class _Found:
    """What a file holds up to a step: lines to keep, each with its step, and how many others."""

    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    lines: int = 0
    unread: int = 0
    again: int = 0


def _found(path: Path, step: int) -> _Found:
    found = _Found()
    for record, line in _lines(path):
        found.lines += 1
        if record is None:
            found.unread += not _is_half_written(line, step)
        elif record["step"] <= step:
            text = _line(record)
            found.again += text in found.kept
            found.kept[text] = record["step"]
    return found


def _is_half_written(line: bytes, step: int) -> bool:
    """Whether it has no end, and what there is of it says that its step is after this one."""
    begins = _BEGINS.match(line)
    return not line.endswith(b"\n") and begins is not None and int(begins[1]) > step


def _lines(path: Path) -> Iterator[tuple[Record | None, bytes]]:
    """Each line, and its record, None where it is none."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        # Older files have no checksums; what has no checksum among those that have is damaged.
        sealed = any(_CHECKSUM_BYTES in line for line in lines)
        lines.seek(0)
        for line in lines:
            yield _record(line, sealed=sealed), line


def _line(record: Record) -> str:
    """A record as it is written, its checksum at the end."""
    return f'{json.dumps(record)[:-1]}, "{_CHECKSUM}": {_checksum(record)}}}\n'


def _checksum(record: Record) -> int:
    return zlib.crc32(json.dumps(record).encode())


def _record(line: bytes, *, sealed: bool) -> Record | None:
    """A step's numbers, or lists of them, by name; None where the line is something else."""
    try:
        record = parse_json(line)
        member(record, "step", int)
        for value in record.values():
            _check_value(value)
    except ValueError:
        return None
    if sealed and record.pop(_CHECKSUM, None) != _checksum(record):
        return None
    return record


def _check_value(value: Any) -> None:
    """Numbers, none, or lists of them.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, list):
        for each in value:
            _check_value(each)
    else:
        as_kind(value, (int, float, bool, type(None)), "it")


def _beside(path: Path) -> Path:
    """A name that is free."""
    place, count = path.with_name(f"{path.name}.damaged"), 1
    while place.exists():
        count += 1
        place = path.with_name(f"{path.name}.damaged-{count}")
    return place


class Records:
    """Appends to `metrics.jsonl` and hands numbers to trackers.

    When the disk is full this is reported once, and the run goes on without records; so it does
    without a tracker that fails.
    """

    def __init__(
        self,
        about: About,
        *,
        report: Callable[[str], None],
        trackers: Sequence[str] = DEFAULT_TRACKERS,
        opened: Callable[[], None] = lambda: None,
        coming: Collection[int] = (),
    ):
        """Open the trackers, then the file; records after `about.from_step` are dropped.

        Args:
            about: The run.
            report: Told in one sentence of what is no longer written.
            trackers: By name.
            opened: Called between: nothing has been written then but by trackers.
            coming: Steps up to `about.from_step` that will be recorded.

        Raises:
            InputError: A tracker cannot be opened, or the file cannot be written.
        """
        self._report = report
        self._broken = False
        path = RunFolder(path=about.folder).metrics
        self._trackers = open_trackers(trackers, about)
        try:
            opened()
            keep_until(path, about.from_step, begun=about.begun, coming=coming, report=report)
            self._lines = path.open("a", encoding="utf-8")
        except BaseException:
            for tracker in self._trackers.values():
                tracker.close()
            raise

    def write(self, record: Record) -> None:
        """Add one record; trackers get all its numbers but `step`."""
        if self._broken:
            return
        clean = finite(record)
        try:
            self._lines.write(_line(clean))
            self._lines.flush()
        except OSError as problem:
            self._broken = True
            self._report(f"metrics are no longer written ({problem.strerror}); training goes on")
            return
        numbers = scalars({name: value for name, value in clean.items() if name != "step"})
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.write(record["step"], numbers)
            except Exception as problem:  # noqa: BLE001 (any that another program raises)
                del self._trackers[name]
                with contextlib.suppress(Exception):
                    tracker.close()
                self._report(f"{name} gets no more metrics ({problem}); training goes on")

    def close(self) -> None:
        """Flush and close all."""
        try:
            self._lines.close()
        except OSError as problem:
            if not self._broken:
                self._report(f"the last metrics were not written ({problem.strerror})")
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as problem:  # noqa: BLE001 (any that another program raises)
                self._report(f"{name} was not closed ({problem})")
