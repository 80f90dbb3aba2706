"""GLM-4-0414: GLM's parts with norms on both sides of a sublayer."""

import dataclasses

from colossax.models.glm.config import GLMConfig
from colossax.nn import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM4Config(GLMConfig):
    """Sizes of a GLM-4-0414: as GLM, what sublayers give is normed too."""

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return dataclasses.replace(super().decoder(), norms="both")
