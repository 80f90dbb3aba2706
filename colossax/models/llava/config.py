"""LLaVA 1.5: a Llama that reads what a CLIP made of images."""

import dataclasses

from colossax.config import Count, Natural
from colossax.models.llama.config import LlamaConfig
from colossax.nn import DecoderConfig, HeadConfig, SeeingConfig
from colossax.nn.config.dual import reads_images


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaConfig(SeeingConfig):
    """Sizes of a LLaVA: of CLIP all layers but one are run. See `SeeingConfig`.

    Source: Liu et al. 2023, Visual Instruction Tuning, and Improved Baselines.
    """

    text: LlamaConfig
    height: Count = 336
    width: Count = 336
    image_token: Natural = 32_000

    def image_encoder(self) -> DecoderConfig:
        """The encoder of images."""
        return self.image.described(
            **reads_images(self.patches()),
            init_std=self.init_std,
            embed_norm=True,
            final_norm=False,
            head=HeadConfig(),
        )
