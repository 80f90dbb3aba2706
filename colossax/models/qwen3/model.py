"""Qwen 3 (dense): Llama's parts with normed queries and keys."""

from flax import nnx

from colossax.models.qwen3.config import Qwen3Config
from colossax.nn import Decoder


class Qwen3(Decoder):
    """As Llama, an RMSNorm over each head of q and k. Source: Yang et al. 2025, Qwen3."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        super().__init__(config.decoder(), rngs=rngs)
