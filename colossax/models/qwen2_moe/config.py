"""Qwen 2 with experts: Qwen 2's parts, experts beside one that all tokens take."""

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
class Qwen2MoEConfig(FamilyConfig):
    """Sizes of a Qwen 2 with experts: as Qwen 2, with an expert of its own gate for all tokens.

    Attributes:
        mlp: Width of the MLP of layers without experts.
        expert_mlp: Width of an expert's hidden layer.
        shared_mlp: Width of the one that all tokens take.
        experts: Of a layer.
        choices: Experts of a token, by softmax.
        renormalise: Whether the weights of the chosen sum to 1.
        every: Each so many-th layer has experts.
        balance_loss: Coefficient of the loss that keeps experts evenly used, of each sequence.
        rope_theta: Base of the rotary embedding.

    Source: Yang et al. 2024, Qwen2.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    expert_mlp: Count
    shared_mlp: Count
    experts: Count
    choices: Count
    renormalise: bool = False
    every: Count = 1
    balance_loss: NotNegative = 0.001
    max_seq: Count = 32_768
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 1_000_000.0
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=even_head_dim(self.embed, self.heads),
            rope=RopeConfig(theta=self.rope_theta),
            qkv_bias=True,
            mixture=MixtureConfig(
                experts=self.experts,
                choices=self.choices,
                mlp=self.expert_mlp,
                every=self.every,
                renormalise=self.renormalise,
                shared=self.shared_mlp,
                shared_gated=True,
                balance_loss=self.balance_loss,
            ),
        )
