"""Mixtral: Mistral's parts, experts in place of MLPs."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LayerCount,
    MixtureConfig,
    RopeConfig,
    even_head_dim,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(FamilyConfig):
    """Sizes of a Mixtral: as Llama, every layer's MLP a mixture of experts.

    Attributes:
        mlp: Width of an expert's hidden layer.
        experts: Of a layer.
        choices: Experts of a token, by softmax, whose weights sum to 1.
        balance_loss: Coefficient of the loss that keeps experts evenly used, of each sequence.
        window: Keys a query sees, itself included; None: all before it.
        rope_theta: Base of the rotary embedding.

    Source: Jiang et al. 2024, Mixtral of Experts.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    experts: Count = 8
    choices: Count = 2
    balance_loss: NotNegative = 0.001
    head_dim: Count | None = None
    max_seq: Count = 32_768
    norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 1_000_000.0
    window: Count | None = None
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=self.head_dim or even_head_dim(self.embed, self.heads),
            rope=RopeConfig(theta=self.rope_theta),
            mixture=MixtureConfig(
                experts=self.experts,
                choices=self.choices,
                mlp=self.mlp,
                balance_loss=self.balance_loss,
            ),
        )
