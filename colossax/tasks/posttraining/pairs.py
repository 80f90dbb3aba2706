"""Objectives on pairs of answers: of a row's documents 2i is preferred to 2i + 1."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.config import above, at_least
from colossax.errors import InputError
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.next_token import with_counted
from colossax.tasks.posttraining.answers import (
    REFERENCE_LOGPS,
    Answers,
    answers_of,
    check_documents,
    counted,
    policy_of,
    told_logps,
)
from colossax.typing import Batch

Pair = tuple[Answers, Answers]
"""The answers that are chosen and those that are rejected, `[b, k / 2]` each."""

Judged = tuple[Terms, Float[Array, "b p"]]
"""Terms of a loss, and by how much each chosen answer is ahead; above 0 the model agrees."""


def dpo_loss(*, documents: int, beta: float = 0.1) -> Loss:
    """`-log sigmoid(beta h)`, h how much more than the reference the policy prefers the chosen.

    `h = (lp_c - ref_c) - (lp_r - ref_r)` of answers' summed log-probabilities, those of the
    reference made as `reference_options` say. A batch's `weights` are 1 for the tokens of answers.

    Args:
        documents: Of each row, an even number.
        beta: How far from the reference a preference may lead, above 0.

    Raises:
        InputError: A number is out of its range; when traced, nothing is said by a reference.

    Source: Rafailov et al. 2023, Direct Preference Optimization.
    """
    above(0).check(beta, "dpo_loss: beta")

    def judge(pair: Pair, reference: Pair) -> Judged:
        ahead = beta * _above(pair, reference, mean=False)
        return {"dpo": (*counted(-jax.nn.log_sigmoid(ahead), _whole(pair)), 1.0)}, ahead

    return _with_reference("dpo_loss", documents, judge)


def ipo_loss(*, documents: int, beta: float = 0.1) -> Loss:
    """`(h - 1 / (2 beta))^2`, h as `dpo_loss` has it but of means per token.

    Args:
        documents: Of each row, an even number.
        beta: Above 0; the larger, the nearer the reference is kept.

    Raises:
        InputError: See `dpo_loss`.

    Source: Azar et al. 2023, A General Theoretical Paradigm to Understand Learning from Human
    Preferences; lengths as in its authors' later advice.
    """
    above(0).check(beta, "ipo_loss: beta")

    def judge(pair: Pair, reference: Pair) -> Judged:
        ahead = _above(pair, reference, mean=True)
        return {"ipo": (*counted(jnp.square(ahead - 1 / (2 * beta)), _whole(pair)), 1.0)}, ahead

    return _with_reference("ipo_loss", documents, judge)


def simpo_loss(*, documents: int, beta: float = 2.0, margin: float = 1.0) -> Loss:
    """`-log sigmoid(beta (l_c - l_r) - margin)` of answers' log-probabilities per token.

    Args:
        documents: Of each row, an even number.
        beta: Above 0.
        margin: By which the chosen is to be ahead, 0 or more; gamma of the paper.

    Raises:
        InputError: A number is out of its range.

    Source: Meng et al. 2024, SimPO: needs no reference.
    """
    above(0).check(beta, "simpo_loss: beta")
    at_least(0).check(margin, "simpo_loss: margin")

    def judge(pair: Pair) -> Judged:
        ahead = beta * (pair[0].means - pair[1].means) - margin
        lost = -jax.nn.log_sigmoid(ahead)
        return {"simpo": (*counted(lost, _whole(pair)), 1.0)}, ahead + margin

    return _alone("simpo_loss", documents, judge)


def orpo_loss(*, documents: int, beta: float = 0.1) -> Loss:
    """Cross entropy of chosen answers, and `-beta log sigmoid(odds_c - odds_r)`.

    `odds = l - log(1 - e^l)` of an answer's log-probability per token, l, in float32.

    Args:
        documents: Of each row, an even number.
        beta: Coefficient of the second term, 0 or more; lambda of the paper.

    Raises:
        InputError: A number is out of its range.

    Source: Hong et al. 2024, ORPO: needs no reference.
    """
    at_least(0).check(beta, "orpo_loss: beta")

    def judge(pair: Pair) -> Judged:
        whole = _whole(pair)
        ahead = _odds(pair[0], whole) - _odds(pair[1], whole)
        chosen = (-jnp.sum(pair[0].logps * whole), jnp.sum(pair[0].tokens * whole), 1.0)
        odds = (*counted(-jax.nn.log_sigmoid(ahead), whole), beta)
        return {"cross_entropy": chosen, "odds": odds}, ahead

    return _alone("orpo_loss", documents, judge)


def _whole(pair: Pair) -> Float[Array, "b p"]:
    """1 where both answers are there."""
    return pair[0].there * pair[1].there


def _above(pair: Pair, reference: Pair, *, mean: bool) -> Float[Array, "b p"]:
    """How much more than the reference the policy prefers the chosen answer."""
    chosen, rejected = (
        own.means - other.means if mean else own.logps - other.logps
        for own, other in zip(pair, reference, strict=True)
    )
    return chosen - rejected


def _odds(answers: Answers, whole: Array) -> Float[Array, "b p"]:
    # Where there is no pair any number below 0 does; at 0, of what is certain, odds have no end.
    mean = jnp.where(whole > 0, jnp.minimum(answers.means, -1e-6), -1.0)
    return mean - jnp.log(-jnp.expm1(mean))


def _with_reference(objective: str, documents: int, judge: Callable[[Pair, Pair], Judged]) -> Loss:
    def of(batch: Batch, pair: Pair) -> Judged:
        if REFERENCE_LOGPS not in batch:
            raise InputError(
                f"{objective}: the batch has no '{REFERENCE_LOGPS}'; give boost what"
                " reference_options() returns, which has them made by a frozen model"
            )
        return judge(pair, _pair(batch[REFERENCE_LOGPS], batch, documents))

    return _loss(objective, documents, of)


def _alone(objective: str, documents: int, judge: Callable[[Pair], Judged]) -> Loss:
    return _loss(objective, documents, lambda batch, pair: judge(pair))


def _pair(logps: Array, batch: Batch, documents: int) -> Pair:
    answers = answers_of(logps, batch, documents)
    return answers.every(0, 2), answers.every(1, 2)


def _loss(objective: str, documents: int, judge: Callable[[Batch, Pair], Judged]) -> Loss:
    check_documents(documents, objective, of=2)

    @any_order
    def loss(models: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        model = policy_of(models)
        logps, sums = told_logps(model, batch, row_keys)
        pair = _pair(logps, batch, documents)
        terms, ahead = judge(batch, pair)
        whole = _whole(pair)
        metrics: Sums = {
            "accuracy": counted((ahead > 0).astype(jnp.float32), whole),
            "margin": counted(ahead, whole),
            "chosen_logp": counted(pair[0].logps, whole),
            "rejected_logp": counted(pair[1].logps, whole),
        }
        return with_counted(model, batch, sums, terms, metrics)

    return loss
