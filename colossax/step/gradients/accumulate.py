"""Loss and gradients of one global batch, whole or in microbatches."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.sharding import batch_axes
from colossax.step.gradients.reduce_once import reduced_once
from colossax.step.gradients.sums import accumulable, laid_out, summed_up
from colossax.step.loss import LossCall, Totals, checked_weights, objective, whole_weights
from colossax.step.microbatches import cut_up, microbatches
from colossax.step.trainable import joined
from colossax.typing import Batch, Dims, Params


def loss_and_gradients(
    call: LossCall,
    bound: BoundPlan,
    infos: Any,
    params: Params,
    frozen: Params,
    batch: Batch,
    dims: Mapping[str, Dims],
    variables: Any,
    key: Array,
) -> tuple[Params, Totals, Totals, Array]:
    """Gradients of the loss over the whole global batch, laid out by the plan's gradient rules.

    Every term is divided by its own weight summed over all microbatches, so the result does not
    depend on how the batch is cut. The weights come first, in a pass from which everything that
    parameters reach has been removed.

    Returns:
        Gradients (accumulation dtype), terms as (total, weight), metrics as (total, weight), loss.

    Raises:
        InputError: A weight depends on parameters.
    """
    pieces = microbatches(bound, batch, dims)
    micro, keys, first = cut_up(batch, dims, key, pieces)
    weigh = checked_weights(call, params, frozen, variables, first, keys[0])

    def value(params: Params, piece: Batch, key: Array, over: Any):
        return objective(*call(joined(params, frozen), piece, variables, key), over)

    differentiate = jax.value_and_grad(value, has_aux=True)
    if pieces == 1:
        (loss, (totals, metrics)), grads = differentiate(params, first, keys[0], None)
        return accumulable(bound, infos, grads), totals, metrics, loss
    over = whole_weights(weigh, micro, keys)
    if bound.plan.batch.reduce_once and batch_axes(bound):
        return reduced_once(bound, infos, differentiate, params, micro, dims, keys, over)

    def grad(piece: Batch, key: Array):
        (loss, (totals, metrics)), grads = differentiate(params, piece, key, over)
        return accumulable(bound, infos, grads), (totals, metrics, loss)

    grads, (totals, metrics, loss) = summed_up(
        grad, lambda grads: laid_out(bound, infos, grads), (micro, keys)
    )
    return grads, totals, metrics, loss
