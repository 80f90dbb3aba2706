"""Text as a task: the next token's loss on what a configuration says, and what is told of it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from colossax.config import to_json
from colossax.data import Tokenizer
from colossax.models import config_to_json, maker
from colossax.nn import DualEncoderConfig, SeeingConfig, with_adapter
from colossax.optim import averaged
from colossax.processes.group import Group
from colossax.step.options import StepOptions
from colossax.step.step import Step
from colossax.tasks.config import DataConfig, TrainConfig, train_config_to_json
from colossax.tasks.drafting.task import with_drafter
from colossax.tasks.heads import masked_token_loss
from colossax.tasks.image_task import image_task
from colossax.tasks.image_text.task import caption_task
from colossax.tasks.image_text.written import written_task
from colossax.tasks.initial import initial_tokenizer
from colossax.tasks.next_token import mean_loss, next_token_loss
from colossax.tasks.optimizer import make_optimizer, make_schedule
from colossax.tasks.posttraining.task import with_objective
from colossax.tasks.sound.task import sound_task
from colossax.tasks.task import Task
from colossax.tasks.text import Text, open_text
from colossax.typing import TEXT_BATCH_DIMS, Params, TrainState

FLOPS_FORMULA = (
    "MFU = tokens/s x FLOPs/token / (devices x peak), FLOPs/token = 6 per matmul weight"
    " + 12 layers heads head_dim keys for attention; recomputation is not counted"
)

_FROZEN_FORMULA = (
    "MFU = tokens/s x FLOPs/token / (devices x peak), FLOPs/token = 4 per frozen matmul weight, the"
    " adapter's own left out, + 12 layers heads head_dim keys for attention; recomputation is not"
    " counted"
)

VALIDATION_LOSS, UNIGRAM_ENTROPY = "validation_loss", "unigram_entropy"
"""Mean loss of held-out text, and what it is held against, in nats per token."""


def task_of(config: TrainConfig, group: Group | None = None) -> Task:
    """The task that a configuration asks for; its data are opened when they are first needed.

    Args:
        config: The run.
        group: The processes that train; a single one by default.

    Raises:
        InputError: No such optimizer, or numbers that it cannot take.
    """
    group = Group(None, {}) if group is None else group
    if config.data.images is not None:
        if isinstance(config.model, SeeingConfig):
            return written_task(config, group)
        two = isinstance(config.model, DualEncoderConfig)
        return (caption_task if two else image_task)(config, group)
    if config.data.audio is not None:
        return sound_task(config)
    text = functools.cache(lambda: _opened(config, group))
    tokens = config.data.global_batch * config.data.seq_len
    masked = config.data.masking is not None
    loss = masked_token_loss if masked else next_token_loss

    task = Task(
        name=config.recipe,
        make_model=with_adapter(maker(config.model), config.adapter),
        optimizer=make_optimizer(config.optimizer, config.schedule_steps),
        loss=loss(z_loss=config.z_loss),
        shapes=batch_shapes(config),
        options=StepOptions(clip_norm=config.clip_norm),
        batches=lambda step, start: text().batches(step, start),
        judged=averaged if config.optimizer.averages else lambda state: state,
        evaluators={VALIDATION_LOSS: lambda step, state: _validated(text(), step, state)},
        learning_rate=make_schedule(config.optimizer, config.schedule_steps),
        tokens=tokens,
        flops=_flops(config),
        flops_formula=_FROZEN_FORMULA if config.adapter else FLOPS_FORMULA,
        unit="nats per masked token" if masked else "nats per token",
        baselines=lambda: {UNIGRAM_ENTROPY: text().unigram_entropy},
        identity=lambda: identity(
            config, text=text().fingerprint, tokenizer=text().tokenizer.fingerprint
        ),
        documents=lambda: {
            "model": config_to_json(config.model),
            "tokenizer": text().tokenizer.to_json(),
            **({"adapter": to_json(config.adapter)} if config.adapter else {}),
        },
        asked=lambda plan: train_config_to_json(config.replace(plan=plan)),
        introduction=lambda: [*(f"text: {line}" for line in text().description), *_judged(config)],
        conclusion=_conclusion,
        complete=lambda step, params: _completion(config, text(), step, params),
    )
    if config.objective:
        task = with_objective(task, config, group, functools.partial(identity, config))
    elif config.drafter:
        task = with_drafter(task, config, text)
    return _with_examiner(task, config) if config.evaluation else task


def _with_examiner(task: Task, config: TrainConfig) -> Task:
    """The task, its model examined by benchmarks whenever it is validated."""

    @functools.cache
    def examiner() -> Any:
        from colossax.evaluation import Examiner  # with all that generates

        tokenizer = Tokenizer.from_json(task.documents()["tokenizer"])
        sizes = {"averages": bool(config.optimizer.averages)}
        return Examiner(config.evaluation, tokenizer, config.model.decoder().max_seq, **sizes)

    def examined(step: Step, state: TrainState) -> Mapping[str, float]:
        return examiner()(step, state)

    def identity() -> dict[str, Any]:
        examiner()  # it is asked for before a run has a folder, where refusals belong
        return task.identity()

    return dataclasses.replace(
        task,
        identity=identity,
        evaluators={**task.evaluators, "evaluation": examined},
        introduction=lambda: [*task.introduction(), examiner().description],
    )


def _flops(config: TrainConfig) -> int:
    """Of a step, recomputation aside."""
    data, model, frozen = config.data, config.model, bool(config.adapter)
    if data.spans is None:
        sizes = model.decoder()
        rows = sizes.train_flops_per_token(data.seq_len, frozen=frozen) * data.seq_len
    else:
        rows = model.train_flops(*data.spans.lengths(data.seq_len), frozen=frozen)
    return rows * data.global_batch


def batch_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    data = config.data
    if data.spans is not None:
        read, written = data.spans.lengths(data.seq_len)
        sizes = {"source": read, "tokens": written, "targets": written, "weights": written}
    else:
        sizes = dict.fromkeys(TEXT_BATCH_DIMS, data.seq_len)
    return {
        name: jax.ShapeDtypeStruct(
            (data.global_batch, size), np.float32 if name == "weights" else np.int32
        )
        for name, size in sizes.items()
    }


def identity(config: TrainConfig, *, text: str, tokenizer: str) -> dict[str, Any]:
    """What decides a run's losses step by step, as JSON; the mesh does not.

    Args:
        config: The run.
        text: Fingerprint of the documents.
        tokenizer: Fingerprint of the tokenizer.
    """
    data = config.data
    return {
        "seed": config.seed,
        "data.global_batch": data.global_batch,
        "data.seq_len": data.seq_len,
        "data.validation_fraction": data.validation_fraction,
        "model": train_config_to_json(config)["model"],
        **({"adapter": to_json(config.adapter)} if config.adapter else {}),
        "optimizer.name": config.optimizer.name,
        "optimizer.state": config.optimizer.state,
        "optimizer.ema": _said(config.optimizer.ema),
        "data": [_shown(data), text],
        "data.mixture": " ".join(f"{weight:.6g}" for weight in data.sources.values()),
        "data.packing": data.packing,
        "data.masking": _said(data.masking),
        "data.spans": _said(data.spans),
        "tokenizer": [data.tokenizer or f"one of {data.tokenizer_vocab} tokens", tokenizer],
    }


def _said(choice: Any) -> str:
    return "none" if choice is None else str(choice)


def _judged(config: TrainConfig) -> list[str]:
    return ["validation is of averages of the parameters"] if config.optimizer.averages else []


def _shown(data: DataConfig) -> str:
    """What the text is, for people: a run's identity."""
    return ", ".join(filter(None, data.sources)) or "the standard library"


def _opened(config: TrainConfig, group: Group) -> Text:
    return open_text(
        config.data,
        config.model,
        seed=config.seed,
        group=group,
        tokenizer=initial_tokenizer(config),
    )


def _validated(text: Text, step: Step, state: TrainState) -> dict[str, float]:
    """The mean by the weights of the sources; with several, each one's own under its name."""
    losses = {
        source.name: mean_loss(step.evaluate, state, text.held_out(step, source))
        for source in text.sources
    }
    mean = sum(source.weight * losses[source.name] for source in text.sources)
    own = {f"{VALIDATION_LOSS} {name}": loss for name, loss in losses.items()}
    return {VALIDATION_LOSS: mean, **(own if len(own) > 1 else {})}


def _conclusion(final: Mapping[str, Any]) -> list[str]:
    loss, entropy = final[VALIDATION_LOSS], final[UNIGRAM_ENTROPY]
    if loss is None:
        return []
    below = entropy - loss
    side = "below" if below >= 0 else "above"
    return [
        f"validation loss {loss:.4f}, {abs(below):.4f} nats {side} the unigram entropy"
        f" {entropy:.4f}"
    ]


def _completion(config: TrainConfig, text: Text, step: Step, params: Params) -> str | None:
    """The prompt of the recipe continued by the trained model."""
    from colossax.inference import Generator

    sample, longest, tokenizer = config.sample, config.model.decoder().max_seq, text.tokenizer
    if not sample.prompt:
        return None
    prompt = tokenizer.encode(sample.prompt)[: longest - 1]
    slots = min(len(prompt) + sample.max_tokens, longest)
    sizes = {"slots": slots, "sequences": 1}
    generator = Generator(step.spec, step.bound, params, **sizes, eos=tokenizer.eos)
    result = generator.generate(
        prompt,
        max_tokens=slots - len(prompt),
        temperature=sample.temperature,
        seed=config.seed,
    )
    return tokenizer.decode([*prompt, *result.tokens])
