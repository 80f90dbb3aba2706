"""Plans that programs of stages cannot follow, refused before anything is traced."""

from collections.abc import Mapping
from typing import Any

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.optim import is_layerwise
from colossax.sharding import batch_axes
from colossax.sharding.rules import chunks_of
from colossax.step.options import StepOptions

_INSTEAD = "leave plan.pipeline.cuts out, which gives one program for all stages"


def check_programs(bound: BoundPlan, optimizer: Any, options: StepOptions) -> None:
    """Refuse what programs of stages do not do.

    Raises:
        PlanError: Names the setting and what would work.
    """
    chunks_of(bound)
    plan = bound.plan
    if plan.offload.wanted or any(not s.placement.all_on_device for s in plan.segments):
        raise PlanError(
            "plan.offload: programs of stages keep all of their layers on the devices in this"
            f" version; give offload none, or {_INSTEAD}"
        )
    if plan.batch.reduce_once and batch_axes(bound):
        raise PlanError(
            "plan.batch.reduce_once: programs of stages reduce gradients for each microbatch in"
            f" this version; switch it off, or {_INSTEAD}"
        )
    if plan.pipeline.gather == "step":
        raise PlanError(
            "plan.pipeline.gather: programs of stages gather weights for each microbatch in this"
            f" version; give microbatch, or {_INSTEAD}"
        )
    if options.prepare is not None:
        raise PlanError(
            "prepare: it reads the whole model, of which programs of stages have a part each;"
            f" {_INSTEAD}"
        )
    if isinstance(optimizer, Mapping) or not is_layerwise(optimizer):
        raise PlanError(
            "plan.pipeline.cuts: each stage updates what it holds, and this optimizer does not say"
            " that it may; give one of colossax.optim, mark your `dims -> transformation` with"
            f" colossax.optim.layerwise, or {_INSTEAD}"
        )
