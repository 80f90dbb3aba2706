"""What the programs of stages need, do and send, of GPUs that are not there."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from colossax.aot import MemoryReport, Program, Target
from colossax.offload import DEVICE_SHARE
from colossax.pipeline import Costs, Kind, Report, Table
from colossax.planner.counting.islands import Crossings
from colossax.planner.counting.traced_flops import TracedFlops
from colossax.planner.counting.traffic import Link

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageFacts:
    """What a stage needs and does; bytes are of each of its devices, and of a step.

    Attributes:
        number: Its.
        target: GPUs that its programs were compiled for.
        layers: Of each chunk, the first and the last.
        argument_bytes: Its part of the state, and the batch.
        memory: When most of it is in use: what the stage holds by then, and the program that runs.
        most: The most that it ever holds, by what it holds; not all at once.
        temporaries: Of its programs.
        flops: Of all its devices; recomputation counted.
        busiest: The program that runs when most of its memory is in use.
        links: Collectives of its programs.
        microbatch_s: Of a forward pass, an input gradient and a weight gradient.
        rest_s: Of what it does once a step.
    """

    number: int
    target: Target
    layers: tuple[tuple[int, int], ...]
    argument_bytes: int
    memory: MemoryReport
    most: Mapping[str, int]
    temporaries: Mapping[str, int]
    flops: int
    busiest: str
    links: tuple[Link, ...]
    microbatch_s: Mapping[Kind, float]
    rest_s: float

    @property
    def fits(self) -> bool:
        """Whether it needs no more than its devices have, but for `DEVICE_SHARE`."""
        return self.memory.total_bytes <= self.target.gpu.memory_bytes * DEVICE_SHARE

    @property
    def name(self) -> str:
        """With its layers, for people."""
        spans = " and ".join(f"{a} to {b}" if a < b else str(a) for a, b in self.layers)
        return f"stage {self.number} (layers {spans})"

    @property
    def ring_bytes(self) -> int:
        """Sent in rings."""
        return sum(link.totals.ring_bytes for link in self.links)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "layers": [list(each) for each in self.layers],
            "target": self.target.gpu.key,
            "fits": self.fits,
            "device_bytes": self.memory.total_bytes,
            "argument": self.argument_bytes,
            "terms": dict(self.memory.terms),
            "most": dict(self.most),
            "at": self.busiest,
            "temporaries": dict(self.temporaries),
            "flops": self.flops,
            "ring_bytes": self.ring_bytes,
            "collective_s": sum(link.seconds for link in self.links),
            "exposed_s": sum(link.exposed_s for link in self.links),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """What a stage sends to another in a step, in no collective.

    Attributes:
        origin: Stage that sends.
        end: Stage that gets it.
        bytes: Of each device.
        messages: Arrays.
        link: Kind of connection.
        seconds: At its rate.
        passed_s: Of those, of what chunks leave for one another; the rest is sent once.
    """

    origin: int
    end: int
    bytes: int
    messages: int
    link: str
    seconds: float
    passed_s: float

    @property
    def once_s(self) -> float:
        """Seconds of what is sent once a step."""
        return max(0.0, self.seconds - self.passed_s)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        fields = dataclasses.asdict(self)
        return {"from": fields.pop("origin"), "to": fields.pop("end"), **fields}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramsCost:
    """A pipeline of a program per stage; see `StageCost` for that of one program.

    Attributes:
        schedule: Its name, or the path of a table of one's own.
        table: What each stage does in each tick.
        costs: What operations take on each stage; FLOPs in place of seconds where the GPUs' peak is
            not known.
        report: What the schedule takes by them, each stage waiting for its inputs alone.
        stages: All of them.
        edges: What goes from stage to stage.
        step_s: Predicted seconds of a step: the schedule, then the longest of what stages do once
            and of what they send once; None where the GPUs' peak is not known.
        programs: As compiled, those that stages share once.
        flops: Of all stages, as traced.
        crossings: Which mesh axis crosses what; None where all devices are of one island.
        assumed_loops: Loops over passes of experts, each of which is taken to be one.
    """

    schedule: str
    table: Table
    costs: Costs
    report: Report
    stages: tuple[StageFacts, ...]
    edges: tuple[Edge, ...]
    step_s: float | None
    programs: tuple[Program, ...]
    flops: TracedFlops
    crossings: Crossings | None = None
    assumed_loops: int = 0
    form: ClassVar[str] = "free"

    @property
    def fullest(self) -> StageFacts:
        """The stage with least room left on its devices."""
        return max(
            self.stages, key=lambda one: one.memory.total_bytes / one.target.gpu.memory_bytes
        )

    @property
    def fits(self) -> bool:
        """Whether each stage fits its devices."""
        return all(stage.fits for stage in self.stages)

    @property
    def program(self) -> Program:
        """All of them as one: their texts, and together the seconds that compiling took."""
        return Program(
            hlo="\n".join(one.hlo for one in self.programs),
            assignment="",
            live_ranges="",
            stats=None,
            messages="".join(one.messages for one in self.programs),
            compile_s=sum(one.compile_s for one in self.programs),
        )

    @property
    def line(self) -> str:
        """In one sentence."""
        table, report = self.table, self.report
        spans = [[last - first + 1 for first, last in one.layers] for one in self.stages]
        layers = ", ".join(" + ".join(map(str, each)) for each in spans)
        late = max(report.pending)
        return (
            f"pipeline: {self.schedule}, {table.stages} stages of {layers} layers with a program"
            f" each, {table.microbatches} microbatches; stages wait {100 * report.bubble:.0f} % of"
            f" their time; at most {max(report.saved)} inputs of chunks are kept for backward"
            + (f", {late} wait for their weights' gradients" if late else "")
            + ("" if self.step_s is None else f"; {self.step_s:.4g} s a step, predicted")
        )

    @property
    def refusals(self) -> list[str]:
        """Of each stage that does not fit."""
        return [
            f"{one.name} needs {one.memory.total_bytes / _GIB:.2f} GiB of each device, and"
            f" {one.target.gpu.name} has {one.target.gpu.memory_bytes / _GIB:.1f} GiB: DOES NOT FIT"
            for one in self.stages
            if not one.fits
        ]

    def to_json(self, device_bytes: int) -> dict[str, Any]:
        """As plain JSON types.

        Args:
            device_bytes: Not read; each stage has its own.
        """
        executed = {kind.value: count for kind, count in self.report.executed.items() if count}
        return {
            "pipeline": {
                "schedule": self.schedule,
                "form": self.form,
                "microbatches": self.table.microbatches,
                "chunks": self.table.chunks,
                "bubble": self.report.bubble,
                "step_s": self.step_s,
                "executed": executed,
                "saved": max(self.report.saved),
                "pending": max(self.report.pending),
                "flops": self.flops.flops,
                "sent": [edge.to_json() for edge in self.edges],
            },
            "stages": [one.to_json() for one in self.stages],
            **({"crossings": self.crossings.to_json()} if self.crossings else {}),
        }
