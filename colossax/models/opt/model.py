"""OPT (the pre-norm sizes)."""

from flax import nnx

from colossax.models.opt.config import OPTConfig
from colossax.nn import Decoder


class OPT(Decoder):
    """As GPT-2 with ReLU and a position offset of 2. Source: Zhang et al. 2022."""

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs):
        super().__init__(config.decoder(), rngs=rngs)
