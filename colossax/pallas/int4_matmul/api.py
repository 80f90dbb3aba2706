"""One matmul with weights of four bits, several implementations: the call, checks and choice."""

from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from colossax.pallas.choice import Choice
from colossax.pallas.target import current_target
from colossax.pallas.varying import varies

from . import interpret, mosaic_gpu, xla
from .spec import CODES_A_BYTE, GROUP, Int4Spec

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "mosaic": mosaic_gpu,
    "xla": xla,
    "interpret": interpret,
}
"""Fastest first; `xla` takes everything, so `auto` never comes to the one behind it."""

UNPROVEN = "mosaic"
"""What `auto` takes only once it has proved itself on the device that is there."""

_CHOICE = Choice("int4_matmul", IMPLEMENTATIONS, UNPROVEN)
choose, declined_by = _CHOICE.choose, _CHOICE.declined_by


def int4_matmul(
    x: Float[Array, "m k"],
    codes: UInt8[Array, "_ n"],
    scales: Float[Array, "_ n"],
    zeros: UInt8[Array, "_ n"] | None = None,
    *,
    implementation: str = "auto",
) -> Float[Array, "m n"]:
    """Few rows times a matrix of four bits a weight, a scale for each 128 inputs of an output.

        w[i, j] = (code[i, j] - zero[i // 128, j]) * scale[i // 128, j];  out = x @ w

    Args:
        x: Rows.
        codes: `[k / 2, n]`: of byte `[i, j]` the low half is the code of input 2 i, the high half
            that of input 2 i + 1.
        scales: `[k / 128, n]`.
        zeros: `[k / 128, n]`, the code that stands for 0; None: 8 for all.
        implementation: `auto` takes the first that accepts, `mosaic` only once proved on the device
            that is there; or `mosaic`, `xla`, `interpret`.

    Returns:
        In x's dtype, summed in float32.

    Raises:
        ValueError: Shapes contradict one another, or `implementation` is no name.
        NotImplementedError: The implementation named does not take this call, says why.

    Cost: `mosaic` reads `k n / 2 + 2 k n / 128` bytes of weights; `xla` may write them as numbers.
    """
    _check(x, codes, scales, zeros)
    spec = Int4Spec(
        rows=x.shape[0],
        inputs=x.shape[1],
        outputs=codes.shape[1],
        dtype=x.dtype,
        zeros=zeros is not None,
        checked=varies((x, codes)),
    )
    chosen = choose(spec, current_target(), implementation)
    return IMPLEMENTATIONS[chosen].multiply(x, codes, scales, zeros).astype(x.dtype)


def _check(x: Array, codes: Array, scales: Array, zeros: Array | None) -> None:
    shapes = f"x {x.shape}, codes {codes.shape}, scales {scales.shape}"
    k, n = x.shape[-1], codes.shape[-1]
    fit = x.ndim == codes.ndim == 2 and k % GROUP == 0
    fit = fit and codes.shape == (k // CODES_A_BYTE, n) and scales.shape == (k // GROUP, n)
    if not fit:
        raise ValueError(
            f"int4_matmul: {shapes} do not fit; they are [m, k], [k / 2, n] and [k / {GROUP}, n],"
            f" k a multiple of {GROUP}"
        )
    if 0 in (*x.shape, n):
        raise ValueError(f"int4_matmul: {shapes}: no dim may be 0")
    if codes.dtype != jnp.uint8:
        raise ValueError(f"int4_matmul: codes of {codes.dtype}; give uint8, two codes a byte")
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != jnp.uint8):
        raise ValueError(
            f"int4_matmul: zeros {zeros.shape} of {zeros.dtype}; give {scales.shape} of uint8"
        )
