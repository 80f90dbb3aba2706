"""GPT-2."""

from flax import nnx

from colossax.models.gpt2.config import GPT2Config
from colossax.nn import Decoder


class GPT2(Decoder):
    """LayerNorm, learned positions, GELU MLP, biases, tied head. Source: Radford et al. 2019."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        super().__init__(config.decoder(), rngs=rngs)
