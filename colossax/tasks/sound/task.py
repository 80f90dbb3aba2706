"""Sound as a task: the loss of the next token of what is written of a sound."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from colossax.config import to_json
from colossax.data import stack_rows
from colossax.data.sound.tones import NOTES, Tones
from colossax.models import config_to_json, maker
from colossax.nn import with_adapter
from colossax.optim import averaged
from colossax.step.options import StepOptions
from colossax.tasks.config import TrainConfig, train_config_to_json
from colossax.tasks.next_token import mean_loss, next_token_loss
from colossax.tasks.optimizer import make_optimizer, make_schedule
from colossax.tasks.sound.sets import SOUND_SETS
from colossax.tasks.task import Task
from colossax.typing import FRAMES, Batch

FLOPS_FORMULA = (
    "MFU = tokens/s x FLOPs/token / (devices x peak), FLOPs of a row = 6 per matmul weight and"
    " token, convolutions included, + 12 heads head_dim per pair in each attention; recomputation"
    " is not counted"
)

VALIDATION_LOSS, NAME_ENTROPY = "validation_loss", "name_entropy"
"""Mean loss of held-out sounds, and what it is held against: all names alike; nats per token."""


def sound_task(config: TrainConfig) -> Task:
    """The task that a configuration with `data.audio` asks for; a step's `tokens` are written.

    Raises:
        InputError: No such optimizer, or numbers that it cannot take.
    """
    data, averages = config.data, config.optimizer.averages
    rows = Rows.of(config)
    return Task(
        name=config.recipe,
        make_model=with_adapter(maker(config.model), config.adapter),
        optimizer=make_optimizer(config.optimizer, config.schedule_steps),
        loss=next_token_loss(z_loss=config.z_loss),
        shapes=sound_shapes(config),
        options=StepOptions(clip_norm=config.clip_norm),
        batches=lambda step, start: contextlib.nullcontext(rows.batches(start)),
        judged=averaged if averages else lambda state: state,
        evaluators={
            VALIDATION_LOSS: lambda step, state: {
                VALIDATION_LOSS: mean_loss(step.evaluate, state, rows.held_out())
            }
        },
        learning_rate=make_schedule(config.optimizer, config.schedule_steps),
        tokens=data.global_batch * data.seq_len,
        flops=_flops(config),
        flops_formula=FLOPS_FORMULA,
        unit="nats per token",
        baselines=lambda: {NAME_ENTROPY: float(np.log(len(NOTES)))},
        identity=lambda: _identity(config),
        documents=lambda: {
            "model": config_to_json(config.model),
            **({"adapter": to_json(config.adapter)} if config.adapter else {}),
        },
        asked=lambda plan: train_config_to_json(config.replace(plan=plan)),
        introduction=lambda: _introduction(config),
        conclusion=_conclusion,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Batches of a run; each is a function of its number alone, on every mesh.

    Attributes:
        training: Rows to train on, by the run's seed.
        validation: Those held out, the same for every seed.
        rows: Of a batch.
        held_out_batches: Of a validation.
    """

    training: Tones
    validation: Tones
    rows: int
    held_out_batches: int

    @classmethod
    def of(cls, config: TrainConfig) -> "Rows":
        """As a configuration asks."""
        data, decoder = config.data, config.model.decoder()
        how = {"mels": config.model.encoder().frames.mels}
        how |= {"start": decoder.start, "end": decoder.eos}
        return cls(
            training=Tones(**how, seed=config.seed),
            validation=Tones(**how, seed=0, part=1),
            rows=data.global_batch,
            held_out_batches=data.validation_batches,
        )

    def batches(self, start: int) -> Iterator[Batch]:
        """Endless global batches from number `start` on."""
        while True:
            yield self._batch(self.training, start)
            start += 1

    def held_out(self) -> Iterator[Batch]:
        """Batches of a validation."""
        return (self._batch(self.validation, number) for number in range(self.held_out_batches))

    def _batch(self, tones: Tones, number: int) -> Batch:
        return stack_rows(tones, range(number * self.rows, (number + 1) * self.rows))


def sound_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    data, mels = config.data, config.model.encoder().frames.mels
    assert data.audio is not None
    heard = (data.global_batch, SOUND_SETS[data.audio].frames, mels)
    written = (data.global_batch, data.seq_len)
    return {
        FRAMES: jax.ShapeDtypeStruct(heard, np.float32),
        "tokens": jax.ShapeDtypeStruct(written, np.int32),
        "targets": jax.ShapeDtypeStruct(written, np.int32),
        "weights": jax.ShapeDtypeStruct(written, np.float32),
    }


def _flops(config: TrainConfig) -> int:
    """Of a step, recomputation aside."""
    data = config.data
    assert data.audio is not None
    read, frozen = SOUND_SETS[data.audio].frames // 2, bool(config.adapter)
    return config.model.train_flops(read, data.seq_len, frozen=frozen) * data.global_batch


def _identity(config: TrainConfig) -> dict[str, Any]:
    """What decides a run's losses step by step, as JSON; the mesh does not."""
    data, ema = config.data, config.optimizer.ema
    return {
        "seed": config.seed,
        "data.global_batch": data.global_batch,
        "model": train_config_to_json(config)["model"],
        **({"adapter": to_json(config.adapter)} if config.adapter else {}),
        "optimizer.name": config.optimizer.name,
        "optimizer.state": config.optimizer.state,
        "optimizer.ema": "none" if ema is None else str(ema),
        "data.audio": data.audio,
    }


def _introduction(config: TrainConfig) -> list[str]:
    data = config.data
    assert data.audio is not None
    sounds = SOUND_SETS[data.audio]
    lines = [
        f"sound: {sounds.told}, {sounds.names} names, {sounds.frames} frames a row and"
        f" {sounds.written} tokens written"
    ]
    if config.optimizer.averages:
        lines.append("validation is of averages of the parameters")
    return lines


def _conclusion(final: Mapping[str, Any]) -> list[str]:
    loss = final[VALIDATION_LOSS]
    if loss is None:
        return []
    return [f"validation loss {loss:.4f}; names by chance give {final[NAME_ENTROPY]:.4f}"]
