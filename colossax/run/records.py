"""What a run leaves behind beside checkpoints: `metrics.jsonl`, and what trackers write."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
    ):
        """Open the trackers, then the file; records after `about.from_step` are dropped.

        Args:
            about: The run.
            report: Told in one sentence of what is no longer written.
            trackers: By name.
            opened: Called between: nothing has been written then but by trackers.

        Raises:
            InputError: A tracker cannot be opened.
        """
        self._report = report
        self._broken = False
        path = RunFolder(path=about.folder).metrics
        self._trackers = open_trackers(trackers, about)
        opened()
        keep_until(path, about.from_step)
        self._lines = path.open("a", encoding="utf-8")

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
