"""Llama 4, text only: chunks of positions, layers without rope, experts by sigmoid."""

import dataclasses

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LayerCount,
    Llama3Scaling,
    MixtureConfig,
    QueryGrowth,
    RopeConfig,
    every,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4Config(FamilyConfig):
    """Sizes of a Llama 4: a mixture of experts beside an MLP that all tokens take.

    Attributes:
        mlp: Width of an expert's hidden layer, and of the MLP that all tokens take.
        dense_mlp: Width of the MLP of layers without experts.
        experts: Of a layer.
        choices: Experts of a token, whose sigmoid scores multiply what goes into them.
        every: Each so many-th layer has experts.
        balance_loss: Coefficient of the loss that keeps experts evenly used, of each sequence.
        rope_theta: Base of the rotary embedding.
        rope_scaling: That of Llama 3.1 and later.
        full_every: Each so many-th layer sees all keys before it and has no rope; 0: none.
        chunk: In the others a query sees keys of its own chunk of so many positions; None: of all.
        qk_unit: Whether queries and keys are divided by their root mean square in those others.
        query_growth: Of queries with their position, in layers without rope.
        attention_bias: Biases in attention.

    Source: Meta 2025, the model card of Llama 4.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    kv_heads: Count
    mlp: Count
    dense_mlp: Count
    experts: Count = 16
    choices: Count = 1
    every: Count = 1
    balance_loss: NotNegative = 0.001
    head_dim: Count = 128
    max_seq: Count = 131_072
    norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 500_000.0
    rope_scaling: Llama3Scaling | None = None
    full_every: Natural = 4
    chunk: Count | None = 8192
    qk_unit: bool = True
    query_growth: QueryGrowth | None = QueryGrowth()
    attention_bias: bool = False
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(
            mlp=self.dense_mlp,
            rope=RopeConfig(theta=self.rope_theta, llama3=self.rope_scaling, interleaved=True),
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            full_layers=every(self.full_every, self.layers),
            full_rope=False,
            mixture=MixtureConfig(
                experts=self.experts,
                choices=self.choices,
                mlp=self.mlp,
                every=self.every,
                score="sigmoid",
                renormalise=False,
                on_input=True,
                shared=self.mlp,
                balance_loss=self.balance_loss,
            ),
        )
