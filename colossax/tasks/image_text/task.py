"""Images and captions as a task: which caption is whose, and classes told by their captions."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from colossax.models import config_to_json, maker
from colossax.optim import averaged
from colossax.processes.group import Group
from colossax.step.options import StepOptions
from colossax.tasks.config import TrainConfig, train_config_to_json
from colossax.tasks.image_sets import IMAGE_SETS
from colossax.tasks.image_task import (
    CLASS_ENTROPY,
    VALIDATION_ACCURACY,
    VALIDATION_LOSS,
    identity,
    image_shapes,
    introduction,
    opened,
    validated,
)
from colossax.tasks.image_text.captions import Captioned
from colossax.tasks.image_text.loss import image_text_loss
from colossax.tasks.image_text.templates import TEMPLATES
from colossax.tasks.optimizer import make_optimizer, make_schedule
from colossax.tasks.task import Task

FLOPS_FORMULA = (
    "MFU = images/s x FLOPs/pair / (devices x peak), FLOPs/pair = of each encoder tokens x (6 per"
    " matmul weight + 12 layers heads head_dim keys for attention); scores and recomputation are"
    " not counted"
)


def caption_task(config: TrainConfig, group: Group) -> Task:
    """The task that `data.images` asks for of a model of two encoders; `tokens` are its images.

    Args:
        config: The run.
        group: The processes that train.

    Raises:
        InputError: No such optimizer, or numbers that it cannot take.
    """
    data = config.data
    pairs = functools.cache(lambda: group.together(lambda: _captioned(config)))
    form = "softmax" if config.model.shift is None else "sigmoid"
    averages = config.optimizer.averages
    told = {"contrastive": VALIDATION_LOSS, "accuracy": VALIDATION_ACCURACY}

    return Task(
        name=config.recipe,
        make_model=maker(config.model),
        optimizer=make_optimizer(config.optimizer, config.schedule_steps),
        loss=image_text_loss(form=form),
        shapes=pair_shapes(config),
        options=StepOptions(clip_norm=config.clip_norm),
        batches=lambda step, start: contextlib.nullcontext(pairs().batches(start)),
        judged=averaged if averages else lambda state: state,
        evaluators={
            VALIDATION_LOSS: lambda step, state: validated(
                pairs().validation(), step, state, names=told
            )
        },
        learning_rate=make_schedule(config.optimizer, config.schedule_steps),
        tokens=data.global_batch,
        counted="images",
        flops=config.model.train_flops(data.seq_len) * data.global_batch,
        flops_formula=FLOPS_FORMULA,
        unit="nats per image",
        baselines=lambda: {CLASS_ENTROPY: pairs().split.training.class_entropy},
        identity=lambda: {
            **identity(config, pairs().split),
            "data.seq_len": data.seq_len,
            "data.captions": pairs().fingerprint,
        },
        documents=lambda: {"model": config_to_json(config.model)},
        asked=lambda plan: train_config_to_json(config.replace(plan=plan)),
        introduction=lambda: _introduction(config, pairs()),
        conclusion=_conclusion,
    )


def pair_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    shapes = image_shapes(config)
    del shapes["labels"]
    row = jax.ShapeDtypeStruct((config.data.global_batch, config.data.seq_len), np.int32)
    return {**shapes, "tokens": row, "segments": row}


def _captioned(config: TrainConfig) -> Captioned:
    assert config.data.images is not None
    return Captioned(
        split=opened(config),
        names=IMAGE_SETS[config.data.images].names,
        length=config.data.seq_len,
        causal=config.model.text_encoder().causal,
    )


def _introduction(config: TrainConfig, pairs: Captioned) -> list[str]:
    first, *rest = introduction(config, pairs.split)
    told = f"captions of {len(TEMPLATES)} forms; classes are told as '{pairs.class_captions[-1]}'"
    return [first, told, *rest]


def _conclusion(final: Mapping[str, Any]) -> list[str]:
    loss, right = final[VALIDATION_LOSS], final[VALIDATION_ACCURACY]
    if loss is None:
        return []
    return [
        f"validation loss {loss:.4f}, {right:.1%} of held-out images told right by captions;"
        f" classes alone give {final[CLASS_ENTROPY]:.4f}"
    ]
