"""A run on text that trains a drafter beside its frozen model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from colossax.config import to_json
from colossax.models import config_to_json, maker
from colossax.nn import as_target, drafter_maker
from colossax.nn.drafting.drafter import DRAFTER, TARGET
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig
from colossax.tasks.drafting.acceptance import Acceptances, Continued
from colossax.tasks.drafting.loss import drafting_loss, drafting_options
from colossax.tasks.task import Task
from colossax.tasks.text import Text
from colossax.typing import TrainState

VALIDATION_LOSS, ACCEPTED, ACCEPTANCE = "validation_loss", "accepted", "acceptance"
"""Mean loss of held-out text; accepted tokens of a draft; share of those looked at."""

_FORMULA = (
    "MFU = tokens/s x FLOPs/token / (devices x peak), FLOPs/token = 6 per matmul weight of the"
    " drafter and 2 of the frozen target, + 12 (4) layers heads head_dim keys for attention;"
    " recomputation is not counted"
)


def with_drafter(task: Task, config: TrainConfig, text: Callable[[], Text]) -> Task:
    """The task of a run on text, with a drafter that learns in place of its model.

    Args:
        task: Of the model.
        config: Of the run, with a drafter.
        text: Gives its text.
    """
    target = config.model.decoder()
    measured: list[Acceptances] = []

    def acceptance(step: Step, state: TrainState) -> dict[str, float]:
        if not measured:
            held_out = [source.held_out for source in text().sources]
            length = min(config.data.seq_len, target.max_seq)
            continued = Continued(held_out, length, text().tokenizer.eos)
            measured.append(Acceptances(continued, config.drafter.block))
        found = measured[0](step, state["params"])
        places = {f"{ACCEPTANCE}_{at + 1}": rate for at, rate in enumerate(found.by_place)}
        return {ACCEPTED: found.mean, ACCEPTANCE: found.rate, **places}

    return dataclasses.replace(
        task,
        make_model={
            TARGET: as_target(maker(config.model)),
            DRAFTER: drafter_maker(config.drafter, target),
        },
        loss=drafting_loss(config.drafter),
        options=dataclasses.replace(task.options, **drafting_options(config.drafter)),
        evaluators={
            VALIDATION_LOSS: lambda step, state: _validated(config, text(), step, state),
            ACCEPTANCE: acceptance,
        },
        flops=_flops(config),
        flops_formula=_FORMULA,
        unit="nats per token",
        baselines=dict,
        identity=lambda: {**task.identity(), DRAFTER: to_json(config.drafter)},
        documents=lambda: {
            DRAFTER: {
                "config": to_json(config.drafter),
                TARGET: config_to_json(config.model),
            },
            "tokenizer": text().tokenizer.to_json(),
        },
        conclusion=lambda final: _conclusion(config, final),
        complete=None,
    )


def _validated(config: TrainConfig, text: Text, step: Step, state: TrainState) -> dict[str, float]:
    """The loss over all real targets, by the weights of the sources."""
    coefficients = {"divergence": 1 - config.drafter.text, "cross_entropy": config.drafter.text}
    loss = 0.0
    for source in text.sources:
        sums = {name: np.zeros(2) for name, by in coefficients.items() if by}
        for batch in text.held_out(step, source):
            totals = step.evaluate(state, batch)
            for name in sums:
                sums[name] += np.asarray(jax.device_get(totals[name]), np.float64)
        means = {name: total / weight for name, (total, weight) in sums.items()}
        loss += source.weight * sum(coefficients[name] * mean for name, mean in means.items())
    return {VALIDATION_LOSS: float(loss)}


def _flops(config: TrainConfig) -> int:
    """Of a step: the drafter's both passes, and one of the target."""
    data, target = config.data, config.model.decoder()
    own = config.drafter.decoder(target)
    cross = 6 * own.layers * 2 * own.embed * own.heads * own.head_dim
    scores = 6 * own.layers * own.heads * 2 * own.head_dim * data.seq_len / 2
    told = target.train_flops_per_token(data.seq_len) / 3
    each = told + own.train_flops_per_token(data.seq_len) + cross + scores
    return int(each * data.seq_len * data.global_batch)


def _conclusion(config: TrainConfig, final: Mapping[str, Any]) -> list[str]:
    if final.get(ACCEPTED) is None:
        return []
    block = config.drafter.block
    places = ", ".join(f"{final[f'{ACCEPTANCE}_{at + 1}'] or 0:.3f}" for at in range(block))
    return [
        f"of a draft of {block} tokens the target accepts {final[ACCEPTED]:.3f} on average, greedy,"
        f" on text held out: {final[ACCEPTANCE]:.3f} of those it looks at; by place {places}"
    ]
