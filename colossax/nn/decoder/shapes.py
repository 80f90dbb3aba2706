"""Shapes of the attention blocks that a decoder's configuration describes."""

import dataclasses
from typing import Any

from colossax.nn.attention import AttentionShape
from colossax.nn.config import DecoderConfig
from colossax.nn.latent import LatentShape


def attention_shape(config: DecoderConfig, full: bool = False) -> AttentionShape | LatentShape:
    """The part of a configuration that an attention block needs.

    Args:
        config: Of the decoder.
        full: Of one of `full_layers`.
    """
    if config.latent is not None:
        return LatentShape(
            embed=config.embed,
            heads=config.heads,
            sizes=config.latent,
            interleaved=config.rope is not None and config.rope.interleaved,
        )
    turned = config.rope if full or config.local_rope is None else config.local_rope
    return _shape(
        config,
        window=None if full else config.sides,
        chunk=None if full else config.chunk,
        turned=config.rope is not None and (config.full_rope or not full),
        local_rope=config.local_rope is not None and not full,
        interleaved=turned is not None and turned.interleaved,
    )


def cross_shape(config: DecoderConfig) -> AttentionShape:
    """Likewise of cross-attention: a source has neither positions nor windows for its readers."""
    return _shape(
        config,
        window=None,
        chunk=None,
        turned=False,
        local_rope=False,
        alibi=False,
        query_growth=None,
    )


def _shape(config: DecoderConfig, **own: Any) -> AttentionShape:
    names = {field.name for field in dataclasses.fields(AttentionShape)} - own.keys()
    return AttentionShape(**{n: getattr(config, n) for n in names if hasattr(config, n)}, **own)
