"""GPT-2."""

import dataclasses

from colossax.nn import DecoderConfig, even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes of a GPT-2: LayerNorm, learned positions, GELU MLP, biases, tied head.

    `max_seq` is also the size of the position table.

    Source: Radford et al. 2019.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    mlp: int
    max_seq: int = 1024
    norm_eps: float = 1e-5
    tied: bool = True
    init_std: float = 0.02
    eos: int | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return DecoderConfig(
            vocab=self.vocab,
            embed=self.embed,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            mlp=self.mlp,
            max_seq=self.max_seq,
            norm="layer",
            norm_eps=self.norm_eps,
            activation="gelu_tanh",
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            learned_positions=self.max_seq,
            tied=self.tied,
            init_std=self.init_std,
            eos=self.eos,
        )
