"""What a plan's pipeline does in vain, and which layers its stages have."""

import dataclasses
from typing import Any, ClassVar

import jax

from colossax.config import MeshAxis
from colossax.pipeline import Kind, Report, Table, simulate
from colossax.step.stages import table_of
from colossax.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCost:
    """A schedule as the program runs it, on every stage alike.

    Attributes:
        schedule: Its name, or the path of a table of one's own.
        table: What each stage does in each tick.
        report: What that takes, backward being twice as long as forward.
        layers: Of each stage and chunk, the first and the last layer.
    """

    schedule: str
    table: Table
    report: Report
    layers: tuple[tuple[tuple[int, int], ...], ...]
    form: ClassVar[str] = "lockstep"
    costs: ClassVar[None] = None

    @property
    def line(self) -> str:
        """In one sentence."""
        table, ran = self.table, self.report.executed[Kind.FORWARD]
        first, last = self.layers[0][0]
        slots, pending = self.report.slots, max(self.report.pending)
        what = "microbatches" if table.chunks == 1 else "inputs of chunks"
        late = f", {pending} wait for their weights' gradients" if pending else ""
        per = f"{last - first + 1} layers" + (f" x {table.chunks}" if table.chunks > 1 else "")
        return (
            f"pipeline: {self.schedule}, {table.stages} stages of {per}, {table.microbatches}"
            f" microbatches; each device runs {ran} forward passes for"
            f" {table.microbatches * table.chunks}, {100 * self.report.bubble:.0f} % of its time in"
            f" vain; room for {slots} {what} that wait for backward{late}"
        )

    def to_json(self, device_bytes: int) -> dict[str, Any]:
        """As plain JSON types.

        Args:
            device_bytes: Of each stage's devices.
        """
        executed = {kind.value: count for kind, count in self.report.executed.items() if count}
        return {
            "pipeline": {
                "schedule": self.schedule,
                "microbatches": self.table.microbatches,
                "chunks": self.table.chunks,
                "bubble": self.report.bubble,
                "executed": executed,
                "saved": max(self.report.saved),
                "slots": self.report.slots,
                "pending": max(self.report.pending),
            },
            "stages": [
                {"layers": [list(each) for each in chunks], "device_bytes": device_bytes}
                for chunks in self.layers
            ],
        }


def stage_cost(step: Step, microbatches: int) -> StageCost | None:
    """Of a step; None where it has one stage.

    Args:
        step: Its plan and model.
        microbatches: Of a global batch.
    """
    bound = step.bound
    if bound.mesh.shape[MeshAxis.STAGE] == 1:
        return None
    table = table_of(bound, microbatches)
    return StageCost(
        schedule=bound.plan.pipeline.resolved,
        table=table,
        report=simulate(table),
        layers=_layers(step, table),
    )


def _layers(step: Step, table: Table) -> tuple[tuple[tuple[int, int], ...], ...]:
    totals = {info.total_layers for info in jax.tree.leaves(step.spec.infos) if info.total_layers}
    each = max(totals) // len(table.layout)
    found: list[list[tuple[int, int]]] = [[] for _ in range(table.stages)]
    for position, (stage, _) in enumerate(table.layout):
        found[stage].append((position * each, (position + 1) * each - 1))
    return tuple(map(tuple, found))
