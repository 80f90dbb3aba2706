"""Frames of sound in place of tokens of a vocabulary, as data."""

import dataclasses

from colossax.config import Count, check_types

KERNEL = 3
"""Frames that a convolution sees of each place: it and its two neighbours."""

FRAMES_PER_TOKEN = 2
"""The second convolution's stride."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FramesConfig:
    """Frames of sound, of which two convolutions over time make a token of each two.

    Attributes:
        mels: Numbers of a frame: the logarithms of its energies in that many bands.

    Source: Radford et al. 2022, Robust Speech Recognition via Large-Scale Weak Supervision.
    """

    mels: Count = 80

    def __post_init__(self):
        check_types(self, "model.frames")

    def weights(self, embed: int) -> int:
        """Numbers that multiply for a token: the first kernel for each of its frames, the second.

        Args:
            embed: Width of both convolutions.
        """
        return KERNEL * embed * (FRAMES_PER_TOKEN * self.mels + embed)
