"""Codes of four bits for groups of inputs: a scale for each group of an output, and its zero."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

GROUP = 128
"""Inputs that share a scale, where nothing else is asked for."""

MIDDLE = 8
"""The code that stands for 0 where there are no zeros of groups."""

_LARGEST = 15


def in_groups(
    w: Float[Array, "k n"], outs: Sequence[int], *, group: int, zeros: bool
) -> dict[str, Array]:
    """What is kept of a matrix: `number = (code - zero) * scale`.

    With zeros the codes of a group reach from its least number to its largest, and 0 has a code of
    its own. Without, `MIDDLE` is 0 and the scale 2/15 of the largest absolute number, as GPTQ has
    its symmetric grids: the largest numbers above 0 are cut by a fifteenth. Codes are those nearest
    to `number * (1 / scale)` in float32, with the scale as it is kept, halves to even.

    Args:
        w: The matrix, inputs by outputs; of float32.
        outs: Sizes of an output.
        group: Inputs that share a scale; divides `k`.
        zeros: Whether groups have zeros of their own.

    Returns:
        `codes` uint8 `[k / 2, *outs]`, two neighbouring inputs in a byte, the earlier one in its
        low bits; `scales` bfloat16 `[k / group, *outs]`; with zeros `zeros` uint8, shaped alike.
    """
    blocks = w.reshape(-1, group, *outs)
    if zeros:
        least, most = (jnp.clip(jnp.min(blocks, 1), max=0), jnp.clip(jnp.max(blocks, 1), min=0))
        reach = most - least
    else:
        least, reach = None, 2 * jnp.max(jnp.abs(blocks), axis=1)
    scales = (reach * jnp.float32(1 / _LARGEST)).astype(jnp.bfloat16)
    # Compilers make products of quotients by one number, in their own ways: then halves differ.
    by = 1 / jnp.where(scales > 0, scales, 1).astype(jnp.float32)
    zero = MIDDLE if least is None else jnp.clip(jnp.round(-least * by), 0, _LARGEST)[:, None]
    codes = jnp.clip(jnp.round(blocks * by[:, None]) + zero, 0, _LARGEST).astype(jnp.uint8)
    pairs = codes.reshape(-1, 2, *outs)
    found = {"codes": pairs[:, 0] | pairs[:, 1] << 4, "scales": scales}
    return found if isinstance(zero, int) else found | {"zeros": zero[:, 0].astype(jnp.uint8)}


def of_groups(
    parts: Mapping[str, Array], outs: Sequence[int], *, group: int, dtype: jnp.dtype
) -> Float[Array, "k *outs"]:
    """The matrix that is kept, computed in float32 and rounded once."""
    codes = parts["codes"]
    pairs = jnp.stack([codes & _LARGEST, codes >> 4], axis=1)
    blocks = pairs.reshape(-1, group, *outs).astype(jnp.float32)
    zeros = parts["zeros"].astype(jnp.float32)[:, None] if "zeros" in parts else MIDDLE
    values = (blocks - zeros) * parts["scales"].astype(jnp.float32)[:, None]
    return values.astype(dtype).reshape(-1, *outs)
