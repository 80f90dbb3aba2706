"""Sets of images with labels by name, and whether a configuration can be trained on one."""

import dataclasses
from typing import TYPE_CHECKING

from colossax.config import nearest
from colossax.errors import InputError
from colossax.nn.config.dual import DualEncoderConfig
from colossax.tasks.image_text.templates import check_captions

if TYPE_CHECKING:
    from colossax.tasks.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Sizes of a set of images.

    Attributes:
        height, width: In pixels.
        channels: Numbers of a pixel.
        classes: Of which each image has one.
        told: Of it, for people.
        names: Of its classes, in the words of captions.
    """

    height: int
    width: int
    channels: int
    classes: int
    told: str
    names: tuple[str, ...]


IMAGE_SETS = {
    "digits": ImageSet(
        height=8,
        width=8,
        channels=1,
        classes=10,
        told="1,797 handwritten digits, as scikit-learn ships them",
        names=("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    )
}
"""By the name that `data.images` has."""


def check_name(images: str) -> None:
    """Refuse a set that there is not.

    Raises:
        InputError: With the nearest name.
    """
    if images not in IMAGE_SETS:
        raise InputError(f"data.images: unknown '{images}'{nearest(images, IMAGE_SETS)}")


def check_images(config: "TrainConfig") -> None:
    """Refuse what a run on images cannot be.

    Raises:
        InputError: The model reads or tells something else, or text is asked for beside images.
    """
    data, two = config.data, isinstance(config.model, DualEncoderConfig)
    encoder = config.model.image_encoder() if two else config.model.decoder()
    assert data.images is not None
    images, patches = IMAGE_SETS[data.images], getattr(encoder, "patches", None)
    if patches is None:
        raise InputError(
            f"data.images: '{data.images}' is {images.told}, and the model reads tokens; leave it"
            " out, or start from a recipe of images, as vit_digits"
        )
    for name in ("height", "width", "channels"):
        wanted, found = getattr(images, name), getattr(patches, name)
        if wanted != found:
            raise InputError(
                f"model.{name}: found {found}, and images of '{data.images}' have {wanted}; give"
                " that"
            )
    if two:
        check_captions(config, images)
        return _check_no_text(config)
    if data.seq_len != patches.tokens:
        raise InputError(
            f"data.seq_len: found {data.seq_len}, and an image is {patches.patches} patches"
            f"{' and a class token' if patches.class_token else ''}; give {patches.tokens}"
        )
    head = config.model.head
    if head is None or head.pool is None or (head.outputs or 0) < images.classes:
        raise InputError(
            f"model.head: '{data.images}' has {images.classes} classes, and the model tells none or"
            f" fewer; give head, as HeadConfig(outputs={images.classes}, pool='first')"
        )
    _check_no_text(config)


def _check_no_text(config: "TrainConfig") -> None:
    data = config.data
    if config.adapter:
        raise InputError(
            f"adapter.rank: found {config.adapter.rank}, and a run on images trains its whole"
            " model; leave it out, or give boost a model with nn.with_adapter"
        )
    asked = {
        "data.path": data.path,
        "data.mixture": data.mixture,
        "data.tokenizer": data.tokenizer,
        "data.tokenizer_vocab": data.tokenizer_vocab,
        "data.masking": data.masking,
        "data.spans": data.spans,
        "data.packing": data.packing != "packed",
        "sample.prompt": config.sample.prompt,
        "z_loss": config.z_loss,
    }
    odd = [name for name, value in asked.items() if value]
    if odd:
        raise InputError(
            f"{odd[0]}: it is of text, and the run is on images, '{data.images}'; leave it out"
        )
