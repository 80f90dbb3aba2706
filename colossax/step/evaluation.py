"""Terms and metrics of a batch, without a step."""

from collections.abc import Mapping
from typing import Any

import jax

from colossax.config import BoundPlan
from colossax.layerwise import summed
from colossax.step.gradients.accumulate import LossCall, check_counted
from colossax.step.loss import Totals
from colossax.step.microbatches import num_microbatches, strided
from colossax.typing import Batch, Dims, Params


def batch_totals(
    call: LossCall,
    bound: BoundPlan,
    params: Params,
    batch: Batch,
    dims: Mapping[str, Dims],
    variables: Any,
) -> Totals:
    """Terms and metrics of a global batch as (total, weight), microbatch after microbatch.

    The loss gets no random key: it is asked what the model knows, not to train it.

    Raises:
        InputError: The loss is one number, and there are several microbatches.
    """

    def one(microbatch: Batch) -> Totals:
        terms, metrics = call(params, microbatch, variables, None)
        check_counted(terms, count)
        return {**{name: term[:2] for name, term in terms.items()}, **metrics}

    count = num_microbatches(bound, batch, dims)
    arrays = strided(batch, dims, count)
    if count == 1:
        return one(jax.tree.map(lambda x: x[0], arrays))
    return summed(jax.lax.map(one, arrays))
