"""What a killed process left undone of the step whose state the disk tier's file holds.

The file is committed within a step. The step's numbers are recorded while the next one runs, and
its state is evaluated after it: of the last two steps `metrics.jsonl` may lack the records, and of
the last one the evaluation. A checkpoint is written after all of them.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

from colossax.run.meter import overflowed, was_skipped
from colossax.run.records import Record, read_records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfinished:
    """What is known, and recorded, of a step that a run goes on from.

    Attributes:
        metrics: Of steps that are in no record, by number, in their order.
        last: The record of the last step that has one.
        evaluated: What is recorded of its evaluation; empty where nothing is.
        skipped_in_a_row: Steps that were skipped up to it.
        overflows_in_a_row: Of these, those of which a lower scale of the loss is the cure; the file
            does not know the scale of steps that are in no record, which are none of them.
    """

    metrics: Mapping[int, Mapping[str, float]]
    last: Record | None = None
    evaluated: Mapping[str, float] = dataclasses.field(default_factory=dict)
    skipped_in_a_row: int = 0
    overflows_in_a_row: int = 0


def unfinished(
    path: Path, metrics: Mapping[int, Mapping[str, float]], done: int, least_scale: float = 0.0
) -> Unfinished:
    """What was left undone of a step.

    Args:
        path: Of `metrics.jsonl`; one that cannot be read is told of when it is opened for writing.
        metrics: That the file holds, by step.
        done: The step.
        least_scale: See `Meter`.
    """
    rows: list[Record] = []
    with contextlib.suppress(OSError):
        rows = [row for row in read_records(path) if row["step"] <= done]
    recorded = {row["step"]: row for row in rows if "loss" in row}
    evaluations = [row for row in rows if "loss" not in row and row["step"] == done]
    lacking = {step: numbers for step, numbers in metrics.items() if step not in recorded}
    newest_first = sorted({**recorded, **lacking}.items(), reverse=True)
    skipped = list(itertools.takewhile(lambda item: was_skipped(item[1]), newest_first))
    return Unfinished(
        metrics=lacking,
        last=recorded[max(recorded)] if recorded else None,
        evaluated={
            name: value for row in evaluations for name, value in row.items() if name != "step"
        },
        skipped_in_a_row=len(skipped),
        overflows_in_a_row=sum(overflowed(row, least_scale) for _, row in skipped),
    )
