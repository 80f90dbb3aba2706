"""Models that tell what an answer is worth."""

import dataclasses
from typing import Any

from colossax.errors import InputError
from colossax.nn.config import HeadConfig
from colossax.nn.config.reading import reads_text_alone


def learning_model(config: Any) -> Any:
    """Configuration of the model that a `TrainConfig` trains: to learn rewards it has their head.

    Raises:
        InputError: See `judging`.
    """
    return judging(config.model) if config.objective.name == "reward" else config.model


def judging(model: Any) -> Any:
    """The configuration of a model that rewards answers, with the layers of another.

    The reward is a number, made of the hidden state of an answer's last token.

    Args:
        model: Configuration of its family; one that rewards stays as it is.

    Raises:
        InputError: It does not read text alone, or has a head that tells something else.
    """
    if not reads_text_alone(model.decoder()) or not hasattr(model, "head"):
        raise InputError(
            f"model: a {type(model).__name__} reads more than one text, or something else; a reward"
            " is told by a decoder of text"
        )
    if model.head is None:
        return dataclasses.replace(model, head=HeadConfig(outputs=1, pool="last", bias=False))
    if model.head.pool is None or model.head.outputs != 1:
        raise InputError(
            f"model.head: found {model.head}, and a reward is one number of each document; start"
            " from the checkpoint of a language model, or of one that was trained to reward"
        )
    return model
