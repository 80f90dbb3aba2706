"""Who sees whom in the layers of a decoder."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.nn.attention import Sight
from colossax.nn.config import DecoderConfig
from colossax.nn.decoder.shapes import attention_shape, cross_shape
from colossax.nn.dropout import Noise
from colossax.pallas.attention import Mask
from colossax.sharding import current_order, with_ranges


def masks_of(
    config: DecoderConfig,
    mask: Mask | None,
    sights: Sequence[Sight],
    segments: Any,
    positions: Int[Array, "b s"],
    x: Array,
    biases: Sequence[Any] = (),
    noise: Noise | None = None,
) -> tuple[Mask, ...]:
    """For each sight of the layers, with what kernels need of it: once, not in every layer.

    Args:
        config: Of the decoder.
        mask: In place of its own, for all layers.
        sights: Of the layers.
        segments: Documents of the rows, or None.
        positions: Of their tokens.
        x: What the layers get.
        biases: Of their scores.
        noise: What is dropped.
    """
    if mask is None:
        masks = [
            Mask(
                causal=config.causal,
                ascending=True,
                window=window,
                **_packed(
                    segments if chunk is None else _chunks(config, chunk, segments, positions)
                ),
            )
            for window, chunk in sights
        ]
    elif segments is not None and mask.q_segments is None:
        masks = [mask.changed(**_packed(segments), ascending=True)]
    else:
        masks = [mask]
    shape = attention_shape(config)
    beside: dict[str, Any] = {"noise": noise, **({"biases": biases} if biases else {})}
    return tuple(with_ranges(*shape.call(one, x, **beside)) for one in masks)


def cross_mask(
    config: DecoderConfig,
    x: Array,
    source: Array,
    segments: Any,
    source_segments: Any,
    noise: Noise | None = None,
) -> Mask:
    """Which tokens of a source each token sees: those of the document of its number.

    Args:
        config: Of the decoder.
        x: What its layers get, `[b, s, d]`.
        source: What they read, `[b, t, d]`.
        segments, source_segments: Documents of each, `[b, s]` and `[b, t]`; None: a row is one.
        noise: What is dropped.
    """
    if segments is None and source_segments is None:
        mask = Mask(causal=False)
    else:
        q_segments, kv_segments = (
            jnp.zeros(of.shape[:2], jnp.int32) if given is None else given
            for of, given in ((x, segments), (source, source_segments))
        )
        mask = Mask(causal=False, ascending=True, q_segments=q_segments, kv_segments=kv_segments)
    return with_ranges(*cross_shape(config).call(mask, x, source=source, noise=noise))


def _chunks(
    config: DecoderConfig, chunk: int, segments: Any, positions: Int[Array, "b s"]
) -> Int[Array, "b s"]:
    """Chunks of documents, numbered as segments are: a token sees its own."""
    number = positions // chunk
    if segments is None:
        return number
    most = -(-config.max_seq // chunk)
    return jnp.where(segments < 0, segments, segments * most + number)


def whole_rows(positions: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Documents of rows that are one each; what rows are filled up with is none."""
    order, length = current_order(), positions.shape[1]
    filled = order.indices(length) >= length - order.padding
    return jnp.broadcast_to(jnp.asarray(filled, jnp.int32), positions.shape)


def _packed(segments: Any) -> dict[str, Any]:
    """Fields of a mask of these segments, if any."""
    return {} if segments is None else {"q_segments": segments, "kv_segments": segments}
