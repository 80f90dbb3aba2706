"""A decoder of text that reads images among its tokens, as data."""

import dataclasses

from colossax.config import check_types, nearest
from colossax.errors import InputError
from colossax.nn.config.decoder import DecoderConfig
from colossax.nn.config.head import ACTIVATION_NAMES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """Two maps with an activation between them, from what an encoder of images gives to tokens.

    Attributes:
        activation: A key of `nn.ACTIVATIONS`.
        bias: Whether the maps have one.
        class_token: Whether the class token's state becomes a token too; else patches' alone do.
    """

    activation: str = "gelu"
    bias: bool = True
    class_token: bool = False

    def __post_init__(self):
        check_types(self, "model.projector")
        if self.activation not in ACTIVATION_NAMES:
            raise InputError(
                f"model.projector.activation: '{self.activation}' is"
                f" unknown{nearest(self.activation, ACTIVATION_NAMES)}"
            )


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
