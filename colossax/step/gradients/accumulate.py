"""The loss of a global batch and its gradients, added up over its microbatches."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.compat import inputs_used
from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.nn.module import held
from colossax.step.checks.explained import explained
from colossax.step.gradients.loss_scale import scaled
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.gradients.sums import accumulable, constrained, square_norm, summed_up
from colossax.step.loss import SCALAR, Loss, Sums, Terms, Totals, checked
from colossax.step.microbatches import ROW_KEYS, Microbatches, Weighing
from colossax.step.trainable import joined, split
from colossax.typing import Batch, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCall:
    """A loss with its model's structure: parameters in, numbers out.

    Attributes:
        merge: Parameters to model.
        loss: See `Loss`.
    """

    merge: Callable[[Params], Any]
    loss: Loss

    @property
    def whole_batch(self) -> bool:
        """Whether the loss compares rows with each other, see `step.whole_batch`."""
        return getattr(self.loss, "whole_batch", False)

    @property
    def by_row(self) -> bool:
        """Whether the loss takes a random key for each row."""
        return ROW_KEYS in self._names

    @property
    def _names(self) -> Mapping[str, Any]:
        return inspect.signature(self.loss).parameters

    def __call__(
        self, params: Params, batch: Batch, variables: Any, key: Array | None
    ) -> tuple[Terms, Sums]:
        """Terms and metrics of one microbatch, in float32.

        Raises:
            InputError: The loss returns something else, changes the model's parameters, asks for
                an array that the batch has not, or for the value of one that is traced.
        """
        given = {"variables": variables, "key": key, ROW_KEYS: None}
        if ROW_KEYS in batch:
            batch = dict(batch)
            given[ROW_KEYS] = jax.random.wrap_key_data(batch.pop(ROW_KEYS))
        wanted = {name: value for name, value in given.items() if name in self._names}
        with explained(batch):
            return checked(self.loss(held(self.merge(params)), batch, **wanted))


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
            sums, grads = differentiate(params, microbatch, key, micro.weighing)
            return accumulable(bound, infos, grads), sums

        if micro.count == 1:
            return summarised(infos, *one(*micro.first), micro)
        xs = (micro.arrays, micro.keys)
        found = summed_up(one, lambda g: constrained(bound, infos, g), xs, infos)
        return summarised(infos, *found, micro)

    return gradients


def differentiated(call: LossCall, frozen: Params, variables: Any) -> Callable:
    """`(params, microbatch, key, weighing) -> ((loss, (totals, sums)), gradients)`."""

    def value(params: Params, microbatch: Batch, key: Array, weighing: Weighing) -> Any:
        return objective(*call(joined(params, frozen), microbatch, variables, key), weighing)

    return jax.value_and_grad(value, has_aux=True)


def check_counted(call: LossCall, terms: Terms, count: int) -> None:
    """Refuse a loss of one number, or one that compares rows, where there are several microbatches.

    Raises:
        InputError: It is one.
    """
    if count > 1 and call.whole_batch:
        raise InputError(
            f"loss: it compares each row of a batch with all others, and of {count} microbatches"
            " each would be compared with itself alone; give plan.batch.accumulation 1 without"
            " microbatch, and stages plan.pipeline.microbatches 1"
        )
    if count > 1 and SCALAR in terms:
        raise InputError(
            f"loss: it is one number, and of {count} microbatches it must be known what each"
            " counts; return ({'error': (sum, count, 1.0)}, {}), with the sum over the batch and"
            " how many were added"
        )


def summarised(infos: Any, grads: Params, sums: Any, micro: Microbatches) -> Gradients:
    """The gradients of all microbatches with what was added up beside them."""
    loss, (totals, metrics) = sums
    plain = jax.tree.map(lambda info, g: g if info.update is None else None, infos, grads)
    return Gradients(
        grads=grads,
        loss=loss,
        totals=totals,
        sums=metrics,
        square_norm=square_norm(plain),
        loss_scale=micro.weighing.loss_scale,
    )


def objective(terms: Terms, metrics: Sums, weighing: Weighing) -> tuple[Any, tuple[Totals, Totals]]:
    """The loss of a microbatch, and its terms and metrics as (total, weight).

    Args:
        terms: What the loss gave.
        metrics: Likewise.
        weighing: In the whole global batch.
    """
    weights = {name: jax.lax.stop_gradient(weight) for name, (_, weight, _) in terms.items()}
    batch_weights = weights if weighing.terms is None else weighing.terms
    parts = [
        coefficient * total / jnp.where(batch_weights[name] > 0, batch_weights[name], 1.0)
        for name, (total, _, coefficient) in terms.items()
    ]
    totals = {name: (total, weights[name]) for name, (total, _, _) in terms.items()}
    loss: Any = sum(parts)
    if weighing.loss_scale is not None:
        loss = scaled(loss, weighing.loss_scale)
    return loss, (totals, dict(metrics))


def with_term_weights(
    call: LossCall, params: Params, frozen: Params, variables: Any, micro: Microbatches
) -> Microbatches:
    """The microbatches with the weights of the loss's terms in all of them.

    They come from a forward pass of which nothing that parameters reach remains.

    Args:
        call: The loss.
        params: Those that learn, None elsewhere.
        frozen: The others.
        variables: See `TrainState`.
        micro: Without weights.

    Raises:
        InputError: A weight depends on parameters, or there is none.
    """

    def weigh(params: Params, microbatch: Batch, key: Array) -> dict[str, Array]:
        terms, _ = call(joined(params, frozen), microbatch, variables, key)
        check_counted(call, terms, micro.count)
        return {name: weight for name, (_, weight, _) in terms.items()}

    used = inputs_used(weigh, params, *micro.first)
    count = len(jax.tree.leaves(params))
    if any(used[:count]):
        raise InputError(
            "loss: the weight of a term depends on parameters, which would make its gradient wrong;"
            " compute weights from the batch alone"
        )
    if micro.count == 1:
        return micro
    each = jax.lax.map(lambda xs: weigh(params, *xs), (micro.arrays, micro.keys))
    weighing = dataclasses.replace(micro.weighing, terms=jax.tree.map(jnp.sum, each))
    return dataclasses.replace(micro, weighing=weighing)
