"""DeepSeek V2: latent attention, experts in groups beside some that all tokens take."""

import dataclasses
from typing import Any

from colossax.config import Count, Natural, NotNegative, Positive
from colossax.nn import (
    DecoderConfig,
    FamilyConfig,
    LatentConfig,
    LayerCount,
    MixtureConfig,
    RopeConfig,
    YarnScaling,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(FamilyConfig):
    """Sizes that both families have.

    Attributes:
        mlp: Width of the MLP of the first layers.
        expert_mlp: Width of an expert's hidden layer.
        experts: Of a layer.
        choices: Experts of a token.
        shared: Experts that all tokens take, together one MLP of `shared * expert_mlp`.
        first_dense: Layers without experts, the first ones.
        scale: Times which the weights of experts are taken.
        groups: Of experts; 0: none.
        kept_groups: Groups that a token chooses from.
        kv_rank: Width of what a token's keys and values are made from.
        q_rank: Likewise of its queries; None: they are made from the residual stream.
        nope_dim: Of a head's queries and keys, what has no position.
        rope_dim: Of those, what is turned by position.
        v_dim: Width of a head's values.
        rope_theta: Base of the rotary embedding.
        rope_scaling: Its scaling.
    """

    vocab: Count
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    expert_mlp: Count
    experts: Count
    choices: Count
    shared: Count
    first_dense: Natural = 0
    scale: Positive = 1.0
    groups: Natural = 0
    kept_groups: Natural = 0
    kv_rank: Count = 512
    q_rank: Count | None = 1536
    nope_dim: Count = 128
    rope_dim: Count = 64
    v_dim: Count = 128
    max_seq: Count = 163_840
    norm_eps: NotNegative = 1e-6
    rope_theta: Positive = 10_000.0
    rope_scaling: YarnScaling | None = None
    tied: bool = False
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        scaling = self.rope_scaling
        return self.described(
            kv_heads=self.heads,
            head_dim=self.nope_dim + self.rope_dim,
            rope=RopeConfig(theta=self.rope_theta, yarn=scaling, interleaved=self._interleaved),
            mixture=MixtureConfig(
                experts=self.experts,
                choices=self.choices,
                mlp=self.expert_mlp,
                first_dense=self.first_dense,
                shared=self.shared * self.expert_mlp,
                scale=self.scale,
                groups=self.groups,
                kept_groups=self.kept_groups,
                **self._gate(),
            ),
            latent=LatentConfig(
                kv_rank=self.kv_rank,
                q_rank=self.q_rank,
                nope_dim=self.nope_dim,
                rope_dim=self.rope_dim,
                v_dim=self.v_dim,
                scale=1.0 if scaling is None else scaling.softmax_scale,
            ),
        )

    @property
    def _interleaved(self) -> bool:
        """Whether neighbours of the rotary part turn together."""
        return True

    def _gate(self) -> dict[str, Any]:
        """How tokens choose, and what keeps experts evenly used."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV2Config(DeepSeekConfig):
    """Sizes of a DeepSeek V2: experts by softmax, the best of all or of the best groups.

    A group counts as its best expert. Weights are not made to sum to 1.

    Attributes:
        balance_loss: Coefficient of the loss that keeps experts evenly used, of each sequence.

    Source: DeepSeek-AI 2024, DeepSeek-V2.
    """

    balance_loss: NotNegative = 0.001

    def _gate(self) -> dict[str, Any]:
        return {"renormalise": False, "balance_loss": self.balance_loss}
