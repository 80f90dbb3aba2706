"""Mistral: Llama's parts with a sliding window."""

from flax import nnx

from colossax.models.mistral.config import MistralConfig
from colossax.nn import Decoder


class Mistral(Decoder):
    """As Llama, each query seeing the last `window` keys. Source: Jiang et al. 2023."""

    def __init__(self, config: MistralConfig, *, rngs: nnx.Rngs):
        super().__init__(config.decoder(), rngs=rngs)
