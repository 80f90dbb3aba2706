"""A decoder of text that reads images among its tokens, as data."""

import dataclasses
from typing import Any

from colossax.config import Count, Natural, NotNegative, check_types, nearest
from colossax.errors import InputError
from colossax.nn.config.decoder import DecoderConfig
from colossax.nn.config.dual import EncoderPart
from colossax.nn.config.family import FamilyConfig
from colossax.nn.config.head import ACTIVATION_NAMES
from colossax.nn.config.patches import PatchConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """Two maps with an activation between them, from what an encoder of images gives to tokens.

    Attributes:
        activation: A key of `nn.ACTIVATIONS`.
        bias: Whether the maps have one.
        class_token: Whether the class token's state becomes a token too; else patches' alone do.
        merge: Patches on each side of a square of which one token is made.
        norm_eps: Of a LayerNorm of each state before; None: there is none.
        width: Between the maps; None: as wide as the text.
    """

    activation: str = "gelu"
    bias: bool = True
    class_token: bool = False
    merge: Count = 1
    norm_eps: NotNegative | None = None
    width: Count | None = None

    def __post_init__(self):
        check_types(self, "model.projector")
        if self.activation not in ACTIVATION_NAMES:
            raise InputError(
                f"model.projector.activation: '{self.activation}' is"
                f" unknown{nearest(self.activation, ACTIVATION_NAMES)}"
            )
        if self.merge > 1 and self.class_token:
            raise InputError(
                "model.projector.merge: squares of patches are merged, and the class token is in"
                " none; leave class_token out"
            )

    def grid(self, patches: PatchConfig) -> tuple[int, int]:
        """Tokens of an image from top to bottom, and from left to right, the class token aside.

        Raises:
            InputError: Squares of patches do not divide it.
        """
        rows, columns = patches.grid
        if rows % self.merge or columns % self.merge:
            raise InputError(
                f"model.projector.merge: squares of {self.merge} x {self.merge} patches do not"
                f" divide an image's {rows} x {columns}; choose a height and a width that they do"
            )
        return rows // self.merge, columns // self.merge

    def tokens(self, patches: PatchConfig) -> int:
        """That an image takes."""
        rows, columns = self.grid(patches)
        return rows * columns + self.class_token

    def weights(self, image: int, text: int) -> int:
        """Numbers in the matrices that each token is multiplied by, from one width to the other."""
        wide = image * self.merge**2
        return (wide + text) * (self.width or text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeeingConfig(FamilyConfig):
    """A family's configuration of a decoder that reads images, checked when it is made.

    Attributes:
        image: The encoder of images, as deep as its states are taken.
        projector: What makes tokens of those states.
        height, width, channels, patch_height, patch_width: Of images, see `PatchConfig`.
        image_token: Token that stands for each place of an image in files and texts from elsewhere;
            here places have numbers of their own, see `nn.SeeingDecoder`.
    """

    text: Any
    image: EncoderPart
    projector: ProjectorConfig = ProjectorConfig()
    height: Count
    width: Count
    channels: Count = 3
    patch_height: Count = 14
    patch_width: Count = 14
    image_token: Natural
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

    def image_encoder(self) -> DecoderConfig:
        """The encoder of images."""
        raise NotImplementedError

    def decoder(self) -> DecoderConfig:
        """The decoder of text, whose vocabulary is the model's."""
        return self.text.decoder()

    @property
    def layers(self) -> int:
        """Of both."""
        return self.text.layers + self.image.layers

    def patches(self, **parts: Any) -> PatchConfig:
        """How images are cut up."""
        names = ("height", "width", "channels", "patch_height", "patch_width")
        return PatchConfig(**{name: getattr(self, name) for name in names}, bias=False, **parts)

    @property
    def places(self) -> int:
        """Tokens that an image takes."""
        return self.projector.tokens(self.patches())

    def train_flops(self, images: int, written: int, *, frozen: bool = False) -> int:
        """FLOPs of a training step on a row of so many images and tokens; recomputation aside."""
        text, image = self.decoder(), self.image_encoder()
        of_image = image.max_seq * image.train_flops_per_token(image.max_seq, frozen=frozen)
        each = 4 if frozen else 6
        projected = each * self.places * self.projector.weights(image.embed, text.embed)
        read = written * text.train_flops_per_token(written, frozen=frozen)
        return read + images * (of_image + projected)


def check_seeing(text: DecoderConfig, image: DecoderConfig, projector: ProjectorConfig) -> None:
    """Refuse a decoder and an encoder of images that do not fit together.

    Raises:
        InputError: That.
    """
    if image.patches is None or image.final_norm:
        raise InputError(
            "model.image: it reads no images, or norms what its last layer gives; give patches, and"
            " final_norm False"
        )
    if not text.causal or text.patches is not None or text.longest_source is not None:
        raise InputError(
            "model.text: it is no decoder of text alone; give causal, and neither patches nor"
            " longest_source"
        )
    for name in ("head", "token_width", "token_types"):
        if getattr(text, name):
            raise InputError(
                f"model.text.{name}: a decoder that reads images has none; leave it out"
            )
    if projector.class_token and not image.patches.class_token:
        raise InputError(
            "model.projector.class_token: the encoder of images has no class token; leave it out"
        )
    projector.grid(image.patches)
    axes = None if text.rope is None else text.rope.sections
    if axes is not None and len(axes) != 3:
        raise InputError(
            f"model.text.rope.sections: found {len(axes)} axes, and places have three, time, row"
            " and column; give three numbers"
        )
