"""A run that learns from answers of its own, rewarded by a function or a model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from colossax.models import config_to_json
from colossax.processes.group import Group
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig
from colossax.tasks.posttraining.answers import telling
from colossax.tasks.posttraining.config import CRITIC, check_rollouts, deciding
from colossax.tasks.posttraining.conversations import identified, kept_documents
from colossax.tasks.posttraining.policy_gradient.asked import Asked, open_prompts
from colossax.tasks.posttraining.policy_gradient.critic import actor_critic_loss, critic_options
from colossax.tasks.posttraining.policy_gradient.loss import policy_loss, policy_options
from colossax.tasks.posttraining.policy_gradient.rollouts import Rollouts
from colossax.tasks.posttraining.policy_gradient.rows import given_numbers
from colossax.tasks.posttraining.rewards.judge import Judge
from colossax.tasks.posttraining.roles import critic_of, which_beside, with_beside
from colossax.tasks.task import Task
from colossax.typing import TEXT_BATCH_DIMS, TrainState

VALIDATION_REWARD, VALIDATION_TOKENS = "validation_reward", "validation_answer_tokens"
"""Means over answers to held-out prompts."""

VALIDATION_FAILURES = "validation_not_judged"
"""Of those, how many could not be judged."""


def with_rollouts(
    task: Task, config: TrainConfig, group: Group, identity: Callable[..., dict[str, Any]]
) -> Task:
    """The task of a run on text, with prompts, answers and rewards in place of text.

    Args:
        task: Of the model, with its FLOPs of a step, answers' own left out.
        config: Of the run, with an objective on rollouts.
        group: The processes that train.
        identity: Of a run, from `text` and `tokenizer`, their fingerprints.

    Raises:
        InputError: See `check_rollouts`.
    """
    check_rollouts(config)
    judge, name = config.rollout.judge, config.objective.name

    @functools.cache
    def opened() -> Asked:
        found = open_prompts(config, group)
        step = None if judge is None else group.from_first(lambda: Judge(judge).step)
        group.together(lambda: rollouts.answering.check(step))
        return found

    rollouts = Rollouts(config, opened, group)
    critic = critic_of(config) if name == "ppo" else None
    loss = policy_loss if critic is None else actor_critic_loss
    # Where and by how many answers are written and judged changes none of them.
    of_rollouts = ["rewards", "group", "max_tokens", "scaled", "failed"]
    if config.rollout.updates > 1:
        of_rollouts += ["batches", "epochs"]
    more: dict[str, Any] = {
        "objective": {**deciding(config.objective, name), "margin": config.objective.ahead},
        "policy": deciding(config.policy, name),
        "rollout": {field: getattr(config.rollout, field) for field in of_rollouts},
    }

    def asked() -> dict[str, Any]:
        tokenizer = opened().tokenizer
        found = identified(opened(), identity, more)
        found |= group.from_first(lambda: which_beside(config, tokenizer))
        if judge is not None:
            found["rollout.judge"] = [judge, rollouts.answering.judged_at]
        return found

    return dataclasses.replace(
        task,
        make_model=with_beside(config, task.make_model),
        loss=telling(loss(config.policy, documents=config.objective.documents)),
        options=dataclasses.replace(task.options, **_options(config)),
        shapes=_shapes(config),
        flops=task.flops + _flops_beside(config, critic),
        flops_formula=_formula(task, config),
        batches=rollouts.batches,
        callbacks=(rollouts,),
        evaluators={VALIDATION_REWARD: lambda step, state: _validated(rollouts, step, state)},
        unit="reward",
        drawn=("reward", VALIDATION_REWARD),
        baselines=dict,
        identity=asked,
        documents=lambda: {
            **kept_documents(config, opened()),
            **({} if critic is None else {"models": {CRITIC: config_to_json(critic)}}),
        },
        introduction=lambda: [f"data: {line}" for line in opened().description],
        conclusion=_conclusion,
        complete=None,
    )


def _options(config: TrainConfig) -> dict[str, Any]:
    options = critic_options if config.objective.name == "ppo" else policy_options
    return options(config.policy, again=config.rollout.updates > 1)


def _shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    size = (config.data.global_batch, config.data.seq_len)
    numbers = given_numbers(config)
    return {
        name: jax.ShapeDtypeStruct(size, np.float32 if name in ("weights", *numbers) else np.int32)
        for name in (*TEXT_BATCH_DIMS, *numbers)
    }


def _asked_before(config: TrainConfig) -> list[str]:
    """Models that say of answers, before these are learned from, what they make of them.

    Of answers that are learned from once the policy says it in the step, if no critic is to know.
    """
    ppo, diverges = config.objective.name == "ppo", config.policy.divergence > 0
    of_policy = config.rollout.updates > 1 or (ppo and diverges)
    asked = {"critic": ppo, "policy": of_policy, "reference": diverges}
    return [name for name, is_asked in asked.items() if is_asked]


def _formula(task: Task, config: TrainConfig) -> str:
    critic = ", the critic's likewise" if config.objective.name == "ppo" else ""
    asked, epochs = _asked_before(config), config.rollout.epochs
    once = f", once for {epochs} steps" if epochs > 1 else ""
    before = f", and 2 before for {' and '.join(asked)} each{once}" if asked else ""
    uncounted = "what writes the answers is not counted, their time is"
    return f"{task.flops_formula}{critic}{before}; {uncounted}"


def _flops_beside(config: TrainConfig, critic: Any) -> int:
    """Of a step: all of a critic, and what models are asked before."""
    seq_len = config.data.seq_len

    def forward(model: Any) -> float:
        return model.decoder().train_flops_per_token(seq_len) / 3

    each = 0.0 if critic is None else 3 * forward(critic)
    for name in _asked_before(config):
        each += forward(critic if name == "critic" else config.model) / config.rollout.epochs
    return int(config.data.global_batch * seq_len * each)


def _validated(rollouts: Rollouts, step: Step, state: TrainState) -> dict[str, float]:
    judged = rollouts.validated(step, state)
    lengths = [len(one) for one in judged.tokens]
    return {
        VALIDATION_REWARD: float(judged.rewards.mean()),
        VALIDATION_TOKENS: float(np.mean(lengths)),
        VALIDATION_FAILURES: float(sum(judged.failures.values())),
    }


def _conclusion(final: Mapping[str, Any]) -> list[str]:
    reward = final.get(VALIDATION_REWARD)
    if reward is None:
        return []
    return [
        f"reward of answers to held-out prompts {reward:.4f} on average, of"
        f" {final[VALIDATION_TOKENS]:.1f} tokens"
    ]
