"""LLaVA 1.5: a Llama that reads what a CLIP made of images."""

import dataclasses

from colossax.config import Count, Natural, NotNegative
from colossax.errors import InputError
from colossax.models.llama.config import LlamaConfig
from colossax.nn import DecoderConfig, EncoderPart, FamilyConfig, HeadConfig, PatchConfig
from colossax.nn.config.dual import reads_images
from colossax.nn.config.seeing import ProjectorConfig, check_seeing


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaConfig(FamilyConfig):
    """Sizes of a LLaVA.

    Attributes:
        text: The decoder.
        image: The encoder of images, as deep as its states are taken: of CLIP all layers but one.
        projector: What makes tokens of those states.
        height, width, channels, patch_height, patch_width: Of images, see `PatchConfig`.
        image_token: Token that stands for each place of an image in files and texts from elsewhere;
            here places have numbers of their own, see `nn.SeeingDecoder`.

    Source: Liu et al. 2023, Visual Instruction Tuning, and Improved Baselines.
    """

    text: LlamaConfig
    image: EncoderPart
    projector: ProjectorConfig = ProjectorConfig()
    height: Count = 336
    width: Count = 336
    channels: Count = 3
    patch_height: Count = 14
    patch_width: Count = 14
    image_token: Natural = 32_000
    init_std: NotNegative = 0.02

    def __post_init__(self):
        super().__post_init__()
        if self.head is not None or self.text.head is not None:
            raise InputError(
                "model.head: a decoder that reads images tells logits of its vocabulary; leave it"
                " out"
            )
        if self.dropout:
            raise InputError(
                "model.dropout: values of the decoder alone are dropped; give model.text.dropout"
            )
        if self.image_token >= self.text.vocab:
            raise InputError(
                f"model.image_token: found {self.image_token}, which is none of the vocabulary's"
                f" {self.text.vocab} tokens; give 0 to {self.text.vocab - 1}"
            )
        check_seeing(self.decoder(), self.image_encoder(), self.projector)

    @property
    def layers(self) -> int:
        """Of both."""
        return self.text.layers + self.image.layers

    def decoder(self) -> DecoderConfig:
        """The decoder of text, whose vocabulary is the model's."""
        return self.text.decoder()

    def image_encoder(self) -> DecoderConfig:
        """The encoder of images."""
        return self.image.described(
            **reads_images(self.patches()),
            init_std=self.init_std,
            embed_norm=True,
            final_norm=False,
            head=HeadConfig(),
        )

    def patches(self) -> PatchConfig:
        """How images are cut up."""
        names = ("height", "width", "channels", "patch_height", "patch_width")
        return PatchConfig(**{name: getattr(self, name) for name in names}, bias=False)

    @property
    def places(self) -> int:
        """Tokens that an image takes."""
        patches = self.patches()
        return patches.tokens if self.projector.class_token else patches.patches

    def train_flops(self, images: int, written: int, *, frozen: bool = False) -> int:
        """FLOPs of a training step on a row of so many images and tokens; recomputation aside."""
        text, image = self.decoder(), self.image_encoder()
        of_image = image.max_seq * image.train_flops_per_token(image.max_seq, frozen=frozen)
        each: dict[bool, int] = {True: 4, False: 6}
        projected = each[frozen] * self.places * text.embed * (image.embed + text.embed)
        read = written * text.train_flops_per_token(written, frozen=frozen)
        return read + images * (of_image + projected)
