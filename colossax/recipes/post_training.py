"""Recipes that go on with a checkpoint's model: on conversations, or on answers of its own."""

import dataclasses

from colossax.config import OffloadConfig
from colossax.nn import AdapterConfig
from colossax.recipes.small import finetune
from colossax.tasks import (
    DataConfig,
    ObjectiveConfig,
    PolicyConfig,
    RolloutConfig,
    TrainConfig,
)


def sft() -> TrainConfig:
    """Teach the model of a checkpoint (`--init`) what assistants say in your conversations.

    `--data` is JSONL, JSON, Parquet or Arrow of `messages`, ShareGPT's `conversations`, Alpaca's
    `instruction` and `output`, or `prompt` and `completion`. The model here only stands for the
    checkpoint's.
    """
    return _post_training("sft", peak_lr=1e-5)


def distill() -> TrainConfig:
    """Teach a checkpoint's model to say of your conversations what a larger one would say.

    `--data` is as `sft` takes it, `--objective.teacher` the checkpoint of the larger one, which has
    the same tokenizer.
    """
    return _post_training("distill", peak_lr=1e-5)


def reward() -> TrainConfig:
    """Teach a checkpoint's model to tell what an answer is worth, on pairs as `dpo`.

    It is given a head that tells one number of an answer's last token.
    """
    return _post_training("reward", peak_lr=1e-5)


def dpo() -> TrainConfig:
    """Direct preference optimisation on pairs: `prompt`, `chosen`, `rejected`.

    The reference is the model without its adapter (`--adapter.rank`).
    """
    return _post_training("dpo", peak_lr=5e-6)


def ipo() -> TrainConfig:
    """Identity preference optimisation, on pairs as `dpo`."""
    return _post_training("ipo", peak_lr=5e-6)


def simpo() -> TrainConfig:
    """Simple preference optimisation on pairs, which needs no reference."""
    return _post_training("simpo", peak_lr=1e-6)


def orpo() -> TrainConfig:
    """Odds ratio preference optimisation on pairs, whose chosen answers are learned too."""
    return _post_training("orpo", peak_lr=8e-6)


def kto() -> TrainConfig:
    """Kahneman-Tversky optimisation on answers that are good or bad: a conversation and a `label`.

    The reference is the model without its adapter (`--adapter.rank`).
    """
    return _post_training("kto", peak_lr=5e-6)


def grpo() -> TrainConfig:
    """Group relative policy optimisation: the model answers prompts, a function of yours rewards.

    `--data` is JSONL, JSON, Parquet or Arrow of prompts, `--rollout.rewards` the function.
    """
    config = _post_training("grpo", peak_lr=1e-6)
    return config.replace(
        data=DataConfig(
            seq_len=256, global_batch=32, validation_fraction=0.05, validation_batches=4
        ),
        objective=ObjectiveConfig(name="grpo", documents=1),
    )


def ppo() -> TrainConfig:
    """Proximal policy optimisation: as `grpo`, with a critic that learns what answers are worth.

    It starts from the layers of `--init`, or from `--policy.critic`, as a model that `reward`
    trained; the answers are held against the reference by `--policy.divergence`.
    """
    config = grpo()
    return config.replace(
        recipe="ppo",
        objective=dataclasses.replace(config.objective, name="ppo"),
        rollout=RolloutConfig(group=1),
        policy=PolicyConfig(normaliser="token", estimator="k1"),
    )


def _post_training(name: str, *, peak_lr: float) -> TrainConfig:
    config, objective = finetune(), ObjectiveConfig(name=name)
    return config.replace(
        recipe=name,
        plan=config.plan.replace(offload=OffloadConfig()),
        objective=objective,
        adapter=AdapterConfig(rank=16 if objective.with_reference else 0),
        optimizer=dataclasses.replace(config.optimizer, peak_lr=peak_lr),
    )
