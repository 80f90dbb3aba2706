"""What stages make of a step: how often their devices run layers, what waits, what is sent.

Of the one program that equal stages share (docs/design/pipeline.md), under the schedules `1f1b` and
`interleaved`. In closed form: the tables of long batches are large, and a search asks for many.
"""

import dataclasses
import math

import numpy as np

from colossax.config import MeshAxis, Plan
from colossax.errors import PlanError
from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.parts import Parts
from colossax.planner.searching.sends import Tokens
from colossax.planner.searching.sent import Sent

STAGE = MeshAxis.STAGE.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """Of a plan.

    Attributes:
        count: How many; 1 without.
        chunks: Of each, that are not neighbours in the model.
        whole: Whether layers' weights are gathered once a step.
        once: Whether gradients are summed over devices once a step.
    """

    count: int = 1
    chunks: int = 1
    whole: bool = False
    once: bool = False

    @property
    def share(self) -> int:
        """Chunks of all layers."""
        return self.count * self.chunks

    def runs(self, microbatches: int) -> int:
        """How often each device runs a chunk forward, and backward: the bubble among them."""
        if self.count == 1:
            return microbatches
        if self.chunks == 1:
            return microbatches + self.count - 1
        if microbatches < self.count:
            return self.share + microbatches - 1
        return microbatches * self.chunks + self.count - 1

    def sends(self, microbatches: int) -> int:
        """How often each device hands a chunk's output on, and a gradient back: in every run, but
        of two stages, which fill in one tick, XLA leaves out the one that nobody reads. (Where
        there is a broadcast, it does not.)"""
        return self.runs(microbatches) - (self.count == 2 and self.chunks == 1)

    def turns(self, microbatches: int) -> float:
        """Runs for each chunk and microbatch: 1 without a bubble."""
        return self.runs(microbatches) / (microbatches * self.chunks)

    def lookups(self, microbatches: int) -> float:
        """How often a microbatch's tokens are looked up in a table: once, or in every run where
        stages have several chunks."""
        return 1.0 if self.chunks == 1 else self.runs(microbatches) / microbatches

    def slots(self, microbatches: int) -> int:
        """Chunks of microbatches for which each device has room, until their backward pass."""
        if self.count == 1:
            return 1
        group = math.ceil(microbatches / max(1, microbatches // self.count))
        return 2 * max(self.count, group) * (self.chunks - 1) + 2 * self.count - 1


ONE_STAGE = Stages()
"""A plan without."""


def stages_of(plan: Plan, parts: Parts) -> Stages:
    """As a plan asks for.

    Raises:
        PlanError: For stages or a schedule that no formula here is of.
    """
    count, asked, once = parts.size((STAGE,)), plan.pipeline, plan.batch.reduce_once
    if count == 1:
        return Stages(once=once)
    if asked.cuts is not None or asked.table is not None:
        raise PlanError(
            "plan.pipeline: formulas know stages of as many layers each under a schedule by its"
            " name; leave cuts and table out here, or count the plan with colossax inspect"
        )
    if asked.resolved not in ("1f1b", "interleaved"):
        raise PlanError(
            f"plan.pipeline.schedule: formulas know 1f1b and interleaved, and found"
            f" '{asked.resolved}'; give one of these, or count the plan with colossax inspect"
        )
    chunks = asked.chunks_of_stage
    return Stages(count=count, chunks=chunks, whole=asked.gather == "step", once=once)


def stages_sent(
    profile: ModelProfile, parts: Parts, stages: Stages, tokens: Tokens, microbatches: int
) -> list[Sent]:
    """What goes from stage to stage, and what all of them share of the ends, on average over the
    microbatches of a step.

    Hidden states go on, forward, and their gradients back (`Stages.sends`). Of each microbatch the
    last stage's output goes to all, and the gradient of what the head reads is summed; what is
    looked up in a table that they share is gathered, and its gradient goes to all, of every run
    where stages have several chunks. To all goes a sum, where stages are all there is a broadcast.
    """
    if stages.count == 1:
        return []
    wide = np.dtype(parts.bound.plan.precision.compute).itemsize * profile.width
    held, inside = tokens.held * wide, tokens.inside * wide
    part, axes = (stages.count - 1) / stages.count, (STAGE,)
    alone = parts.bound.mesh.size == stages.count
    sends = (stages.runs if alone else stages.sends)(microbatches) / microbatches
    looked_up = stages.lookups(microbatches)
    kind, share = ("collective-broadcast", 1.0) if alone else ("all-reduce", 2 * part)
    found = [
        Sent("collective-permute", axes, 2 * sends * held, 2 * sends, False),
        Sent(kind, axes, share * (1 + looked_up) * held, 1 + looked_up, False),
    ]
    if profile.vocab:
        found += [
            Sent("all-gather", axes, part * (looked_up * held + inside), looked_up + 1, False),
            Sent("all-to-all", axes, part * inside, 1, False),
        ]
    return found
