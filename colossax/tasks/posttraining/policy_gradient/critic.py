"""A critic: what answers will be worth, token by token, and advantages made of it (PPO)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from colossax.errors import InputError
from colossax.sharding import constrain, current_order
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.heads import values_of_tokens
from colossax.tasks.next_token import real_tokens
from colossax.tasks.posttraining.answers import REFERENCE_LOGPS, named
from colossax.tasks.posttraining.config import CRITIC, REFERENCE, PolicyConfig
from colossax.tasks.posttraining.policy_gradient.loss import (
    ADVANTAGES,
    ENGINE_LOGPS,
    OLD_LOGPS,
    clipped_value_loss,
    kl_estimate,
    policy_loss,
    with_old_logps,
)
from colossax.tasks.posttraining.reference import said_by_reference
from colossax.typing import Batch

REWARDS = "rewards"
"""Array of a batch, `[b, s]` float32: what each target that is told earns; an answer's reward is
that of its last one."""

OLD_VALUES, RETURNS = "old_values", "returns"
"""Arrays of the prepared batch, `[b, s]` float32: what the critic expected before each target, and
what it learns."""

_LOGPS = "logps_before"
"""Array of the prepared batch: the policy's own log-probabilities, where a reference is asked and
`old_logps` are not there."""


def actor_critic_loss(config: PolicyConfig, *, documents: int) -> Loss:
    """`policy_loss` of one model and `value` times `clipped_value_loss` of another, the critic.

    For models `{"policy": ..., "critic": ...}` with `critic_options`: the critic has a head of one
    number for each token, `HeadConfig(outputs=1)`.

    Args:
        config: Which.
        documents: Prompts with their answer in each row.

    Raises:
        InputError: See `policy_loss`; when traced, a model or an array of the batch is missing.

    Cost: a step of each model.
    Source: Schulman et al. 2017, PPO; Ouyang et al. 2022, InstructGPT.
    """
    # What a divergence costs is a part of the rewards here.
    inner = policy_loss(dataclasses.replace(config, divergence=0.0), documents=documents)

    @any_order
    def loss(models: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        terms, metrics = inner(models, batch, row_keys=row_keys)
        for name in (OLD_VALUES, RETURNS):
            if name not in batch:
                raise InputError(
                    f"actor_critic_loss: the batch has no '{name}'; give boost what"
                    " critic_options() returns"
                )
        weights = batch["weights"].astype(jnp.float32)
        critic = named(models, CRITIC, "that tells values")
        values, counted = values_of_tokens(critic, batch, row_keys)
        for name, coefficient in getattr(critic, "auxiliary", {}).items():
            terms[f"critic_{name}"] = (jnp.sum(counted[name]), real_tokens(batch), coefficient)
        returns = jnp.where(weights > 0, batch[RETURNS], 0.0)
        total, told = clipped_value_loss(
            values, batch[OLD_VALUES], returns, weights, clip=config.value_clip
        )
        terms["value"] = (total, told, config.value)
        off = jnp.square(values - returns) * weights
        metrics |= {
            "return": (jnp.sum(returns * weights), told),
            "value_error": (jnp.sum(off), told),
        }
        if REFERENCE_LOGPS in batch:
            logps = batch[OLD_LOGPS if OLD_LOGPS in batch else _LOGPS]
            further = jnp.where(weights > 0, logps - batch[REFERENCE_LOGPS], 0.0)
            metrics["kl_k1"] = (jnp.sum(further * weights), told)
            metrics["kl_k3"] = (jnp.sum(kl_estimate(further, "k3") * weights), told)
        return terms, metrics

    return loss


def critic_options(config: PolicyConfig, *, again: bool = False) -> dict[str, Any]:
    """Fields of `StepOptions` that `actor_critic_loss` asks for.

    A batch has `rewards`; before a step is made of it, the critic's values are taken, of each
    reward `divergence` times an estimate of how far the policy is from its reference is taken off,
    and `gae` of both makes `advantages`, whitened over the global batch if that is asked for. A
    batch that has `returns` already, as `step.prepare` makes it, is left as it is.

    Args:
        config: Of the loss.
        again: See `policy_options`.

    Raises:
        InputError: When traced: a model or an array of the batch is missing.

    Cost: a forward pass of the critic over the global batch; with a divergence also of policy and
    reference. 4 bytes per token for each array.
    Source: Schulman et al. 2015 (GAE); Ziegler et al. 2019 (the divergence as a part of rewards).
    """

    def prepare(models: Any, batch: Batch) -> Batch:
        if RETURNS in batch:
            return batch
        if REWARDS not in batch:
            raise InputError(
                f"critic_options: the batch has no '{REWARDS}'; add a number for each token, an"
                " answer's reward at its last one"
            )
        made = dict(with_old_logps(models, batch, config) if again else batch)
        told = batch["weights"] > 0
        rewards = jnp.where(told, batch[REWARDS], 0.0)
        if config.divergence:
            logps = with_old_logps(models, made, config)[OLD_LOGPS]
            if not again:  # else the ratio would be 1 up to rounding alone
                made[_LOGPS] = logps
            made[REFERENCE_LOGPS] = said_by_reference(models, batch, config.temperature)
            further = jnp.where(told, logps - made[REFERENCE_LOGPS], 0.0)
            rewards = rewards - config.divergence * kl_estimate(further, config.estimator)
        values, _ = values_of_tokens(named(models, CRITIC, "that tells values"), batch)
        values = jnp.where(told, values, 0.0)
        segments = batch.get("segments", jnp.zeros(told.shape, jnp.int32))
        advantages = gae_of_rows(
            rewards, values, told, segments, discount=config.discount, decay=config.decay
        )
        made[OLD_VALUES], made[RETURNS] = values, advantages + values
        made[ADVANTAGES] = _whitened(advantages, told) if config.whitened else advantages
        return made

    names = [OLD_VALUES, RETURNS, ADVANTAGES, REWARDS, ENGINE_LOGPS]
    names += [OLD_LOGPS] if again else []
    if config.divergence:
        names += [_LOGPS, REFERENCE_LOGPS]
    return {
        "prepare": prepare,
        "trainable": lambda info: info.model != REFERENCE,
        "batch_dims": dict.fromkeys(names, ("batch", "seq")),
    }


def gae_of_rows(
    rewards: Float[Array, "b s"],
    values: Float[Array, "b s"],
    told: Array,
    segments: Int[Array, "b s"],
    *,
    discount: float,
    decay: float,
) -> Float[Array, "b s"]:
    """`gae` of the told tokens of each document of rows, in whatever order tokens lie.

    Args:
        rewards: Of tokens.
        values: Of tokens.
        told: Bool `[b, s]`; other tokens have no advantage, and lie between none.
        segments: Number of each token's document.
        discount: gamma.
        decay: lambda.

    Cost: s steps of b numbers each, on every device that shares the rows.
    """
    places = current_order().indices(told.shape[1])
    natural = np.argsort(places)
    columns = [constrain(x[:, natural], "batch", None).T for x in (rewards, values, told, segments)]

    def before(carry: Any, token: Any) -> tuple[Any, Array]:
        reward, value, is_told, document = token
        behind, value_behind, of = carry
        follows = (of == document).astype(jnp.float32)
        ahead = reward + discount * follows * value_behind - value
        own = ahead + discount * decay * follows * behind
        after = (own, value, document)
        carry = jax.tree.map(lambda new, old: jnp.where(is_told, new, old), after, carry)
        return carry, jnp.where(is_told, own, 0.0)

    zeros = jnp.zeros_like(columns[0][0])
    none = jnp.full_like(columns[3][0], -1)
    _, found = jax.lax.scan(before, (zeros, zeros, none), tuple(columns), reverse=True)
    return found.T[:, places]


def _whitened(advantages: Float[Array, "b s"], told: Array) -> Float[Array, "b s"]:
    """See `whitened`."""
    weights = told.astype(jnp.float32)
    count = jnp.maximum(jnp.sum(weights), 1.0)
    centred = advantages - jnp.sum(advantages * weights) / count
    spread = jnp.sqrt(jnp.sum(jnp.square(centred) * weights) / count)
    return jnp.where(told, centred / (spread + 1e-8), 0.0)
