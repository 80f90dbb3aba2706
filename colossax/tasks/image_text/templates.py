"""What captions of images say, and whether a configuration can be trained on them: no JAX here."""

from typing import TYPE_CHECKING

from colossax.errors import InputError

if TYPE_CHECKING:
    from colossax.tasks.config import TrainConfig
    from colossax.tasks.image_sets import ImageSet

END = 256
"""Token that ends a caption, and fills its row up: the number behind those of bytes."""

TEMPLATES = (
    "a photo of the digit {}",
    "the number {}, written by hand",
    "a small picture of a {}",
    "{}",
    "this is a {}",
)
"""Of captions; classes are told by the first."""


def longest_row(images: "ImageSet") -> int:
    """Tokens of the longest caption, its end included."""
    texts = (template.format(name) for template in TEMPLATES for name in images.names)
    return max(len(text.encode()) for text in texts) + 1


def check_captions(config: "TrainConfig", images: "ImageSet") -> None:
    """Refuse a run on these images and their captions that cannot be.

    Raises:
        InputError: The model has no numbers for bytes, rows are too short for captions, or a batch
            has fewer rows than there are classes.
    """
    data, model = config.data, config.model
    if model.vocab <= END or model.eos not in (None, END):
        raise InputError(
            f"model.vocab: found {model.vocab} with eos {model.eos}, and captions of"
            f" '{data.images}' are bytes that end in {END}; give vocab {END + 1} or more, and eos"
            f" {END}"
        )
    longest = longest_row(images)
    if not longest <= data.seq_len <= model.max_seq:
        raise InputError(
            f"data.seq_len: found {data.seq_len}, and captions of '{data.images}' have up to"
            f" {longest} tokens, the model's rows {model.max_seq}; give a number between the two"
        )
    if data.global_batch < images.classes:
        raise InputError(
            f"data.global_batch: found {data.global_batch}, and beside images to be told stand the"
            f" captions of {images.classes} classes; give {images.classes} or more"
        )


def check_written(config: "TrainConfig", images: "ImageSet") -> None:
    """Refuse a run in which a decoder writes captions of these images, and that cannot be.

    Raises:
        InputError: The model has no numbers for bytes, or rows are too short.
    """
    data, text = config.data, config.model.decoder()
    if text.vocab <= END or text.eos not in (None, END):
        raise InputError(
            f"model.text.vocab: found {text.vocab} with eos {text.eos}, and captions of"
            f" '{data.images}' are bytes that end in {END}; give vocab {END + 1} or more, and eos"
            f" {END}"
        )
    captions = (TEMPLATES[0].format(name) for name in images.names)
    needed = config.model.places + max(len(text.encode()) for text in captions)
    if not needed <= data.seq_len <= text.max_seq:
        raise InputError(
            f"data.seq_len: found {data.seq_len}, and an image of '{data.images}' and its caption"
            f" have up to {needed} tokens, the model's rows {text.max_seq}; give a number between"
            " the two"
        )
