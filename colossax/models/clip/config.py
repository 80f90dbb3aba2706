"""CLIP: a causal encoder of texts and a ViT of images, whose embeddings are compared."""

import dataclasses

from colossax.config import Count, Natural
from colossax.nn import DecoderConfig
from colossax.nn.config.dual import DualEncoderConfig, OfScores, embeds, reads_images


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig(DualEncoderConfig):
    """Sizes of a CLIP; see `DualEncoderConfig`.

    Attributes:
        projection: Numbers of an embedding.
        eos: Token that ends a text, whose state is the text's; None: the token of the highest
            number of each text does.

    Source: Radford et al. 2021, Learning Transferable Visual Models From Natural Language
    Supervision.
    """

    vocab: Count = 49408
    max_seq: Count = 77
    projection: Count = 512
    log_scale: OfScores = 2.6592
    eos: Natural | None = 49407

    def text_encoder(self) -> DecoderConfig:
        """The encoder of texts."""
        return self.text.described(
            vocab=self.vocab,
            max_seq=self.max_seq,
            learned_positions=self.max_seq,
            init_std=self.init_std,
            eos=self.eos,
            head=embeds("last", self.projection),
        )

    def image_encoder(self) -> DecoderConfig:
        """That of images, which norms embeddings too, and whose patches have no bias."""
        return self.image.described(
            **reads_images(self.patches(bias=False)),
            init_std=self.init_std,
            embed_norm=True,
            head=embeds("first", self.projection),
        )
