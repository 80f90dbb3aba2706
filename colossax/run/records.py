"""What a run leaves behind beside checkpoints: `metrics.jsonl`, and what trackers write."""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from colossax.documents import as_kind, member, parse_json
from colossax.errors import InputError
from colossax.files import write_whole
from colossax.run.run_dir import RunFolder
from colossax.run.trackers import DEFAULT_TRACKERS, About, open_trackers

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

    Lines that are no records are reported in one sentence, and the file that has them is kept
    beside, as `metrics.jsonl.damaged`. An end that a killed process left half written is dropped.
    Steps after `begun` of which there is no record, and none is `coming`, are reported as well.

    Raises:
        InputError: The file cannot be read or written; what was there stays.
    """
    try:
        found = list(_lines(path))
        unread = sum(record is None and whole for record, whole in found)
        if unread:
            aside = _beside(path)
            shutil.copyfile(path, aside)
            report(
                f"{path}: {unread} of {len(found)} lines cannot be read and were left out; the file"
                f" as it was is {aside}"
            )
        kept = [record for record, _ in found if record is not None and record["step"] <= step]
        write_whole(path, "".join(f"{json.dumps(record)}\n" for record in kept))
        known = {record["step"] for record in kept} | set(coming)
        if gone := [number for number in range(begun + 1, step + 1) if number not in known]:
            report(
                f"{path}: lacks {len(gone)} of the {step - begun} steps that were done, the first"
                f" is step {gone[0]}"
            )
    except OSError as problem:
        raise InputError(
            f"{path}: cannot be written ({problem.strerror}); make room, or make it writable"
        ) from problem


def _lines(path: Path) -> Iterator[tuple[Record | None, bool]]:
    """Each line's record, None where it is none, and whether the line has an end."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            yield _record(line), line.endswith(b"\n")


def _record(line: bytes) -> Record | None:
    """A step's numbers by name; None where the line is something else."""
    try:
        record = parse_json(line)
        member(record, "step", int)
        for value in record.values():
            as_kind(value, (int, float, bool, type(None)), "it")
    except ValueError:
        return None
    return record


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
            self._lines.write(f"{json.dumps(clean)}\n")
            self._lines.flush()
        except OSError as problem:
            self._broken = True
            self._report(f"metrics are no longer written ({problem.strerror}); training goes on")
            return
        numbers = {name: value for name, value in clean.items() if name != "step"}
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
