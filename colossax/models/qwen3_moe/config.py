"""Qwen 3 with experts: Qwen 3's parts, experts in place of MLPs."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LayerCount,
    MixtureConfig,
    RopeConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(FamilyConfig):
    """Sizes of a Qwen 3 with experts: as Qwen 3, MLPs replaced.

    Attributes:
        mlp: Width of the MLP of layers without experts.
        expert_mlp: Width of an expert's hidden layer.
        experts: Of a layer.
        choices: Experts of a token, by softmax.
        renormalise: Whether the weights of the chosen sum to 1.
        every: Each so many-th layer has experts.
        balance_loss: Coefficient of the loss that keeps experts evenly used, of each sequence.
        rope_theta: Base of the rotary embedding.

    Source: Yang et al. 2025, Qwen3.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    expert_mlp: Count
    experts: Count
    choices: Count
    renormalise: bool = True
    every: Count = 1
    balance_loss: NotNegative = 0.001
    head_dim: Count = 128
    max_seq: Count = 40_960
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 1_000_000.0
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            rope=RopeConfig(theta=self.rope_theta),
            qk_norm=True,
            mixture=MixtureConfig(
                experts=self.experts,
                choices=self.choices,
                mlp=self.expert_mlp,
                every=self.every,
                renormalise=self.renormalise,
                balance_loss=self.balance_loss,
            ),
        )
