"""A training plan made fit for one sequence."""

import dataclasses

from colossax.config import FrozenDict, Plan


def inference_plan(plan: Plan) -> Plan:
    """`plan` without what only a batch of long rows can bear.

    Activations split neither batch nor sequence: the flat tokens of a step are few and every
    device sees them all. Weights stay where they are at rest, hidden states move to them: over
    `fsdp` a matmul sums partial products of `tokens x width` instead of gathering its weight.
    For the same reason the compiler does the communication of matmuls: the library's own regions
    divide tokens among devices. Nothing is recomputed, because nothing is differentiated.
    """
    activations = {
        dim: rule
        for dim, rule in plan.rules.activations.items()
        if dim.split(":")[0] not in ("batch", "seq")
    }
    rules = dataclasses.replace(plan.rules, activations=FrozenDict(activations))
    segments = tuple(dataclasses.replace(segment, remat="none") for segment in plan.segments)
    return plan.replace(rules=rules, segments=segments, tensor_matmul="compiler")
