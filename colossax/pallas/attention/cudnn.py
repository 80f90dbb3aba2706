"""cuDNN's fused attention, through JAX's public function."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.compat import cudnn_installed
from colossax.pallas.target import Target

from .mask import Mask, dense
from .operands import Operands, Scoring
from .spec import AttentionSpec

DENSE_MASK_BYTES = 2**30
"""Largest mask that is handed over as an array; beyond, the blockwise form needs less memory."""


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """The first thing about this call that cuDNN cannot do."""
    reasons = (
        _hardware(spec, target),
        _features(spec),
        _mask(spec),
    )
    return next((r for r in reasons if r is not None), None)


def _hardware(spec: AttentionSpec, target: Target) -> str | None:
    if target.platform != "gpu":
        return f"cuDNN needs an NVIDIA GPU, the target is '{target.platform}'"
    capability = target.compute_capability
    if capability is not None and capability < (8, 0):
        return f"cuDNN's fused attention needs compute capability 8.0, found {capability}"
    if not cudnn_installed():
        return (
            "cuDNN, which plans its kernels here, is not installed: pip install 'colossax[cudnn]'"
        )
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, found {spec.dtype}"
    largest = 256 if capability is not None and capability >= (9, 0) else 128
    if spec.head_dim > largest or spec.head_dim % 8:
        return f"head size {spec.head_dim} is not a multiple of 8 up to {largest}"
    if spec.v_head_dim != spec.head_dim:
        return f"head sizes {spec.head_dim} and {spec.v_head_dim} of keys and values differ"
    return None


def _features(spec: AttentionSpec) -> str | None:
    asked = {
        "biases": spec.biases or spec.relative,
        "alibi_slopes": spec.alibi,
        "soft_cap": spec.soft_cap,
        "sinks": spec.sinks,
        "dropout by places": spec.dropout,
        # JAX rounds cuDNN's lse to the output's dtype and drops its gradient.
        "return_lse": spec.return_lse,
    }
    names = [name for name, wanted in asked.items() if wanted]
    return f"{', '.join(names)} not available in JAX's cuDNN attention" if names else None


def _mask(spec: AttentionSpec) -> str | None:
    mask = spec.mask
    if mask.causal and mask.indexed and spec.q_length != spec.kv_length:
        return f"causal with {spec.q_length} queries and {spec.kv_length} keys, lengths must agree"
    if not _needs_dense(mask):
        return None
    if spec.q_length % 2 or spec.kv_length % 2:
        return f"odd lengths {spec.q_length}, {spec.kv_length} with a mask that is an array"
    mask_bytes = spec.batch * spec.q_length * spec.kv_length * spec.dtype.itemsize
    if mask_bytes > DENSE_MASK_BYTES:
        return f"the mask as an array takes {mask_bytes} bytes, more than {DENSE_MASK_BYTES}"
    return None


def _native(mask: Mask) -> bool:
    """Whether cuDNN's own causal mask and left window express the order of positions."""
    return mask.indexed and (mask.causal or not mask.ordered)


def _needs_dense(mask: Mask) -> bool:
    return not _native(mask) or mask.q_segments is not None or mask.kv_valid is not None


def attend(operands: Operands, scoring: Scoring) -> tuple[Float[Array, "b s n h"], None]:
    """Attention for the calls that `why_not` accepts; no log-partition.

    Cost: segments, positions and padding make a mask of b s t items in q's dtype, in memory; only
    causal and left-window masks skip work.
    """
    q, k, v, mask = operands.q, operands.k, operands.v, operands.masked
    native = _native(mask)
    seen = None
    if _needs_dense(mask):
        seen = dense(mask, q.shape[1], k.shape[1])
        seen = jnp.broadcast_to(seen, (q.shape[0], *seen.shape[1:]))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=seen,
        scale=scoring.scale,
        is_causal=native and mask.causal,
        local_window_size=(mask.left, 0) if native and mask.left is not None else None,
        implementation="cudnn",
    )
    if seen is not None:
        # cuDNN averages all values for a query that sees nothing.
        out = jnp.where(jnp.any(seen, axis=-1)[:, 0, :, None, None], out, jnp.zeros((), out.dtype))
    return out, None
