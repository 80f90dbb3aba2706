"""DeepSeek V3: DeepSeek V2's parts, experts scored one by one and kept even by a bias."""

import dataclasses
from typing import Any

from colossax.config import Count, NotNegative, Positive
from colossax.errors import InputError
from colossax.models.deepseek_v2.config import DeepSeekConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(DeepSeekConfig):
    """Sizes of a DeepSeek V3: experts by sigmoid plus a bias, which only the choice feels.

    A group counts as the sum of its best two.

    Attributes:
        groups: Of experts.
        renormalise: Whether the weights of the chosen sum to 1, before `scale`.
        bias_rate: By which the bias of the choice moves after each step.
        balance_loss: Coefficient of a loss that keeps experts evenly used, of each sequence.
        interleaved: Neighbours of the rotary part turn together; else what is half of it apart.

    Source: DeepSeek-AI 2024, DeepSeek-V3.
    """

    groups: Count = 8
    kept_groups: Count = 4
    renormalise: bool = True
    bias_rate: Positive = 0.001
    balance_loss: NotNegative = 0.0001
    interleaved: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.experts // self.groups < 2:
            raise InputError(
                f"model.groups: a group counts as the sum of its best two, and {self.groups} groups"
                f" of {self.experts} experts have one each; give at most {self.experts // 2}"
            )

    @property
    def _interleaved(self) -> bool:
        return self.interleaved

    def _gate(self) -> dict[str, Any]:
        return {
            "score": "sigmoid",
            "group_score": "top2",
            "renormalise": self.renormalise,
            "bias_rate": self.bias_rate,
            "balance_loss": self.balance_loss,
        }
