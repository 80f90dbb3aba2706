"""Plans that programs of stages cannot follow, refused before anything is traced."""

from collections.abc import Mapping
from typing import Any

import jax

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.offload.placement import cuts_refusal
from colossax.optim import is_layerwise
from colossax.sharding.rules import chunks_of
from colossax.step.options import StepOptions

_INSTEAD = "leave plan.pipeline.cuts out, which gives one program for all stages"


def check_programs(bound: BoundPlan, infos: Any, optimizer: Any, options: StepOptions) -> None:
    """Refuse what programs of stages do not do.

    Raises:
        PlanError: Names the setting and what would work.
    """
    chunks_of(bound)
    layers = max((1 + info.span[1] for info in jax.tree.leaves(infos) if info.span), default=0)
    if layers != sum(bound.plan.pipeline.cuts or ()):
        raise PlanError(cuts_refusal(bound.plan.pipeline.cuts or (), layers))
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
