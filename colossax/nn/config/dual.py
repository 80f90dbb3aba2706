"""What the configurations of families that embed texts and images side by side have in common."""

import dataclasses
from typing import Annotated, Any

from colossax.config import Bound, Count, Natural, NotNegative
from colossax.errors import InputError
from colossax.nn.config.decoder import DecoderConfig, LayerCount
from colossax.nn.config.family import FamilyConfig, even_head_dim
from colossax.nn.config.head import HeadConfig
from colossax.nn.config.patches import PatchConfig

OfScores = Annotated[float, Bound(low=-50, high=50, told="a number from -50 to 50")]
"""What scores are multiplied by, as its logarithm, or what is added to them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderPart:
    """Sizes of one of two encoders: pre-norm, by mean and deviation, with biases everywhere.

    Attributes:
        embed, layers, heads, mlp, activation, norm_eps: See `DecoderConfig`.
    """

    embed: Count
    layers: LayerCount
    heads: Count
    mlp: Count
    activation: str
    norm_eps: NotNegative

    def described(self, **parts: Any) -> DecoderConfig:
        """The encoder, of these parts besides."""
        sizes: dict[str, Any] = {
            **dataclasses.asdict(self),
            "kv_heads": self.heads,
            "head_dim": even_head_dim(self.embed, self.heads),
            "norm": "layer",
            "gated": False,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
        }
        return DecoderConfig(**sizes, **parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualEncoderConfig(FamilyConfig):
    """A family's configuration of two encoders, of texts and of images, checked when it is made.

    Attributes:
        text, image: Their sizes.
        log_scale: Logarithm of the number by which products of embeddings are multiplied, at first:
            it is learned.
        shift: What is added to those at first, and learned too; None: nothing is.
        height, width, channels, patch_height, patch_width: Of images, see `PatchConfig`.
        vocab: Tokens of the vocabulary.
        max_seq: Longest text.
        init_std: Standard deviation of random parameters.
        eos: Token that ends a text, where the family reads one.
    """

    text: EncoderPart
    image: EncoderPart
    vocab: Count
    max_seq: Count
    height: Count = 224
    width: Count = 224
    channels: Count = 3
    patch_height: Count = 16
    patch_width: Count = 16
    log_scale: OfScores
    shift: OfScores | None = None
    init_std: NotNegative = 0.02
    eos: Natural | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.head is not None:
            raise InputError(
                "model.head: two encoders tell scores of images and texts, and no family of theirs"
                " has another head; leave it out"
            )
        if self.dropout:
            raise InputError(
                "model.dropout: embeddings that are compared are of all their values; leave it out"
            )
        check_dual(self.text_encoder(), self.image_encoder())

    def text_encoder(self) -> DecoderConfig:
        """The encoder of texts that these sizes describe."""
        raise NotImplementedError

    def image_encoder(self) -> DecoderConfig:
        """That of images."""
        raise NotImplementedError

    def decoder(self) -> DecoderConfig:
        """That of texts: what asks for one stack is told of it."""
        return self.text_encoder()

    @property
    def layers(self) -> int:
        """Of both."""
        return self.text.layers + self.image.layers

    def patches(self, **parts: bool) -> PatchConfig:
        """How images are cut up."""
        names = [field.name for field in dataclasses.fields(PatchConfig)]
        sizes = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return PatchConfig(**sizes, **parts)

    def train_flops(self, written: int, *, frozen: bool = False) -> int:
        """FLOPs of a training step on an image and a text of so many tokens; recomputation aside.

        Each encoder's as of a model of its own; maps of what is pooled, and products of embeddings,
        are not counted.
        """
        text, image = self.text_encoder(), self.image_encoder()
        read = written * text.train_flops_per_token(written, frozen=frozen)
        return read + image.max_seq * image.train_flops_per_token(image.max_seq, frozen=frozen)


def embeds(pool: str, width: int | None, *, bias: bool = False) -> HeadConfig:
    """A head that gives an embedding of length 1.

    Args:
        pool: See `HeadConfig`.
        width: Of the embedding; None: what is pooled is it.
        bias: Of the map to it.
    """
    return HeadConfig(pool=pool, outputs=width, bias=bias, normalise=True)


def reads_images(patches: PatchConfig) -> dict[str, Any]:
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
        if config.mixture is not None:
            raise InputError(f"model.{name}.mixture: neither encoder has experts; leave it out")
        widths.append(head.pooled * config.embed if head.outputs is None else head.outputs)
    if widths[0] != widths[1]:
        raise InputError(
            f"model: embeddings of texts have {widths[0]} numbers and those of images {widths[1]};"
            " give both as many"
        )
