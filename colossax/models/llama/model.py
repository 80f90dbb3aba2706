"""Llama 2, 3, 3.1 and 3.2."""

from flax import nnx

from colossax.models.llama.config import LlamaConfig
from colossax.nn import Decoder


class Llama(Decoder):
    """RMSNorm, rope, gated SiLU MLP, grouped queries.

    Source: Touvron et al. 2023; Dubey et al. 2024.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        super().__init__(config.decoder(), rngs=rngs)
