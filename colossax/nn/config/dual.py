"""What the configurations of families that embed texts and images side by side have in common."""

import dataclasses
from typing import Any

from colossax.config import Count, Positive
from colossax.errors import InputError
from colossax.nn.config.decoder import DecoderConfig
from colossax.nn.config.family import FamilyConfig, even_head_dim
from colossax.nn.config.head import HeadConfig
from colossax.nn.config.patches import PatchConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualEncoderConfig(FamilyConfig):
    """A family's configuration of two encoders, of texts and of images, checked when it is made.

    Attributes:
        scale: Times which products of embeddings are taken at first; it is learned.
        shift: What is added to those at first, and learned too; None: nothing is.
    """

    scale: Positive = 1 / 0.07
    shift: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_dual(self.text(), self.image())

    def text(self) -> DecoderConfig:
        """The encoder of texts that these sizes describe."""
        raise NotImplementedError

    def image(self) -> DecoderConfig:
        """That of images."""
        raise NotImplementedError

    def decoder(self) -> DecoderConfig:
        """That of texts: what asks for one stack is told of it."""
        return self.text()

    def train_flops(self, written: int, *, frozen: bool = False) -> int:
        """FLOPs of a training step on an image and a text of so many tokens; recomputation aside.

        Each encoder's as of a model of its own; maps of what is pooled, and products of embeddings,
        are not counted.
        """
        text, image = self.text(), self.image()
        read = written * text.train_flops_per_token(written, frozen=frozen)
        return read + image.max_seq * image.train_flops_per_token(image.max_seq, frozen=frozen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderPart:
    """Sizes of one of two encoders.

    Attributes:
        embed, layers, heads, mlp: See `DecoderConfig`.
    """

    embed: Count
    layers: Count
    heads: Count
    mlp: Count

    def described(self, **parts: Any) -> DecoderConfig:
        """Pre-norm, by mean and deviation, with biases, as both have it."""
        return DecoderConfig(
            **{
                "embed": self.embed,
                "layers": self.layers,
                "heads": self.heads,
                "kv_heads": self.heads,
                "mlp": self.mlp,
                "head_dim": even_head_dim(self.embed, self.heads),
                "norm": "layer",
                "gated": False,
                "qkv_bias": True,
                "out_bias": True,
                "mlp_bias": True,
                **parts,
            }
        )


def embeds(pool: str, width: int | None, *, bias: bool = False) -> HeadConfig:
    """A head that gives an embedding of length 1.

    Args:
        pool: See `HeadConfig`.
        width: Of the embedding; None: what is pooled is it.
        bias: Of the map to it.
    """
    return HeadConfig(pool=pool, outputs=width, bias=bias, normalise=True)


def patches_of(patches: PatchConfig) -> dict[str, Any]:
    """Parts of an encoder of such images."""
    return {
        "vocab": 0,
        "patches": patches,
        "causal": False,
        "max_seq": patches.tokens,
        "learned_positions": patches.tokens,
    }


def check_dual(text: DecoderConfig, image: DecoderConfig) -> None:
    """Refuse encoders whose embeddings cannot be compared, or that read the same.

    Raises:
        InputError: That.
    """
    if text.patches is not None or image.patches is None:
        raise InputError(
            "model: one encoder reads texts and the other images; give patches to that of images"
        )
    widths = []
    for name, config in (("text", text), ("image", image)):
        head = config.head
        if head is None or head.pool is None or not head.normalise:
            raise InputError(
                f"model.{name}: its head gives no embedding of length 1; give HeadConfig(pool=...,"
                " normalise=True)"
            )
        widths.append(head.pooled * config.embed if head.outputs is None else head.outputs)
    if widths[0] != widths[1]:
        raise InputError(
            f"model: embeddings of texts have {widths[0]} numbers and those of images {widths[1]};"
            " give both as many"
        )
