"""Qwen2-VL: a Qwen 2 that reads images, with positions of time, row and column."""

import dataclasses
from typing import Any

from colossax.config import Count, Natural, Positive
from colossax.models.qwen2.config import Qwen2Config
from colossax.nn import DecoderConfig, HeadConfig, PatchConfig, RopeConfig, SeeingConfig
from colossax.nn.config.dual import reads_images
from colossax.nn.config.family import even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(SeeingConfig):
    """Sizes of a Qwen2-VL; see `SeeingConfig`.

    Images are of any size that squares of patches divide; `height` and `width` are counted with.

    Attributes:
        sections: Pairs of a head's dims that turn by time, by row and by column.
        image_theta: Base of the encoder's rotary embedding, by row and by column.
        frames: Times that the map of patches sees an image, as a film of so many frames.

    Source: Wang et al. 2024, Qwen2-VL.
    """

    text: Qwen2Config
    sections: tuple[Natural, ...] = (16, 24, 24)
    image_theta: Positive = 10_000.0
    frames: Count = 2
    height: Count = 392
    width: Count = 392
    image_token: Natural = 151_655

    def decoder(self) -> DecoderConfig:
        """The decoder of text."""
        text = self.text.decoder()
        assert text.rope is not None
        return dataclasses.replace(
            text, rope=dataclasses.replace(text.rope, sections=self.sections)
        )

    def image_encoder(self) -> DecoderConfig:
        """The encoder of images."""
        each = even_head_dim(self.image.embed, self.image.heads) // 4
        rope = RopeConfig(theta=self.image_theta, sections=(each, each), restart=True)
        parts: dict[str, Any] = {**reads_images(self.patches()), "learned_positions": 0}
        return self.image.described(
            **parts, rope=rope, init_std=self.init_std, final_norm=False, head=HeadConfig()
        )

    def patches(self, **parts: Any) -> PatchConfig:
        """How images are cut up."""
        own = {"class_token": False, "frames": self.frames, "any_size": True}
        return super().patches(**own, **parts)
