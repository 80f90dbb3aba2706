"""BLOOM."""

from flax import nnx

from colossax.models.bloom.config import BloomConfig
from colossax.nn import Decoder


class Bloom(Decoder):
    """ALiBi, LayerNorm (also after the embedding), GELU MLP of 4 embed, tied head.

    Source: Le Scao et al. 2022.
    """

    def __init__(self, config: BloomConfig, *, rngs: nnx.Rngs):
        super().__init__(config.decoder(), rngs=rngs)
