"""Gradients of a pipeline summed over the devices along the batch once a step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.step.gradients.shards import Shards
from colossax.step.microbatches import Microbatches
from colossax.step.stages.gathered import gathered_params, whole
from colossax.typing import Batch, Params

Found = Callable[[BoundPlan, Params, Microbatches], tuple[Params, Any]]
"""`(plan, parameters that learn, microbatches) -> (gradients, sums)`."""


def reduced_once(
    bound: BoundPlan, infos: Any, params: Params, micro: Microbatches, found: Found
) -> tuple[Params, Any]:
    """Gradients and sums of all microbatches; until then each device adds up those of its own rows.

    The devices along the batch become a dim in front of all arrays, around the dim of stages, and
    the plan in force inside does not know of them.

    Args:
        bound: Plan and devices; some axis splits the batch.
        infos: Of the parameters.
        params: Those that learn.
        micro: The global batch.
        found: What goes through the stages.

    Cost: a stage's gradients whole along the axes of the batch, in the dtype of accumulation; they
    are sent once a step.
    """
    shards = Shards(bound)
    inside = shards.inside
    if bound.plan.pipeline.gather == "step":
        params = gathered_params(bound, params, infos)
        pipeline = dataclasses.replace(bound.plan.pipeline, gather="microbatch")
        inside = whole(inside).replace(pipeline=pipeline)

    def of_device(arrays: Batch, keys: Array) -> tuple[Params, Any]:
        return found(inside, params, dataclasses.replace(micro, arrays=arrays, keys=keys))

    keys = jax.vmap(shards.keys)(micro.keys)
    grads, sums = shards.over(of_device, inside, dim=1)(shards.cut(micro), keys)
    return shards.reduced(shards.unreduced(grads, infos), infos), sums
