"""Images as rows of tokens: one for each patch, behind one of the class."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from colossax.errors import InputError
from colossax.nn.config import DecoderConfig, PatchConfig
from colossax.nn.layers import Linear
from colossax.nn.module import param
from colossax.sharding import compute_dtype, constrain, gather_weight


class Patches(nnx.Module):
    """Token of a patch: its numbers times a matrix; of the class: a learned vector.

    The matrix is a convolution's whose stride is as wide as its kernel. Patches are numbered row by
    row. The class token is a row of zeros before them until they are multiplied, so that devices
    share the whole sequence from the start.

    Cost: 2 `patches.numbers` embed FLOPs for each token, that of the class included.
    """

    def __init__(self, config: DecoderConfig, patches: PatchConfig, *, rngs: nnx.Rngs):
        self.patches = patches
        shape = (patches.patch_height, patches.patch_width, patches.channels, config.embed)
        dims = ("patch_height", "patch_width", "channels", "embed")
        if patches.frames > 1:
            shape, dims = (patches.frames, *shape), ("frames", *dims)
        self.map = Linear(
            shape,
            dims,
            rngs=rngs,
            contract=len(dims) - 1,
            bias=patches.bias,
            std=config.init_std,
        )
        self.class_token = (
            param(jnp.zeros((config.embed,), jnp.float32), ("embed",))
            if patches.class_token
            else None
        )

    def __call__(self, pixels: Num[Array, "b h w c"]) -> Float[Array, "b s d"]:
        """Embeddings, in the compute dtype.

        Raises:
            InputError: The images are of another size than the model's.
        """
        _check_pixels(pixels, self.patches)
        patches = self.patches.of(*pixels.shape[1:3])
        cut = cut_up(pixels.astype(compute_dtype(jnp.dtype("float32"))), patches)
        if self.patches.frames > 1:
            cut = jnp.repeat(cut[:, :, None], self.patches.frames, axis=2)
        inner = (None,) * (cut.ndim - 2)
        if self.class_token is None:
            return self.map(constrain(cut, "batch", "seq", *inner))
        cut = jnp.pad(cut, ((0, 0), (1, 0), *((0, 0) for _ in inner)))
        x = self.map(constrain(cut, "batch", "seq", *inner))
        token = gather_weight(self.class_token[...], ("embed",), dtype=x.dtype)
        return jnp.where(jnp.arange(x.shape[1])[:, None] == 0, token, x)


def cut_up(
    pixels: Num[Array, "b h w c"], patches: PatchConfig
) -> Num[Array, "b n patch_h patch_w c"]:
    """Patches of images, row by row."""
    rows, columns = patches.grid
    height, width, channels = patches.patch_height, patches.patch_width, patches.channels
    cut = pixels.reshape(-1, rows, height, columns, width, channels)
    cut = cut.transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(-1, rows * columns, height, width, channels)


def _check_pixels(pixels: Array, patches: PatchConfig) -> None:
    wanted = (patches.height, patches.width, patches.channels)
    if patches.any_size and pixels.ndim == 4 and pixels.shape[3] == patches.channels:
        return
    if pixels.ndim != 4 or pixels.shape[1:] != wanted:
        raise InputError(
            f"batch 'pixels': found shape {list(pixels.shape)}, and the model's images are"
            f" {wanted[0]} high and {wanted[1]} wide with {wanted[2]} channels; give"
            f" [batch, {wanted[0]}, {wanted[1]}, {wanted[2]}], the channels last"
        )
