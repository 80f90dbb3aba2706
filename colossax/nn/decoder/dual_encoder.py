"""Two encoders side by side, of texts and of images, whose embeddings are compared."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from colossax.nn.config import DecoderConfig
from colossax.nn.config.dual import check_dual
from colossax.nn.decoder.decoder import Decoder
from colossax.nn.module import param
from colossax.nn.stack.stack import LayerStack
from colossax.sharding import constrain, shared_rows


class DualEncoder(nnx.Module):
    """Scores of images and texts: products of their embeddings, times a learned number.

    Layers of the texts' encoder are numbered before those of the images', in plans and cuts.

    Source: Radford et al. 2021 (CLIP); Zhai et al. 2023 (SigLIP), which adds a number too.
    """

    def __init__(
        self,
        text: DecoderConfig,
        image: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        log_scale: float,
        shift: float | None = None,
    ):
        """Build it.

        Args:
            text, image: Each with a head that gives an embedding of length 1.
            rngs: Keys of the parameters.
            log_scale: What the logarithm of the number begins at by which products are multiplied.
            shift: What is added to them at first; None: nothing is, and none is learned.

        Raises:
            InputError: The encoders do not fit together.
        """
        check_dual(text, image)
        self.config, self.image_config = text, image
        self.text, self.image = Decoder(text, rngs=rngs), Decoder(image, rngs=rngs)
        # In 16 bits a number of this size would not move.
        self.log_scale = param(jnp.float32(log_scale), (), dtype="float32")
        self.shift = None if shift is None else param(jnp.float32(shift), (), dtype="float32")

    def __call__(
        self,
        tokens: Int[Array, "t s"],
        *,
        pixels: Num[Array, "i h w c"],
        segments: Int[Array, "t s"] | None = None,
    ) -> Float[Array, "i t"]:
        """The score of each image with each text."""
        return self.scores(*self.embeddings(tokens, pixels=pixels, segments=segments))

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """Its layer stacks by name, in the order in which they run."""
        return {"text/layers": self.text.layers, "image/layers": self.image.layers}

    def embeddings(
        self,
        tokens: Int[Array, "t s"],
        *,
        pixels: Num[Array, "i h w c"],
        segments: Int[Array, "t s"] | None = None,
    ) -> tuple[Float[Array, "t d"], Float[Array, "i d"]]:
        """Of each text and of each image, of length 1, in float32.

        Args:
            tokens: A text in each row.
            pixels: Images.
            segments: 0 of a text's tokens, negative behind its end; None: see `segments_of`.

        Raises:
            InputError: A text is longer than the model's, or images are of another size.

        Cost: both encoders. Devices that share rows have whole images where they do not divide an
        image's tokens, others each where those are enough, else the same ones.
        """
        if segments is None and self.config.causal:
            segments = segments_of(tokens, self.config.eos)
        texts = self.text(tokens, segments=segments)[:, 0]
        patches = self.image_config.patches
        assert patches is not None  # checked when built
        with shared_rows(len(pixels), patches.tokens):
            return texts, self.image(pixels=pixels)[:, 0]

    def scores(self, texts: Float[Array, "t d"], images: Float[Array, "i d"]) -> Any:
        """`exp(log_scale) images @ texts + shift`, `[i, t]` in float32.

        Cost: 2 i t w FLOPs; a device has the rows of its images, and the embeddings of all texts.
        """
        texts, images = constrain(texts, None, None), constrain(images, "batch", None)
        found = jnp.exp(self.log_scale[...]) * (images @ texts.T)
        if self.shift is not None:
            found = found + self.shift[...]
        return constrain(found, "batch", None)


def segments_of(tokens: Int[Array, "t s"], eos: int | None) -> Int[Array, "t s"]:
    """0 up to the token that ends a text, and -1 behind it, of what no token before it sees.

    Args:
        tokens: A text in each row, for an encoder whose attention is causal.
        eos: That token; the first of a row counts, and a row without one is a text to its end.
            None: the first of the row's highest number is it.
    """
    ends = tokens == (jnp.max(tokens, axis=1, keepdims=True) if eos is None else eos)
    behind = jnp.cumsum(ends, axis=1) - ends
    return jnp.where(behind > 0, -1, 0)
