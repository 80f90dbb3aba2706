"""Images as a task: which class each is of, and how many of those held out are told right."""

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from colossax.models import config_to_json, maker
from colossax.optim import averaged
from colossax.processes.group import Group
from colossax.step.options import StepOptions
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig, train_config_to_json
from colossax.tasks.heads import classification_loss
from colossax.tasks.image_sets import IMAGE_SETS
from colossax.tasks.images import SplitImages, read_images
from colossax.tasks.optimizer import make_optimizer, make_schedule
from colossax.tasks.task import Task
from colossax.typing import PIXELS, Batch, TrainState

FLOPS_FORMULA = (
    "MFU = images/s x FLOPs/image / (devices x peak), FLOPs/image = tokens of an image x (6 per"
    " matmul weight + 12 layers heads head_dim tokens for attention); recomputation is not counted"
)

VALIDATION_LOSS, VALIDATION_ACCURACY = "validation_loss", "validation_accuracy"
_TOLD = {"cross_entropy": VALIDATION_LOSS, "accuracy": VALIDATION_ACCURACY}
CLASS_ENTROPY = "class_entropy"
"""Of held-out images: mean loss in nats, share told right; and what the loss is held against."""


def image_task(config: TrainConfig, group: Group) -> Task:
    """The task that a configuration with `data.images` asks for; a step's `tokens` are its images.

    Args:
        config: The run.
        group: The processes that train.

    Raises:
        InputError: No such optimizer, or numbers that it cannot take.
    """
    images = functools.cache(lambda: group.together(lambda: opened(config)))
    data, decoder = config.data, config.model.decoder()
    flops = decoder.train_flops_per_token(data.seq_len) * data.seq_len * data.global_batch
    averages = config.optimizer.averages

    return Task(
        name=config.recipe,
        make_model=maker(config.model),
        optimizer=make_optimizer(config.optimizer, config.schedule_steps),
        loss=classification_loss(),
        shapes=image_shapes(config),
        options=StepOptions(clip_norm=config.clip_norm),
        batches=lambda step, start: contextlib.nullcontext(images().batches(start)),
        judged=averaged if averages else lambda state: state,
        evaluators={
            VALIDATION_LOSS: lambda step, state: validated(images().validation(), step, state)
        },
        learning_rate=make_schedule(config.optimizer, config.schedule_steps),
        tokens=data.global_batch,
        counted="images",
        flops=flops,
        flops_formula=FLOPS_FORMULA,
        unit="nats per image",
        baselines=lambda: {CLASS_ENTROPY: images().training.class_entropy},
        identity=lambda: identity(config, images()),
        documents=lambda: {"model": config_to_json(config.model)},
        asked=lambda plan: train_config_to_json(config.replace(plan=plan)),
        introduction=lambda: introduction(config, images()),
        conclusion=_conclusion,
    )


def image_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    assert config.data.images is not None
    rows, images = config.data.global_batch, IMAGE_SETS[config.data.images]
    size = (rows, images.height, images.width, images.channels)
    return {
        PIXELS: jax.ShapeDtypeStruct(size, np.float32),
        "labels": jax.ShapeDtypeStruct((rows,), np.int32),
    }


def opened(config: TrainConfig) -> SplitImages:
    """The images of a run, read and split."""
    assert config.data.images is not None
    return SplitImages.of(read_images(config.data.images), config.data, config.seed)


def identity(config: TrainConfig, images: SplitImages) -> dict[str, Any]:
    """What decides a run's losses step by step, as JSON; the mesh does not."""
    data = config.data
    ema = config.optimizer.ema
    return {
        "seed": config.seed,
        "data.global_batch": data.global_batch,
        "data.validation_fraction": data.validation_fraction,
        "model": train_config_to_json(config)["model"],
        "optimizer.name": config.optimizer.name,
        "optimizer.state": config.optimizer.state,
        "optimizer.ema": "none" if ema is None else str(ema),
        "data.images": [data.images, images.training.fingerprint, images.held_out.fingerprint],
    }


def introduction(config: TrainConfig, images: SplitImages) -> list[str]:
    """For people, before training."""
    training, held_out = images.training, images.held_out
    classes, size = len(np.unique(training.labels)), " x ".join(map(str, training.pixels.shape[1:]))
    lines = [
        f"images: {len(training):,} of {size} in {classes} classes, {len(held_out):,} held out"
    ]
    if config.optimizer.averages:
        lines.append("validation is of averages of the parameters")
    return lines


def validated(
    batches: Iterable[Batch], step: Step, state: TrainState, *, names: Mapping[str, str] = _TOLD
) -> dict[str, float]:
    """Over all held-out images together.

    Args:
        batches: Of them.
        step: Its loss tells.
        state: That is judged.
        names: What the loss calls what is told, and what that is called here.
    """
    totals = {name: np.zeros(2) for name in names}
    for batch in batches:
        told = jax.device_get(step.evaluate(state, batch))
        for name in names:
            totals[name] += np.asarray(told[name], np.float64)
    return {ours: float(totals[name][0] / totals[name][1]) for name, ours in names.items()}


def _conclusion(final: Mapping[str, Any]) -> list[str]:
    loss, right = final[VALIDATION_LOSS], final[VALIDATION_ACCURACY]
    if loss is None:
        return []
    return [
        f"validation loss {loss:.4f}, {right:.1%} of held-out images told right; classes alone give"
        f" {final[CLASS_ENTROPY]:.4f}"
    ]
