"""What each stage of a step with a program per stage holds, runs and sends."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from colossax.pipeline import Table
from colossax.sharding.rules import chunks_of
from colossax.step.arrange import Arranged
from colossax.step.programs.ahead import (
    INPUT,
    OPTIMIZER,
    PARAMETERS,
    STATE,
    Peak,
    Ran,
    Rehearsal,
    rehearsing,
)
from colossax.step.programs.update import StagePrograms, StageUpdate
from colossax.typing import Batch

if TYPE_CHECKING:
    from colossax.step.step import Step

_STATE_TERMS = {"params": PARAMETERS, "opt_state": OPTIMIZER}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsedStage:
    """One stage; bytes are of each of its devices.

    Attributes:
        number: Its.
        layers: Of each chunk, the first and the last layer.
        argument_bytes: Its part of the state, and the batch.
        peak: When most of its memory is in use.
        most: The most that it ever holds, by what it holds; not all at once.
        ran: Its programs.
    """

    number: int
    layers: tuple[tuple[int, int], ...]
    argument_bytes: int
    peak: Peak
    most: Mapping[str, int]
    ran: tuple[Ran, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A step as it is dispatched.

    Attributes:
        table: Who does what when.
        stages: All of them.
        sent_bytes: From one stage to another in a step, of each device.
        messages: How many arrays those are.
        passed_bytes: Of those, of what chunks leave for one another: of each microbatch.
        passed_messages: How many arrays those are.
    """

    table: Table
    stages: tuple[RehearsedStage, ...]
    sent_bytes: Mapping[tuple[int, int], int]
    messages: Mapping[tuple[int, int], int]
    passed_bytes: Mapping[tuple[int, int], int]
    passed_messages: Mapping[tuple[int, int], int]

    @property
    def ran(self) -> tuple[Ran, ...]:
        """Programs of all stages."""
        return tuple(ran for stage in self.stages for ran in stage.ran)


def rehearsed(step: "Step", batch: Batch, compile: Callable[[int, Any], Any]) -> Rehearsed:
    """Dispatch a step of stages with programs of their own, without arrays.

    Args:
        step: Its stages have programs of their own.
        batch: Shapes with shardings; see `Step.abstract_batch`.
        compile: `(stage, lowered) -> program`, with `stats` and `out_shardings`, called once for
            each program that differs; see `colossax.aot.compile_program`.

    Cost: traces and lowers each program of each stage; compiling does not depend on microbatches.
    """
    assert isinstance(step.updater, StageUpdate)
    rehearsal = Rehearsal(step.bound, compile)
    state = {
        name: rehearsal.arrays(part, _STATE_TERMS.get(name, STATE))
        for name, part in step.abstract.items()
    }
    given = {name: rehearsal.array(x, x.sharding, INPUT) for name, x in batch.items()}
    arguments = rehearsal.held_bytes()
    with rehearsing(rehearsal):
        programs = StagePrograms(step, step.updater, None)
        table = programs.table(batch)
        programs(state, _like(batch, given))
    layers = _layers(step)
    stages = [
        RehearsedStage(
            number=number,
            layers=layers[number],
            argument_bytes=arguments[number],
            peak=peak,
            most=rehearsal.most[number],
            ran=tuple(ran for ran in rehearsal.ran if ran.stage == number),
        )
        for number, peak in enumerate(rehearsal.peaks)
        if peak is not None
    ]
    return Rehearsed(
        table=table,
        stages=tuple(stages),
        sent_bytes=dict(rehearsal.sent_bytes),
        messages=dict(rehearsal.messages),
        passed_bytes=dict(rehearsal.passed_bytes),
        passed_messages=dict(rehearsal.passed_messages),
    )


def _like(batch: Batch, arrays: dict[str, Any]) -> Batch:
    """These arrays as a batch of the same order."""
    return Arranged(arrays, batch.order) if isinstance(batch, Arranged) else arrays


def _layers(step: "Step") -> list[tuple[tuple[int, int], ...]]:
    """Of each stage's chunks, in the order of the model."""
    cuts, layout = step.bound.plan.pipeline.cuts or (), chunks_of(step.bound).layout
    ends = list(itertools.accumulate(cuts))
    found: dict[int, list[tuple[int, int]]] = {}
    for (stage, _), count, end in zip(layout, cuts, ends, strict=True):
        found.setdefault(stage, []).append((end - count, end - 1))
    return [tuple(found[stage]) for stage in sorted(found)]
