"""T5, T5 1.1 and Flan-T5: an encoder and a decoder with biases by distance, unscaled scores."""

import dataclasses
from typing import Any

from colossax.config import Count, Natural, NotNegative
from colossax.nn import DecoderConfig, EncoderDecoderConfig, LayerCount, RelativeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """Sizes of a T5: RMSNorm, no biases, no positions but those of attention's buckets.

    Attributes:
        layers: Of the encoder.
        decoder_layers: Of the decoder.
        max_seq: Longest row of either stack; the model itself has no bound.
        buckets, farthest: See `RelativeConfig`.
        tied: The head is the table, and logits are divided by `sqrt(embed)`: T5, not T5 1.1.

    Source: Raffel et al. 2020; Chung et al. 2022, Flan-T5.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    decoder_layers: LayerCount
    heads: Count
    head_dim: Count
    mlp: Count
    max_seq: Count = 512
    buckets: Count = 32
    farthest: Count = 128
    norm_eps: NotNegative = 1e-6
    activation: str = "relu"
    gated: bool = False
    tied: bool = True
    init_std: NotNegative = 0.02
    start: Natural = 0
    eos: Natural | None = 1

    def encoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        return self._stack(causal=False)

    def decoder(self) -> DecoderConfig:
        """The decoder."""
        return self._stack(layers=self.decoder_layers, longest_source=self.max_seq)

    def _stack(self, **own: Any) -> DecoderConfig:
        return self.described(
            kv_heads=self.heads,
            relative=RelativeConfig(buckets=self.buckets, farthest=self.farthest),
            score_scale=1.0,
            logit_scale=self.embed**-0.5 if self.tied else 1.0,
            **own,
        )
