"""Bytes of a step's arrays in host memory, of each device, from their shapes."""

import math
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from colossax.step.step import Step


def host_bytes_of(tree: Any) -> int:
    """Bytes of a device's part of the arrays that lie in host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind == "pinned_host"
    )


def gradient_bytes(step: "Step", num_microbatches: int) -> int:
    """Of stacks of gradients, with a batch in this many microbatches."""
    streaming, several = step.streaming, num_microbatches > 1
    if streaming is None or streaming.method is not None:
        return 0
    if streaming.clipping != "stack" and not several:
        return 0
    parts = streaming.parts.values()
    return sum(part.gradient_stack_bytes(summed=several) for part in parts)


def state_bytes(step: "Step", num_microbatches: int) -> dict[str, int]:
    """Of parameters and of the optimizer's state, gradients with it, by kind."""
    state = host_bytes_of(step.abstract["opt_state"])
    params = host_bytes_of(step.abstract["params"])
    if step.streaming is not None and step.streaming.clipping == "speculate":
        state, params = 2 * state, 2 * params
    return {"parameters": params, "optimizer": state + gradient_bytes(step, num_microbatches)}
