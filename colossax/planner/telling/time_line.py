"""When a plan's step does what, by formula."""

import dataclasses
import itertools

from colossax.config import MeshAxis
from colossax.pipeline import Costs, Kind, schedule
from colossax.pipeline.timeline import free_spans, lockstep_spans
from colossax.planner.searching.island_layouts import IslandPrediction
from colossax.planner.searching.planned import Planned
from colossax.planner.searching.seconds import Seconds

COMPUTE, EXPOSED, WAITED = "compute", "sticks out of compute", "waited for"
BESIDE, UPDATES, HOST = "beside compute", "updates and sums", "host memory waited for"
FILE = "updates in a file"
FORWARD, BACKWARD = "forward", "backward"

_LAST = UPDATES, HOST, FILE
"""Of a step, behind its microbatches."""

_KINDS = {Kind.FORWARD: FORWARD}
_FORWARD_SHARE = 1 / 3
"""Of a microbatch's seconds on a stage, those of its forward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """What is done for a while, in seconds."""

    row: int
    start: float
    seconds: float
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeLine:
    """A step, one row below the other.

    Attributes:
        rows: Their names.
        bars: In them; none overlap within a row.
        kinds: Of bars, in the order of the legend.
        note: What one should know of them.
    """

    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    kinds: tuple[str, ...]
    note: str

    @property
    def end(self) -> float:
        """Seconds of the step."""
        return max(bar.start + bar.seconds for bar in self.bars)


def time_line(one: Planned) -> TimeLine:
    """Of a step: microbatches with their collectives, or slots of stages with their bubble.

    What collectives take is spread evenly over microbatches, and drawn behind the compute of each;
    that of stages is in their slots.
    """
    staged = one.plan.mesh.get(MeshAxis.STAGE, 1) > 1
    return _of_stages(one) if staged else _of_microbatches(one)


def _of_microbatches(one: Planned) -> TimeLine:
    seconds, count = one.seconds, one.candidate.predicted.microbatches
    parts = {
        COMPUTE: seconds.compute + seconds.slowed,
        EXPOSED: seconds.exposed,
        WAITED: seconds.waited,
    }
    bars, at = [], 0.0
    for _ in range(count):
        hidden = (seconds.beside - seconds.exposed) / count
        bars.append(Bar(row=1, start=at, seconds=hidden, kind=BESIDE))
        for kind, total in parts.items():
            bars.append(Bar(row=0, start=at, seconds=total / count, kind=kind))
            at += total / count
    bars += _ends(seconds, 0, at)
    bars = [bar for bar in bars if bar.seconds > 0]
    there = {bar.kind for bar in bars}
    return TimeLine(
        rows=("device", "links") if BESIDE in there else ("device",),
        bars=tuple(bars),
        kinds=tuple(k for k in (*parts, BESIDE, *_LAST) if k in there),
        note=f"{_times(count)}; collectives of each are drawn behind its compute",
    )


def _times(count: int) -> str:
    return f"{count} microbatch{'es' if count > 1 else ''}"


def _ends(seconds: Seconds, row: int, start: float) -> list[Bar]:
    """What comes after all microbatches, or is drawn there."""
    bars, at = [], start
    lasting = seconds.memory + seconds.fixed, seconds.bus, seconds.disk
    for kind, each in zip(_LAST, lasting, strict=True):
        bars.append(Bar(row=row, start=at, seconds=each, kind=kind))
        at += each
    return bars


def _of_stages(one: Planned) -> TimeLine:
    plan, predicted = one.plan, one.candidate.predicted
    stages, asked = plan.mesh[MeshAxis.STAGE], plan.pipeline
    form = "lockstep" if asked.cuts is None else "free"
    table = schedule(asked.resolved, stages, predicted.microbatches, asked.chunks_of_stage, form)
    each, hop = (1.0,) * stages, 0.0
    if isinstance(predicted, IslandPrediction):
        each, hop = predicted.stage_s, predicted.hop_s
    rest = tuple(one * (1 - _FORWARD_SHARE) / 2 for one in each)
    forward = tuple(one * _FORWARD_SHARE for one in each)
    costs = Costs(forward=forward, input=rest, weight=rest, transfer=hop)
    spans = (lockstep_spans if form == "lockstep" else free_spans)(table, costs)
    length = one.seconds.total - sum(bar.seconds for bar in _ends(one.seconds, 0, 0.0))
    scale = length / max(span.end for span in spans)
    bars = [
        Bar(
            row=span.stage,
            start=scale * span.start,
            seconds=scale * (span.end - span.start),
            kind=_KINDS.get(span.op.kind, BACKWARD),
        )
        for span in spans
    ]
    bars += [bar for at in range(stages) for bar in _ends(one.seconds, at, length)]
    bars = [bar for bar in bars if bar.seconds > 0]
    there = {bar.kind for bar in bars}
    return TimeLine(
        rows=tuple(f"stage {at}" for at in range(stages)),
        bars=tuple(bars),
        kinds=tuple(k for k in (FORWARD, BACKWARD, *_LAST) if k in there),
        note=(
            f"{_times(predicted.microbatches)}; white: the bubble; collectives are in the slots, a"
            " third of which is taken for forward"
        ),
    )


def gaps(line: TimeLine, row: int) -> float:
    """Seconds of a row in which nothing is done."""
    own = sorted((bar.start, bar.start + bar.seconds) for bar in line.bars if bar.row == row)
    between = sum(after[0] - before[1] for before, after in itertools.pairwise(own))
    return own[0][0] + between + line.end - own[-1][1]
