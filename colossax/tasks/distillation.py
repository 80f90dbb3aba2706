"""A student that learns from text and from a frozen teacher."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import above, at_least, within
from colossax.errors import InputError
from colossax.nn.loss.divergence import kl_divergence
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.next_token import (
    at_the_head,
    hidden_states,
    moved,
    next_token_terms,
    with_counted,
)
from colossax.typing import Batch

STUDENT, TEACHER = "student", "teacher"

_STATES = "teacher_hidden"
"""Array of the prepared batch: the teacher's final hidden states."""

_ALPHA, _LEFT = "alpha", "alpha_steps"
"""Variables: the coefficient, and steps until it becomes 0."""


def distillation_loss(
    *, temperature: float = 1.0, z_loss: float = 0.0, student: str = STUDENT, teacher: str = TEACHER
) -> Loss:
    """`next_token_loss` of the student plus `alpha KL(teacher || student)`, over real targets.

    For `boost({"student": ..., "teacher": ...}, optimizer, distillation_loss(), plan,
    **distillation_options(alpha=0.5, until=1000))`. The teacher's hidden states are made once per
    step, before the batch is cut; its logits only chunk by chunk, beside the student's
    (`plan.loss.vocab_chunks`). While alpha is 0 neither is made, and the term `divergence` is 0.

    Args:
        temperature: By which logits of both are divided in the divergence; see `kl_divergence`.
        z_loss: See `next_token_loss`.
        student: Name of the model that learns.
        teacher: Name of the one it learns from; their vocabularies are the same.

    Raises:
        InputError: A number is out of its range; when traced, the vocabularies differ.

    Cost: the teacher's forward pass and its hidden states of the global batch, in the compute
    dtype; `kl_divergence`.
    Source: Rajbhandari et al. 2022, DeepSpeed-MoE (mixture of students: distillation that stops
    before training does); Hinton et al. 2015.
    """
    at_least(0).check(z_loss, "z_loss")
    above(0).check(temperature, "temperature")

    @any_order
    def loss(
        models: Any, batch: Batch, variables: Any, row_keys: Array | None = None
    ) -> tuple[Terms, Sums]:
        model, guide = models[student], models[teacher]
        hidden, sums = hidden_states(model, batch, row_keys)
        terms, metrics = next_token_terms(model, hidden, sums, batch, z_loss=z_loss)
        divergence, inputs = _divergence(model, guide, hidden, batch, temperature)
        alpha = variables[_ALPHA]
        found = jax.lax.cond(alpha > 0, divergence, lambda own, head: jnp.float32(0), *inputs)
        terms["divergence"] = (found, jnp.sum(batch["weights"].astype(jnp.float32)), alpha)
        return terms, metrics

    return loss


def soft_target_loss(
    *, text: float = 0.0, temperature: float = 1.0, student: str = STUDENT, teacher: str = TEACHER
) -> Loss:
    """`(1 - text) T^2 KL(teacher || student) + text CE`, over real targets.

    As `distillation_loss`, but for what does not change in a run; with `soft_target_options()`.

    Args:
        text: Share of the tokens that are there: 0, the teacher alone; 1, its word counts nothing.
        temperature: See `distillation_loss`.
        student: Name of the model that learns.
        teacher: Name of the one it learns from.

    Raises:
        InputError: See `distillation_loss`.

    Cost: see there.
    """
    within(0, 1).check(text, "text")
    above(0).check(temperature, "temperature")

    @any_order
    def loss(models: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        model, guide = models[student], models[teacher]
        hidden, sums = hidden_states(model, batch, row_keys)
        divergence, inputs = _divergence(model, guide, hidden, batch, temperature)
        terms: Terms = {}
        if text < 1:
            told = jnp.sum(batch["weights"].astype(jnp.float32))
            terms["divergence"] = (divergence(*inputs), told, 1 - text)
        if not text:
            return with_counted(model, batch, sums, terms, {})
        terms, metrics = next_token_terms(model, hidden, sums, batch, beside=terms)
        total, count, _ = terms["cross_entropy"]
        return {**terms, "cross_entropy": (total, count, text)}, metrics

    return loss


def soft_target_options(*, teacher: str = TEACHER) -> dict[str, Any]:
    """Fields of `StepOptions` that `soft_target_loss` asks for.

    Args:
        teacher: Name of the model that does not learn.
    """

    def prepare(models: Any, batch: Batch) -> Batch:
        return {**batch, _STATES: hidden_states(models[teacher], batch)[0]}

    return {
        "prepare": prepare,
        "trainable": lambda info: info.model != teacher,
        "batch_dims": {_STATES: ("batch", "seq", None)},
    }


def _divergence(
    model: Any, guide: Any, hidden: Array, batch: Batch, temperature: float
) -> tuple[Callable[[Array, Array], Array], tuple[Array, Array]]:
    """The sum over real targets, as a function of hidden states and head, and those."""
    heads = model.head_weight(), jax.lax.stop_gradient(guide.head_weight())
    _check_vocabularies(*heads)
    _check_readouts(model, guide)
    weights = batch["weights"].astype(jnp.float32)
    shared, cuts = at_the_head(heads[0].shape, hidden.shape[1])
    own, told, rows = moved(shared, hidden, batch[_STATES], weights)

    def divergence(own: Array, head: Array) -> Array:
        return kl_divergence(own, head, told, heads[1], rows, temperature=temperature, **cuts)

    return divergence, (own, heads[0])


def distillation_options(
    *, alpha: float = 1.0, until: int | None = None, teacher: str = TEACHER
) -> dict[str, Any]:
    """Fields of `StepOptions` that `distillation_loss` asks for.

    Args:
        alpha: Coefficient of the divergence.
        until: Steps after which it is 0, those that are skipped not counted; None: it stays. It is
            `state["variables"]["alpha"]`, where it may be set between steps as well.
        teacher: Name of the model that does not learn.

    Raises:
        InputError: A number is out of its range.
    """
    at_least(0).check(alpha, "alpha")
    if until is not None:
        at_least(0).check(until, "until")

    def prepare(models: Any, batch: Batch, variables: Any) -> Batch:
        def told() -> Array:
            return hidden_states(models[teacher], batch)[0]

        def nothing() -> Array:
            return jnp.zeros(shape.shape, shape.dtype)

        shape = jax.eval_shape(told)
        return {**batch, _STATES: jax.lax.cond(variables[_ALPHA] > 0, told, nothing)}

    def after_step(variables: Any, sums: Any) -> Any:
        left = variables[_LEFT] - 1
        alpha = jnp.where(left == 0, 0.0, variables[_ALPHA])
        return {_ALPHA: alpha, _LEFT: jnp.maximum(left, -1)}

    return {
        "prepare": prepare,
        "after_step": after_step,
        "trainable": lambda info: info.model != teacher,
        "variables": {
            _ALPHA: jnp.float32(0 if until == 0 else alpha),
            _LEFT: jnp.int32(-1 if until is None else until),
        },
        "batch_dims": {_STATES: ("batch", "seq", None)},
    }


def _check_readouts(*models: Any) -> None:
    if any(getattr(model, "readout", {}) for model in models):
        raise InputError(
            "distillation: it compares logits that are products with the head alone; models whose"
            " logits are capped or have a bias cannot take part"
        )


def _check_vocabularies(head: Array, other: Array) -> None:
    if head.shape[1] != other.shape[1]:
        raise InputError(
            f"distillation: the student has {head.shape[1]} tokens in its vocabulary and the"
            f" teacher {other.shape[1]}; give both the same"
        )
