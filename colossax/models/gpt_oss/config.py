"""gpt-oss: attention with sinks, in every second layer within a window; experts with biases."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LayerCount,
    MixtureConfig,
    RopeConfig,
    YarnScaling,
    every,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTOSSConfig(FamilyConfig):
    """Sizes of a gpt-oss: biases, sinks, a window in some layers, every MLP a mixture of experts.

    Attributes:
        mlp: Width of an expert's hidden layer.
        experts: Of a layer.
        choices: Experts of a token, weighed by softmax of their own logits.
        balance_loss: Coefficient of the loss that keeps experts evenly used, of each sequence.
        window: Keys a query sees, itself included; None: all before it.
        full_every: Each so many-th layer sees all keys before it; 0: none.
        rope_theta: Base of the rotary embedding.
        rope_scaling: YaRN's, or None.
        attention_bias: Biases in attention.

    Source: OpenAI 2025, gpt-oss-120b & gpt-oss-20b model card.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    experts: Count = 128
    choices: Count = 4
    balance_loss: NotNegative = 0.001
    head_dim: Count = 64
    max_seq: Count = 131_072
    norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 150_000.0
    rope_scaling: YarnScaling | None = None
    attention_bias: bool = True
    window: Count | None = 128
    full_every: Natural = 2
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            activation="clamped_swiglu",
            rope=RopeConfig(theta=self.rope_theta, yarn=self.rope_scaling),
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            sinks=True,
            full_layers=every(self.full_every, self.layers),
            mixture=MixtureConfig(
                experts=self.experts,
                choices=self.choices,
                mlp=self.mlp,
                router_bias=True,
                expert_bias=True,
                balance_loss=self.balance_loss,
            ),
        )
