"""OLMoE: Llama's parts, norms over all heads of queries and keys, experts in place of MLPs."""

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
class OLMoEConfig(FamilyConfig):
    """Sizes of an OLMoE: as Llama, queries and keys normed, every MLP a mixture of experts.

    Attributes:
        mlp: Width of an expert's hidden layer.
        experts: Of a layer.
        choices: Experts of a token, by softmax.
        renormalise: Whether the weights of the chosen sum to 1.
        balance_loss: Coefficient of the loss that keeps experts evenly used, of each sequence.
        rope_theta: Base of the rotary embedding.

    Source: Muennighoff et al. 2024, OLMoE.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    experts: Count = 64
    choices: Count = 8
    renormalise: bool = False
    balance_loss: NotNegative = 0.01
    max_seq: Count = 4096
    norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 10_000.0
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            head_dim=even_head_dim(self.embed, self.heads),
            rope=RopeConfig(theta=self.rope_theta),
            qk_norm_whole=True,
            mixture=MixtureConfig(
                experts=self.experts,
                choices=self.choices,
                mlp=self.mlp,
                renormalise=self.renormalise,
                balance_loss=self.balance_loss,
            ),
        )
