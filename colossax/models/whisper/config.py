"""Whisper: an encoder of frames of sound, and a decoder of text, norms before sublayers."""

import dataclasses
from typing import Any

from colossax.config import Count, Natural, NotNegative
from colossax.nn import (
    DecoderConfig,
    EncoderDecoderConfig,
    FramesConfig,
    LayerCount,
    even_head_dim,
)

NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperConfig(EncoderDecoderConfig):
    """Sizes of a Whisper: LayerNorm, GELU, biases but of keys, a tied head.

    Attributes:
        layers, heads, mlp: Of the encoder.
        decoder_layers, decoder_heads, decoder_mlp: Of the decoder.
        mels: Numbers of a frame.
        max_source: Most tokens of a sound, each of two frames.
        max_seq: Most tokens of a text.

    Source: Radford et al. 2022, Robust Speech Recognition via Large-Scale Weak Supervision.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    decoder_layers: LayerCount
    heads: Count
    decoder_heads: Count
    mlp: Count
    decoder_mlp: Count
    mels: Count = 80
    max_source: Count = 1500
    max_seq: Count = 448
    activation: str = "gelu"
    init_std: NotNegative = 0.02
    start: Natural = 50257
    eos: Natural | None = 50256

    def encoder(self) -> DecoderConfig:
        """The encoder these sizes describe: sines and cosines of positions, which do not learn."""
        return self._stack(
            self.heads,
            self.max_source,
            sinusoids=True,
            vocab=0,
            frames=FramesConfig(mels=self.mels),
            max_seq=self.max_source,
            causal=False,
            start=None,
            eos=None,
        )

    def decoder(self) -> DecoderConfig:
        """The decoder, of learned positions."""
        return self._stack(
            self.decoder_heads,
            self.max_seq,
            layers=self.decoder_layers,
            mlp=self.decoder_mlp,
            longest_source=self.max_source,
        )

    def _stack(self, heads: int, positions: int, **own: Any) -> DecoderConfig:
        return self.described(
            heads=heads,
            kv_heads=heads,
            head_dim=even_head_dim(self.embed, heads),
            learned_positions=positions,
            norm="layer",
            norm_eps=NORM_EPS,
            gated=False,
            qkv_bias=True,
            key_bias=False,
            out_bias=True,
            mlp_bias=True,
            tied=True,
            **own,
        )
