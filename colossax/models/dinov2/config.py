"""DINOv2: ViT with learned factors of what its sublayers give, and in the largest a gated MLP."""

import dataclasses

from colossax.config import Count, NotNegative, Positive
from colossax.models.vit.config import ViTConfig
from colossax.nn import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DINOv2Config(ViTConfig):
    """Sizes of a DINOv2; see `ViTConfig`.

    Attributes:
        layer_scale: What those factors begin at.
        gated: Whether the MLP has a gate: then its activation is SiLU.

    Source: Oquab et al. 2023, DINOv2: Learning Robust Visual Features without Supervision.
    """

    patch_height: Count = 14
    patch_width: Count = 14
    layer_scale: Positive = 1.0
    gated: bool = False
    norm_eps: NotNegative = 1e-6

    def decoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        plain = super().decoder()
        return dataclasses.replace(plain, gated=self.gated)
