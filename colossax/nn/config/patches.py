"""Patches of images in place of tokens of a vocabulary, as data."""

import dataclasses

from colossax.config import Count, check_types
from colossax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """Images cut into a grid of patches, each of which is embedded as a token.

    Attributes:
        height, width: Of an image, in pixels.
        channels: Numbers of a pixel.
        patch_height, patch_width: Of a patch, in pixels; they divide those of the image.
        bias: Whether the map of patches has one.
        frames: Times that each image is seen, each with a matrix of its own, as a film of so many
            equal frames is.
        any_size: Whether images of any height and width that patches divide are read; those here
            are what the model is counted with. For models without learned positions.
        class_token: Whether a learned token stands before the patches.

    Source: Dosovitskiy et al. 2020, An Image is Worth 16x16 Words.
    """

    height: Count
    width: Count
    channels: Count = 3
    patch_height: Count
    patch_width: Count
    bias: bool = True
    class_token: bool = True
    frames: Count = 1
    any_size: bool = False

    def __post_init__(self):
        check_types(self, "model.patches")
        for side in ("height", "width"):
            size, patch = getattr(self, side), getattr(self, f"patch_{side}")
            if size % patch:
                raise InputError(
                    f"model.patch_{side}: patches of {patch} pixels do not divide the image's"
                    f" {side} of {size}; give one that does, or resize the images to a {side} of"
                    f" {max(patch, size - size % patch)}"
                )

    def of(self, height: int, width: int) -> "PatchConfig":
        """The patches of images of a size.

        Raises:
            InputError: The model reads others.
        """
        if (height, width) == (self.height, self.width):
            return self
        if not self.any_size:
            raise InputError(
                f"batch 'pixels': images are {height} high and {width} wide, and the model's"
                f" {self.height} and {self.width}; resize them"
            )
        return dataclasses.replace(self, height=height, width=width)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches from top to bottom, and from left to right."""
        return self.height // self.patch_height, self.width // self.patch_width

    @property
    def patches(self) -> int:
        """Of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Of an image, the class token included."""
        return self.patches + self.class_token

    @property
    def numbers(self) -> int:
        """Of a patch: its pixels, each with its channels, of all frames."""
        return self.frames * self.patch_height * self.patch_width * self.channels
