"""A run that learns from conversations by an objective."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from colossax.models import maker
from colossax.nn import with_adapter, with_new_head
from colossax.processes.group import Group
from colossax.step.loss import Loss
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig
from colossax.tasks.distillation import soft_target_loss, soft_target_options
from colossax.tasks.heads import preference_loss
from colossax.tasks.next_token import next_token_loss
from colossax.tasks.posttraining.answers import telling
from colossax.tasks.posttraining.config import LEARNER, ObjectiveConfig, deciding
from colossax.tasks.posttraining.conversations import (
    Conversations,
    Source,
    identified,
    kept_documents,
    open_conversations,
    row_shapes,
)
from colossax.tasks.posttraining.kto import kto_loss, kto_options
from colossax.tasks.posttraining.pairs import dpo_loss, ipo_loss, orpo_loss, simpo_loss
from colossax.tasks.posttraining.policy_gradient.task import with_rollouts
from colossax.tasks.posttraining.reference import reference_options
from colossax.tasks.posttraining.roles import teacher_of, which_beside, with_beside
from colossax.tasks.task import Task
from colossax.typing import TrainState

VALIDATION_LOSS, ACCURACY = "validation_loss", "validation_accuracy"
"""Mean of the objective over what is held out; share of answers on the right side."""

_PER_TOKEN = ("sft", "distill")
"""Objectives that are a mean over tokens, and put no answer on a side."""

_FORWARDS = {"dpo": 1, "ipo": 1, "kto": 3}
"""Passes without gradients: the reference's, of kto also both models' over other answers."""

_FORMULA = (
    "MFU = tokens/s x FLOPs/token / (devices x peak), FLOPs/token = {each} per matmul weight{more}"
    " + 12 layers heads head_dim keys for attention; recomputation is not counted"
)


def with_objective(
    task: Task, config: TrainConfig, group: Group, identity: Callable[..., dict[str, Any]]
) -> Task:
    """The task of a run on text, with conversations and an objective in place of text; or with
    prompts, where the model gives the answers itself.

    Args:
        task: Of the model.
        config: Of the run, with an objective.
        group: The processes that train.
        identity: Of a run, from `text` and `tokenizer`, their fingerprints.
    """
    if config.objective.on_rollouts:
        return with_rollouts(task, config, group, identity)
    opened = functools.cache(lambda: open_conversations(config, group))
    objective = config.objective
    settled = {"beta": objective.coefficient, "margin": objective.ahead}
    more = {"objective": {**deciding(objective, objective.name), **settled}}
    if objective.name == "reward":
        make_model = with_adapter(with_new_head(maker(config.model)), config.adapter)
        task = dataclasses.replace(task, make_model=make_model)

    def asked() -> dict[str, Any]:
        found = opened()
        beside = group.from_first(lambda: which_beside(config, found.tokenizer))
        return {**identified(found, identity, more), **beside}

    return dataclasses.replace(
        task,
        make_model=with_beside(config, task.make_model),
        loss=objective_loss(objective, z_loss=config.z_loss),
        options=dataclasses.replace(task.options, **_options(objective)),
        shapes=row_shapes(config),
        batches=lambda step, start: opened().batches(step, start),
        evaluators={VALIDATION_LOSS: lambda step, state: _validated(opened(), step, state)},
        flops=_flops(config),
        flops_formula=_formula(config),
        unit="nats per token" if objective.name in _PER_TOKEN else f"loss of {objective.name}",
        baselines=dict,
        identity=asked,
        documents=lambda: kept_documents(config, opened()),
        introduction=lambda: [f"data: {line}" for line in opened().description],
        conclusion=lambda final: _conclusion(final),
        complete=None,
    )


def objective_loss(objective: ObjectiveConfig, *, z_loss: float = 0.0) -> Loss:
    """The loss of an objective's configuration, `telling`.

    Args:
        objective: Which, and its numbers.
        z_loss: Of sft; see `next_token_loss`.
    """
    how: dict[str, Any] = {"documents": objective.documents, "beta": objective.coefficient}
    weights = {"desirable": objective.desirable, "undesirable": objective.undesirable}
    makers: dict[str, Callable[[], Loss]] = {
        "sft": lambda: next_token_loss(z_loss=z_loss),
        "distill": lambda: soft_target_loss(
            text=objective.text, temperature=objective.temperature, student=LEARNER
        ),
        "reward": lambda: preference_loss(documents=objective.documents, margin=objective.ahead),
        "dpo": lambda: dpo_loss(**how),
        "ipo": lambda: ipo_loss(**how),
        "simpo": lambda: simpo_loss(**how, margin=objective.ahead),
        "orpo": lambda: orpo_loss(**how),
        "kto": lambda: kto_loss(**how, **weights),
    }
    return telling(makers[objective.name]())


def _options(objective: ObjectiveConfig) -> dict[str, Any]:
    if objective.name == "kto":
        return kto_options(documents=objective.documents)
    if objective.name == "distill":
        return soft_target_options()
    return reference_options() if objective.with_reference else {}


def _validated(opened: Conversations, step: Step, state: TrainState) -> dict[str, float]:
    """Means over the held-out batches, by the weights of the sources."""
    found: dict[str, float] = {}
    for source in opened.sources:
        for name, mean in _means(opened, source, step, state).items():
            found[name] = found.get(name, 0.0) + source.weight * mean
    return found


def _means(
    opened: Conversations, source: Source, step: Step, state: TrainState
) -> dict[str, float]:
    objective = opened.config.objective
    coefficients = {
        "orpo": {"cross_entropy": 1.0, "odds": objective.coefficient},
        "sft": {"cross_entropy": 1.0},
        "reward": {"preference": 1.0},
        "distill": {"divergence": 1 - objective.text, "cross_entropy": objective.text},
    }.get(objective.name, {objective.name: 1.0})
    coefficients = {name: by for name, by in coefficients.items() if by}
    per_token = objective.name in _PER_TOKEN
    names = [*coefficients, *(() if per_token else ("accuracy",))]
    sums = {name: np.zeros(2) for name in names}
    for batch in opened.held_out(step, source):
        totals = step.evaluate(state, batch)
        for name in names:
            sums[name] += np.asarray(jax.device_get(totals[name]), np.float64)
    means = {name: total / max(weight, 1e-30) for name, (total, weight) in sums.items()}
    loss = sum(by * means[name] for name, by in coefficients.items())
    return {VALIDATION_LOSS: loss, **({ACCURACY: means["accuracy"]} if "accuracy" in means else {})}


def _flops(config: TrainConfig) -> int:
    """Of a step: both passes of the policy, and those without gradients."""
    data, sizes = config.data, config.model.decoder()
    learning = sizes.train_flops_per_token(data.seq_len, frozen=bool(config.adapter))
    forward = sizes.train_flops_per_token(data.seq_len) / 3
    each = learning + _FORWARDS.get(config.objective.name, 0) * forward
    if config.objective.name == "distill":
        each += teacher_of(config).decoder().train_flops_per_token(data.seq_len) / 3
    return int(each * data.seq_len * data.global_batch)


def _formula(config: TrainConfig) -> str:
    beside = 2 * _FORWARDS.get(config.objective.name, 0)
    more = f" and {beside} for passes without gradients" if beside else ""
    more += " and 2 of the teacher's" if config.objective.name == "distill" else ""
    more += ", the adapter's own left out," if config.adapter else ""
    return _FORMULA.format(each=4 if config.adapter else 6, more=more)


def _conclusion(final: Mapping[str, Any]) -> list[str]:
    loss, accuracy = final.get(VALIDATION_LOSS), final.get(ACCURACY)
    if loss is None:
        return []
    if accuracy is None:
        return [f"validation loss {loss:.4f} per token of an answer"]
    return [f"validation loss {loss:.4f}; {accuracy:.1%} of what is held out on the right side"]
