"""KTO: answers that are good or bad by themselves, without pairs."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import above, at_least
from colossax.data.chats.rows import MISMATCHED
from colossax.errors import InputError
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.next_token import with_counted
from colossax.tasks.posttraining.answers import (
    REFERENCE_LOGPS,
    answers_of,
    check_documents,
    counted,
    policy_of,
    told_logps,
)
from colossax.tasks.posttraining.reference import reference_options, said_by_reference
from colossax.typing import TEXT_BATCH_DIMS, Batch, Dims

DESIRABLE = "desirable"
"""Array of a batch, `[b, k]`: 1 for a good answer, 0 for a bad one, anything where is none."""

_BASELINE = "kto_baseline"
"""Array of the prepared batch, `[b]`, of one value: how far the policy is from the reference."""


def kto_loss(
    *, documents: int, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0
) -> Loss:
    """`w_d (1 - sigmoid(beta (h - z)))` of good answers, `w_u (1 - sigmoid(beta (z - h)))` of bad.

    `h = lp - ref` of an answer; z is the mean of h over answers to other prompts, at least 0 and
    without gradient, made once for the whole global batch by `kto_options`.

    Args:
        documents: Of each row.
        beta: Above 0.
        desirable: w_d, 0 or more.
        undesirable: w_u, likewise.

    Raises:
        InputError: A number is out of its range; when traced, an array of the batch is missing.

    Source: Ethayarajh et al. 2024, KTO.
    """
    above(0).check(beta, "kto_loss: beta")
    for name, value in (("desirable", desirable), ("undesirable", undesirable)):
        at_least(0).check(value, f"kto_loss: {name}")
    check_documents(documents, "kto_loss", of=1)

    @any_order
    def loss(models: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        _check_batch(batch, documents)
        model = policy_of(models)
        logps, sums = told_logps(model, batch, row_keys)
        own = answers_of(logps, batch, documents)
        reference = answers_of(batch[REFERENCE_LOGPS], batch, documents)
        above_it, good = own.logps - reference.logps, batch[DESIRABLE] > 0
        agrees = (above_it > batch[_BASELINE][:, None]) == good
        further = beta * (above_it - batch[_BASELINE][:, None])
        worth = jnp.where(good, desirable, undesirable) * own.there
        lost = 1 - jax.nn.sigmoid(jnp.where(good, further, -further))
        terms: Terms = {"kto": (jnp.sum(lost * worth), jnp.sum(own.there), 1.0)}
        metrics: Sums = {
            "accuracy": counted(agrees.astype(jnp.float32), own.there),
            "kl": (jnp.sum(batch[_BASELINE]), jnp.float32(batch[_BASELINE].size)),
            "chosen_reward": counted(beta * above_it, own.there * good),
            "rejected_reward": counted(beta * above_it, own.there * ~good),
        }
        return with_counted(model, batch, sums, terms, metrics)

    return loss


def kto_options(*, documents: int) -> dict[str, Any]:
    """Fields of `StepOptions` that `kto_loss` asks for: reference and mean over other answers.

    Args:
        documents: Of each row.

    Raises:
        InputError: See `reference_options`.

    Cost: forward passes over the global batch: two of the reference, one of the policy.
    """
    given = reference_options()

    def prepare(models: Any, batch: Batch) -> Batch:
        batch = given["prepare"](models, batch)
        missing = sorted(mismatched_dims().keys() - batch.keys())
        if missing:
            raise InputError(
                f"kto_loss: the batch has no '{missing[0]}'; add answers to other prompts, whose"
                " arrays are those of text with 'mismatched_' before their names"
            )
        other = {name: batch[MISMATCHED + name] for name in TEXT_BATCH_DIMS}
        pair = (told_logps(policy_of(models), other)[0], said_by_reference(models, other))
        own, reference = (answers_of(logps, other, documents) for logps in pair)
        total, count = counted(own.logps - reference.logps, own.there)
        baseline = jnp.maximum(total / jnp.maximum(count, 1.0), 0.0)
        return {**batch, _BASELINE: jnp.broadcast_to(baseline, batch["tokens"].shape[:1])}

    dims = {**given["batch_dims"], **mismatched_dims(), _BASELINE: ("batch",)}
    return {**given, "prepare": prepare, "batch_dims": {**dims, DESIRABLE: ("batch", None)}}


def mismatched_dims() -> dict[str, Dims]:
    """Dims of the arrays of answers to other prompts."""
    return {MISMATCHED + name: dims for name, dims in TEXT_BATCH_DIMS.items()}


def _check_batch(batch: Batch, documents: int) -> None:
    for name in (REFERENCE_LOGPS, _BASELINE):
        if name not in batch:
            raise InputError(
                f"kto_loss: the batch has no '{name}'; give boost what kto_options() returns, which"
                " has it made by a frozen model"
            )
    if DESIRABLE not in batch or batch[DESIRABLE].shape[1:] != (documents,):
        raise InputError(
            f"kto_loss: '{DESIRABLE}' of the batch is to say of each answer whether it is good, as"
            f" numbers [rows, {documents}]"
        )
