"""ViT: an encoder of the patches of an image, behind a class token."""

import dataclasses

from colossax.config import Count, NotNegative
from colossax.nn import DecoderConfig, FamilyConfig, HeadConfig, LayerCount, PatchConfig
from colossax.nn.config.family import even_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(FamilyConfig):
    """Sizes of a ViT: learned positions, norms before sublayers and at the end, biases, GELU.

    Attributes:
        height, width, channels, patch_height, patch_width: See `PatchConfig`.
        qkv_bias: Biases of queries, keys and values.
        head: What is told; None: the hidden state of the class token.

    Source: Dosovitskiy et al. 2020, An Image is Worth 16x16 Words.
    """

    height: Count = 224
    width: Count = 224
    channels: Count = 3
    patch_height: Count = 16
    patch_width: Count = 16
    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    activation: str = "gelu"
    qkv_bias: bool = True
    norm_eps: NotNegative = 1e-12
    init_std: NotNegative = 0.02

    def decoder(self) -> DecoderConfig:
        """The encoder these sizes describe."""
        names = [field.name for field in dataclasses.fields(PatchConfig)]
        shared = {name: getattr(self, name) for name in names if hasattr(self, name)}
        patches = PatchConfig(**shared)
        return self.described(
            vocab=0,
            patches=patches,
            head=self.head or HeadConfig(pool="first"),
            causal=False,
            kv_heads=self.heads,
            head_dim=even_head_dim(self.embed, self.heads),
            max_seq=patches.tokens,
            learned_positions=patches.tokens,
            norm="layer",
            gated=False,
            out_bias=True,
            mlp_bias=True,
        )
