"""Frames of sound as rows of tokens: two convolutions over time, the second of stride 2."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from colossax.errors import InputError
from colossax.nn.config import DecoderConfig, FramesConfig
from colossax.nn.config.frames import FRAMES_PER_TOKEN, KERNEL
from colossax.nn.layers import Linear
from colossax.sharding import compute_dtype, constrain


class Frames(nnx.Module):
    """`gelu(second(gelu(first(frames))))`, kernels of 3 frames and zeros beyond both ends.

    Each convolution is a matrix times windows of its input, so that plans split it as an MLP: the
    first by what it gives, the second by what it gets.

    Cost: 2 `frames.weights(embed)` FLOPs a token; windows hold their input three and one and a half
    times. Where devices share a row, each sends one place of what the first gives to the next;
    frames themselves lie whole on all of them.
    Source: Radford et al. 2022, Robust Speech Recognition via Large-Scale Weak Supervision.
    """

    def __init__(self, config: DecoderConfig, frames: FramesConfig, *, rngs: nnx.Rngs):
        """Make both kernels.

        Args:
            config: Of the encoder.
            frames: That it reads.
            rngs: Keys of the parameters.
        """
        self.frames = frames
        width, hidden, std = config.embed, "mlp:frames", config.init_std
        self.first = Linear(
            (frames.mels, KERNEL, width),
            ("mels", "kernel", hidden),
            rngs=rngs,
            contract=2,
            bias=True,
            std=std,
        )
        self.second = Linear(
            (width, KERNEL, width),
            (hidden, "kernel", "embed"),
            rngs=rngs,
            contract=2,
            bias=True,
            std=std,
        )

    def __call__(self, frames: Num[Array, "b f m"]) -> Float[Array, "b t d"]:
        """Embeddings of `f / 2` tokens, in the compute dtype.

        Raises:
            InputError: They are no frames of the model's, or of an odd number.
        """
        _check_frames(frames, self.frames)
        x = frames.astype(compute_dtype(jnp.dtype("float32")))
        x = self.first(constrain(windows(x), "batch:inner", "seq", None, None))
        x = constrain(gelu(x), "batch:inner", "seq", "mlp:frames")
        x = constrain(paired_windows(x), "batch:inner", "seq", "mlp:frames", None)
        return constrain(gelu(self.second(x)), "batch", "seq:residual", "embed")


def gelu(x: Array) -> Array:
    """By the error function."""
    return jax.nn.gelu(x, approximate=False)


def windows(x: Num[Array, "b f c"]) -> Num[Array, "b f c 3"]:
    """Of each place the one before it, itself and the one behind it; beyond the ends are zeros."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    return jnp.stack([padded[:, :-2], x, padded[:, 2:]], axis=-1)


def paired_windows(x: Num[Array, "b f c"]) -> Num[Array, "b t c 3"]:
    """Those of every other place, from the first on.

    Places 2t and 2t + 1 stay together, so that of a split row the last place alone moves.
    """
    pairs = x.reshape(x.shape[0], -1, FRAMES_PER_TOKEN, x.shape[2])
    before = jnp.pad(pairs[:, :-1, 1], ((0, 0), (1, 0), (0, 0)))
    return jnp.stack([before, pairs[:, :, 0], pairs[:, :, 1]], axis=-1)


def sinusoids(rows: int, size: int) -> np.ndarray:
    """`[rows, size]` float32: sines of `row / 10000^(i / (size / 2 - 1))`, then cosines.

    Args:
        rows: Positions, counted from 0.
        size: Even, four or more.

    Raises:
        InputError: It is not.

    Source: the encoder's positions of Whisper.
    """
    if size % 2 or size < 4:
        raise InputError(
            f"model.sinusoids: {size} numbers of a position are not as many sines as cosines, two"
            " or more; give an even embed of 4 or more"
        )
    half = size // 2
    angles = np.arange(rows)[:, None] * 10_000.0 ** (-np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _check_frames(frames: Array, wanted: FramesConfig) -> None:
    if frames.ndim != 3 or frames.shape[2] != wanted.mels:
        raise InputError(
            f"batch 'frames': found shape {list(frames.shape)}, and a frame of the model's has"
            f" {wanted.mels} numbers; give [batch, frames, {wanted.mels}]"
        )
    if frames.shape[1] % FRAMES_PER_TOKEN or not frames.shape[1]:
        raise InputError(
            f"batch 'frames': found {frames.shape[1]} of them, and a token is made of two; give an"
            " even number, the last one repeated"
        )
