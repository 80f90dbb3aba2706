"""Heads that tell embeddings of texts."""

import dataclasses
from typing import Any

from colossax.config import nearest
from colossax.errors import InputError
from colossax.nn import HeadConfig
from colossax.nn.config.head import POOLS
from colossax.nn.config.reading import reads_text_alone

POOLED = tuple(pool for pool in POOLS if pool != "attention")
"""Pools that have no parameters."""


def tells_embeddings(head: HeadConfig | None) -> bool:
    """Whether a head tells one hidden state of each text, and no classes of it."""
    return head is not None and head.pool in POOLED and head.outputs is None


def tells_of_texts(head: HeadConfig | None) -> bool:
    """Whether a head tells numbers of each text: a hidden state, a reward, logits of classes."""
    return head is not None and head.pool in POOLED


def with_embedding(model: Any, pool: str, normalise: bool) -> Any:
    """The configuration of a model that tells embeddings, with the layers of another.

    Args:
        model: Configuration of its family.
        pool: A key of `POOLS` that asks for no parameters.
        normalise: Whether vectors are brought to length 1.

    Raises:
        InputError: The pool is unknown or has parameters, or the model does not read text alone.
    """
    if pool not in POOLED:
        raise InputError(f"pool: '{pool}' is unknown{nearest(pool, POOLED)}")
    if not reads_text_alone(model.decoder()) or not hasattr(model, "head"):
        raise InputError(
            f"model: a {type(model).__name__} reads more than one text, or something else; an"
            " embedding is told by an encoder or a decoder of text"
        )
    return dataclasses.replace(model, head=HeadConfig(pool=pool, normalise=normalise))
