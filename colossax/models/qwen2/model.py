"""Qwen 2 and 2.5: Llama's parts with biases on q, k and v."""

from flax import nnx

from colossax.models.qwen2.config import Qwen2Config
from colossax.nn import Decoder


class Qwen2(Decoder):
    """As Llama, q, k and v with biases. Source: Yang et al. 2024, Qwen2 technical report."""

    def __init__(self, config: Qwen2Config, *, rngs: nnx.Rngs):
        super().__init__(config.decoder(), rngs=rngs)
