"""BART: an encoder and a decoder of norms after sums, with learned positions."""

import dataclasses
from typing import Any

from colossax.config import Count, Natural, NotNegative
from colossax.nn import DecoderConfig, EncoderDecoderConfig, LayerCount, even_head_dim

POSITION_OFFSET = 2
NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class BARTConfig(EncoderDecoderConfig):
    """Sizes of a BART: LayerNorm of embeddings and sums, biases, a tied head with one.

    Attributes:
        layers, heads, mlp: Of the encoder.
        decoder_layers, decoder_heads, decoder_mlp: Of the decoder.
        scaled: Embeddings are taken `sqrt(embed)` times.

    Source: Lewis et al. 2019.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    decoder_layers: LayerCount
    heads: Count
    decoder_heads: Count
    mlp: Count
    decoder_mlp: Count
    max_seq: Count = 1024
    activation: str = "gelu"
    scaled: bool = False
    init_std: NotNegative = 0.02
    start: Natural = 2
    eos: Natural | None = 2

    def encoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        return self._stack(self.heads, causal=False)

    def decoder(self) -> DecoderConfig:
        """The decoder."""
        return self._stack(
            self.decoder_heads,
            layers=self.decoder_layers,
            mlp=self.decoder_mlp,
            longest_source=self.max_seq,
        )

    def _stack(self, heads: int, **own: Any) -> DecoderConfig:
        return self.described(
            heads=heads,
            kv_heads=heads,
            head_dim=even_head_dim(self.embed, heads),
            norm="layer",
            norm_eps=NORM_EPS,
            norms="sum",
            final_norm=False,
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            learned_positions=self.max_seq + POSITION_OFFSET,
            position_offset=POSITION_OFFSET,
            embed_norm=True,
            embed_scale=self.embed**0.5 if self.scaled else 1.0,
            head_bias=True,
            tied=True,
            **own,
        )
