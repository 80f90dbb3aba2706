"""Gradients of a global batch, whole or added up over its microbatches."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.gradients.sums import accumulable, constrained, square_norm, summed_up
from colossax.step.loss import LossCall, objective
from colossax.step.microbatches import Microbatches
from colossax.step.trainable import joined, split
from colossax.typing import Batch, Params


def accumulate(call: LossCall, bound: BoundPlan, infos: Any, trainable: Any) -> GradientMethod:
    """One microbatch after another; each reduces its gradients over the devices.

    Args:
        call: The loss.
        bound: Plan and devices.
        infos: Of the parameters that learn, None elsewhere.
        trainable: Tree of booleans.
    """

    def gradients(params: Params, variables: Any, micro: Microbatches) -> Gradients:
        params, frozen = split(params, trainable)
        differentiate = differentiated(call, frozen, variables)

        def one(microbatch: Batch, key: Array) -> tuple[Params, Any]:
            sums, grads = differentiate(params, microbatch, key, micro.term_weights)
            return accumulable(bound, infos, grads), sums

        if micro.count == 1:
            return summarised(*one(*micro.first))
        return summarised(
            *summed_up(one, lambda g: constrained(bound, infos, g), (micro.arrays, micro.keys))
        )

    return gradients


def differentiated(call: LossCall, frozen: Params, variables: Any) -> Callable:
    """`(params, microbatch, key, term weights) -> ((loss, (totals, sums)), gradients)`."""

    def value(params: Params, microbatch: Batch, key: Array, batch_weights: Any) -> Any:
        return objective(*call(joined(params, frozen), microbatch, variables, key), batch_weights)

    return jax.value_and_grad(value, has_aux=True)


def summarised(grads: Params, sums: Any) -> Gradients:
    """The gradients of all microbatches with what was added up beside them."""
    loss, (totals, metrics) = sums
    return Gradients(
        grads=grads, loss=loss, totals=totals, sums=metrics, square_norm=square_norm(grads)
    )
