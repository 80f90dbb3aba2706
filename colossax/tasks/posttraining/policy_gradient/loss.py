"""Policy gradients on answers that a model has given: PPO's clipped ratio, and GRPO's family."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.config import above
from colossax.errors import InputError
from colossax.layerwise import Maximum
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.next_token import with_counted
from colossax.tasks.posttraining.answers import (
    REFERENCE_LOGPS,
    by_document,
    check_documents,
    policy_of,
    told_logps,
)
from colossax.tasks.posttraining.config import PolicyConfig
from colossax.tasks.posttraining.reference import reference_options
from colossax.typing import Batch

ADVANTAGES = "advantages"
"""Array of a batch, `[b, s]` float32: of each target that is told, how much better it is."""

OLD_LOGPS = "old_logps"
"""Array of a batch, `[b, s]` float32: log-probabilities under the policy that gave the answers."""

ENGINE_LOGPS = "engine_logps"
"""Array of a batch, `[b, s]` float32: log-probabilities that the engine said of what it drew."""

NOT_SAID = 1.0
"""Stands there for those that it did not say; no log-probability is above 0."""


def policy_loss(config: PolicyConfig, *, documents: int) -> Loss:
    """`-min(rho A, clip(rho, 1 - low, 1 + high) A)` of each token of an answer.

    `rho = exp(log policy - log old)`, A the token's advantage. With a dual clip, where `A < 0`, at
    most `-dual A`. Beside it `divergence` times an estimate of how far the policy is from its
    reference. Both are divided as the normaliser says, over the global batch.

    A batch has `advantages`, and `old_logps` unless each answer is learned from once: then the
    ratio is 1, exactly, and its gradient that of the log-probability. Of `engine_logps`, where they
    are there, it is told how far they are from the old ones of the same tokens.

    Args:
        config: Which.
        documents: Prompts with their answer in each row.

    Raises:
        InputError: A number is out of its range; when traced, an array of the batch is missing.

    Source: Schulman et al. 2017, PPO; Ye et al. 2020 (dual clip); Shao et al. 2024, DeepSeekMath
    (GRPO); Yu et al. 2025, DAPO; Liu et al. 2025 (Dr. GRPO); estimators: Schulman 2020,
    Approximating KL Divergence.
    """
    check_documents(documents, "policy_loss", of=1)

    @any_order
    def loss(models: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        _check_batch(batch, config)
        model = policy_of(models)
        logps, sums = told_logps(model, batch, row_keys, temperature=config.temperature)
        weights = batch["weights"].astype(jnp.float32)
        old = batch.get(OLD_LOGPS, jax.lax.stop_gradient(logps))
        # Where nothing is told any number may stand.
        moved = jnp.where(weights > 0, logps - old, 0.0)
        ratio = jnp.exp(moved)
        advantages = jnp.where(weights > 0, batch[ADVANTAGES], 0.0)
        gained, clipped = _gained(config, ratio, advantages)
        shares, count = _shares(config, weights, batch, documents)
        terms: Terms = {"policy": (-jnp.sum(gained * shares), count, 1.0)}
        told = jnp.sum(weights)
        metrics: Sums = {
            "ratio": (jnp.sum(ratio * weights), told),
            "largest_ratio": Maximum(jnp.max(jnp.where(weights > 0, ratio, 0.0))),
            "clipped": (jnp.sum(clipped * weights), told),
            "log_ratio": (jnp.sum(moved * weights), told),
            "entropy": (-jnp.sum(logps * weights), told),
        }
        if ENGINE_LOGPS in batch:
            said = weights * (batch[ENGINE_LOGPS] <= 0)
            apart = jnp.where(said > 0, jnp.abs(old - batch[ENGINE_LOGPS]), 0.0)
            metrics["engine_apart"] = (jnp.sum(apart), jnp.sum(said))
            metrics["engine_furthest"] = Maximum(jnp.max(apart))
        if config.divergence:
            further = jnp.where(weights > 0, logps - batch[REFERENCE_LOGPS], 0.0)
            each = kl_estimate(further, config.estimator)
            terms["divergence"] = (jnp.sum(each * shares), count, config.divergence)
            metrics["kl_k1"] = (jnp.sum(further * weights), told)
            metrics["kl_k3"] = (jnp.sum(kl_estimate(further, "k3") * weights), told)
        return with_counted(model, batch, sums, terms, metrics)

    return loss


def policy_options(config: PolicyConfig, *, again: bool = False) -> dict[str, Any]:
    """Fields of `StepOptions` that `policy_loss` asks for.

    A batch has `advantages`. With a divergence, `reference_options` are among these.

    Args:
        config: Of the loss.
        again: Whether answers are learned from more than once: then `old_logps` are made too, for
            `step.prepare` by the state that gave the answers. What a batch has is left as it is.

    Raises:
        InputError: See `reference_options`.

    Cost: a forward pass of the policy over the global batch with `again`, one of the reference with
    a divergence, where the batch does not have what they say.
    """
    reference = reference_options(temperature=config.temperature) if config.divergence else {}
    dims = dict.fromkeys((ADVANTAGES, ENGINE_LOGPS), ("batch", "seq"))
    options = {**reference, "batch_dims": {**reference.get("batch_dims", {}), **dims}}
    if not again:
        return options

    def prepare(models: Any, batch: Batch) -> Batch:
        made = with_old_logps(models, batch, config)
        return reference["prepare"](models, made) if reference else made

    options["batch_dims"][OLD_LOGPS] = ("batch", "seq")
    return {**options, "prepare": prepare}


def with_old_logps(models: Any, batch: Batch, config: PolicyConfig) -> Batch:
    """The batch with what the policy says of each target, unless that is there."""
    if OLD_LOGPS in batch:
        return batch
    logps, _ = told_logps(policy_of(models), batch, temperature=config.temperature)
    return {**batch, OLD_LOGPS: logps}


def kl_estimate(further: Array, estimator: str) -> Array:
    """Of `d = log policy - log reference` of tokens that the policy drew, an estimate of KL."""
    if estimator == "k1":
        return further
    return jnp.square(further) / 2 if estimator == "k2" else jnp.expm1(-further) + further


def clipped_value_loss(
    values: Float[Array, "b s"],
    old: Float[Array, "b s"],
    returns: Float[Array, "b s"],
    weights: Float[Array, "b s"],
    *,
    clip: float = 0.2,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of `w max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2`, and of w.

    A term of a critic's loss but for its coefficient.

    Args:
        values: Of each token, V.
        old: Those that its advantages were made of.
        returns: R, advantages plus `old`.
        weights: 1 where a token is told.
        clip: How far a value may move from the old one, above 0.

    Raises:
        InputError: `clip` is not above 0.

    Source: Schulman et al. 2017, PPO, as its authors' code has it.
    """
    above(0).check(clip, "clipped_value_loss: clip")
    near = old + jnp.clip(values - old, -clip, clip)
    each = jnp.maximum(jnp.square(values - returns), jnp.square(near - returns)) / 2
    return jnp.sum(each * weights), jnp.sum(weights)


def _gained(config: PolicyConfig, ratio: Array, advantages: Array) -> tuple[Array, Array]:
    """What each token gains, and 1 where it is not by its ratio."""
    bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    gained = jnp.minimum(ratio * advantages, bounded * advantages)
    if config.dual_clip is not None:
        least = config.dual_clip * advantages
        gained = jnp.where(advantages < 0, jnp.maximum(gained, least), gained)
    return gained, (gained != ratio * advantages).astype(jnp.float32)


def _shares(
    config: PolicyConfig, weights: Array, batch: Batch, documents: int
) -> tuple[Array, Array]:
    """By what each token's number is multiplied, and by what the sum is divided."""
    if config.normaliser == "token":
        return weights, jnp.sum(weights)
    tokens = by_document(weights, batch, documents)
    answers = jnp.sum((tokens > 0).astype(jnp.float32))
    if config.longest is not None:
        return weights, answers * config.longest
    return weights * to_tokens(1 / jnp.maximum(tokens, 1.0), batch), answers


def to_tokens(values: Float[Array, "b k"], batch: Batch) -> Float[Array, "b s"]:
    """Each token its document's value; 0 for tokens of none."""
    segments = batch.get("segments")
    if segments is None:
        return jnp.broadcast_to(values[:, :1], batch["tokens"].shape)
    of = segments[:, None] == jnp.arange(values.shape[1])[:, None]
    return jnp.sum(jnp.where(of, values[..., None], 0.0), axis=1)


def _check_batch(batch: Batch, config: PolicyConfig) -> None:
    if ADVANTAGES not in batch:
        raise InputError(
            f"policy_loss: the batch has no '{ADVANTAGES}'; add a number for each token, as"
            " group_advantages makes them of rewards"
        )
    if config.divergence and REFERENCE_LOGPS not in batch:
        raise InputError(
            f"policy_loss: the batch has no '{REFERENCE_LOGPS}', which a divergence is told by;"
            " give boost what reference_options() returns, or policy.divergence 0"
        )
