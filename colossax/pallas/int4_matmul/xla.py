"""The matmul with weights of four bits by XLA: a product for each group, then its scale."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from colossax.pallas.target import Target

from .spec import GROUP, ZERO, Int4Spec


def why_not(spec: Int4Spec, target: Target) -> str | None:
    """It takes everything everywhere."""
    return None


def multiply(
    x: Float[Array, "m k"],
    codes: UInt8[Array, "_ n"],
    scales: Float[Array, "c n"],
    zeros: UInt8[Array, "c n"] | None,
) -> Float[Array, "m n"]:
    """`int4_matmul`; float32.

    Cost: 2 m k n FLOPs; the weights as numbers in x's dtype, and m n products for each group.
    """
    groups, n = scales.shape
    # Of each byte the low half is the even input.
    apart = jnp.stack([codes & 15, codes >> 4], axis=1).reshape(groups, GROUP, n)
    zero = ZERO if zeros is None else zeros[:, None].astype(jnp.int8)
    numbers: Any = (apart.astype(jnp.int8) - zero).astype(x.dtype)
    products = jnp.einsum(
        "mcg,cgn->cmn",
        x.reshape(x.shape[0], groups, GROUP),
        numbers,
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(products * scales[:, None].astype(jnp.float32), axis=0)
