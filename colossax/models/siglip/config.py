"""SigLIP: an encoder of texts and one of images, each pair of which is told right or wrong."""

import dataclasses

from colossax.config import Count
from colossax.nn import DecoderConfig
from colossax.nn.config.dual import DualEncoderConfig, OfScores, embeds, reads_images


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigLIPConfig(DualEncoderConfig):
    """Sizes of a SigLIP; see `DualEncoderConfig`. Texts are as wide as images.

    A text is a row to its end, what fills it up included: its last token's state is the text's.

    Source: Zhai et al. 2023, Sigmoid Loss for Language Image Pre-Training.
    """

    vocab: Count = 32000
    max_seq: Count = 64
    log_scale: OfScores = 2.302585092994046
    shift: OfScores | None = -10.0

    def text_encoder(self) -> DecoderConfig:
        """The encoder of texts, not causal."""
        return self.text.described(
            vocab=self.vocab,
            max_seq=self.max_seq,
            learned_positions=self.max_seq,
            causal=False,
            init_std=self.init_std,
            head=embeds("last", self.image.embed, bias=True),
        )

    def image_encoder(self) -> DecoderConfig:
        """That of images, without a class token: attention of a learned query reads them all."""
        return self.image.described(
            **reads_images(self.patches(class_token=False)),
            init_std=self.init_std,
            head=embeds("attention", None),
        )
