"""Captions that a decoder writes of images which stand among its tokens, as a task."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from colossax.config import to_json
from colossax.models import config_to_json, maker
from colossax.nn import with_adapter
from colossax.optim import averaged
from colossax.processes.group import Group
from colossax.step.options import StepOptions
from colossax.tasks.config import TrainConfig, train_config_to_json
from colossax.tasks.image_sets import IMAGE_SETS
from colossax.tasks.image_task import identity, introduction, opened
from colossax.tasks.image_text.templates import END, TEMPLATES
from colossax.tasks.images import NO_LABEL, SplitImages
from colossax.tasks.next_token import mean_loss, next_token_loss
from colossax.tasks.optimizer import make_optimizer, make_schedule
from colossax.tasks.task import Task
from colossax.typing import PIXELS, Batch

FLOPS_FORMULA = (
    "MFU = tokens/s x FLOPs/token / (devices x peak), FLOPs of a row = 6 per matmul weight and"
    " token, of the encoder for each patch, + 12 heads head_dim per pair in each attention;"
    " recomputation is not counted"
)

VALIDATION_LOSS, CAPTION_ENTROPY = "validation_loss", "caption_entropy"
"""Of held-out images, and what it is held against: of classes alone; nats per token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """Rows of an image's places, then the bytes of its caption and what ends it.

    Attributes:
        split: The images.
        captions: Of their classes.
        places: Tokens of an image.
        vocab: Of the model, whose tokens from here on are places.
        length: Tokens of a row.
    """

    split: SplitImages
    captions: tuple[str, ...]
    places: int
    vocab: int
    length: int

    def batches(self, start: int) -> Iterator[Batch]:
        """Endless global batches from number `start` on."""
        return map(self._rows, self.split.batches(start))

    def validation(self) -> Iterator[Batch]:
        """Batches of what is held out; rows that fill the last one up count for nothing."""
        return map(self._rows, self.split.validation())

    @property
    def mean_written(self) -> float:
        """Tokens that are written of a held-out image, on average."""
        labels = self.split.held_out.labels.tolist()
        return float(np.mean([len(self._spelt(label)) for label in labels]))

    def _spelt(self, label: int) -> list[int]:
        return [*self.captions[label].encode(), END]

    def _rows(self, batch: Batch) -> Batch:
        labels = batch["labels"]
        shape = (len(labels), self.length)
        tokens, targets = (np.full(shape, END, np.int32) for _ in range(2))
        weights = np.zeros(shape, np.float32)
        tokens[:, : self.places] = self.vocab + np.arange(self.places)
        for row, label in enumerate(labels.tolist()):
            if label == NO_LABEL:
                continue
            spelt, first = self._spelt(label), self.places - 1
            told = slice(first, first + len(spelt))
            tokens[row, self.places : first + len(spelt)] = spelt[:-1]
            targets[row, told], weights[row, told] = spelt, 1
        pixels = batch[PIXELS][:, None]
        return {PIXELS: pixels, "tokens": tokens, "targets": targets, "weights": weights}


def written_task(config: TrainConfig, group: Group) -> Task:
    """The task that `data.images` asks for of a decoder that reads images.

    Args:
        config: The run.
        group: The processes that train.

    Raises:
        InputError: No such optimizer, or numbers that it cannot take.
    """
    rows = functools.cache(lambda: group.together(lambda: written(config)))
    data, averages = config.data, config.optimizer.averages
    adapter = {"adapter": to_json(config.adapter)} if config.adapter else {}
    return Task(
        name=config.recipe,
        make_model=with_adapter(maker(config.model), config.adapter),
        optimizer=make_optimizer(config.optimizer, config.schedule_steps),
        loss=next_token_loss(),
        shapes=written_shapes(config),
        options=StepOptions(clip_norm=config.clip_norm),
        batches=lambda step, start: contextlib.nullcontext(rows().batches(start)),
        judged=averaged if averages else lambda state: state,
        evaluators={
            VALIDATION_LOSS: lambda step, state: {
                VALIDATION_LOSS: mean_loss(step.evaluate, state, rows().validation())
            }
        },
        learning_rate=make_schedule(config.optimizer, config.schedule_steps),
        tokens=data.global_batch * data.seq_len,
        flops=config.model.train_flops(1, data.seq_len, frozen=bool(config.adapter))
        * data.global_batch,
        flops_formula=FLOPS_FORMULA,
        unit="nats per token",
        baselines=lambda: {
            CAPTION_ENTROPY: rows().split.training.class_entropy / rows().mean_written
        },
        identity=lambda: {
            **identity(config, rows().split),
            **adapter,
            "data.seq_len": data.seq_len,
            "data.captions": rows().captions[0],
        },
        documents=lambda: {"model": config_to_json(config.model), **adapter},
        asked=lambda plan: train_config_to_json(config.replace(plan=plan)),
        introduction=lambda: _introduction(config, rows()),
        conclusion=_conclusion,
    )


def written_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    data = config.data
    assert data.images is not None
    images, row = IMAGE_SETS[data.images], (data.global_batch, data.seq_len)
    size = (data.global_batch, 1, images.height, images.width, images.channels)
    return {
        PIXELS: jax.ShapeDtypeStruct(size, np.float32),
        "tokens": jax.ShapeDtypeStruct(row, np.int32),
        "targets": jax.ShapeDtypeStruct(row, np.int32),
        "weights": jax.ShapeDtypeStruct(row, np.float32),
    }


def written(config: TrainConfig) -> Written:
    """The rows of a run."""
    data = config.data
    assert data.images is not None
    return Written(
        split=opened(config),
        captions=tuple(TEMPLATES[0].format(name) for name in IMAGE_SETS[data.images].names),
        places=config.model.places,
        vocab=config.model.decoder().vocab,
        length=data.seq_len,
    )


def _introduction(config: TrainConfig, rows: Written) -> list[str]:
    first, *rest = introduction(config, rows.split)
    return [first, f"of each '{rows.captions[-1]}' or another number is written", *rest]


def _conclusion(final: Mapping[str, Any]) -> list[str]:
    loss = final[VALIDATION_LOSS]
    if loss is None:
        return []
    return [f"validation loss {loss:.4f}; classes alone give {final[CAPTION_ENTROPY]:.4f}"]
