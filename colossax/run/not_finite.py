"""What to tell a person whose run is no longer finite."""

from typing import Any

import jax
import jax.numpy as jnp

from colossax.step.step import Step
from colossax.typing import Batch, TrainState


def first_not_finite(step: Step, state: TrainState, batch: Batch) -> str:
    """What is not finite first, as a step computes it: batch, parameter, loss, gradient.

    It costs a program that is compiled for it, of a step without its update; where layers are
    streamed, whose gradients need not fit together, and where stages have programs of their own, it
    looks no further than parameters.

    Args:
        step: That skipped.
        state: After the step that was skipped, whose parameters are those before it.
        batch: Of that step.
    """
    for name, x in batch.items():
        if not _finite(x):
            return f"batch '{name}'"
    infos = jax.tree.leaves(step.spec.infos)
    for info, leaf in zip(infos, jax.tree.leaves(state["params"]), strict=True):
        if not _finite(leaf):
            return f"parameter '{info.path}'"
    if step.streaming is not None or step.bound.stage_programs:
        return "the loss or a gradient"
    loss, gradients = _judged(step, state, batch)
    if not loss:
        return "the loss"
    paths = [
        info.path
        for info, fine in zip(jax.tree.leaves(step.infos), gradients, strict=True)
        if not fine
    ]
    others = f" and {len(paths) - 1} others" if len(paths) > 1 else ""
    return f"the gradient of '{paths[0]}'{others}" if paths else "the gradient norm"


def _judged(step: Step, state: TrainState, batch: Batch) -> tuple[bool, list[bool]]:
    """Whether the loss of the step before this state is finite, and each gradient."""

    def judge(state: TrainState, batch: Batch) -> Any:
        found = step.gradients({**state, "step": state["step"] - 1}, batch)
        return jnp.isfinite(found.loss), [_all_finite(g) for g in jax.tree.leaves(found.grads)]

    loss, gradients = jax.device_get(jax.jit(judge)(state, step.place(batch)))
    return bool(loss), [bool(one) for one in gradients]


def _finite(x: Any) -> bool:
    return bool(jax.jit(_all_finite)(x))


def _all_finite(x: jax.Array) -> jax.Array:
    counts = not jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.bool_(True) if counts else jnp.all(jnp.isfinite(x))
