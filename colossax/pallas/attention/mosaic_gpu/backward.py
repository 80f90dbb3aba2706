"""The backward pass of flash attention as Mosaic GPU kernels, each sum in a fixed order."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.attention.mask import RANGES
from colossax.pallas.mosaic import multiprocessors as target_multiprocessors
from colossax.pallas.padding import pad_to_multiple

from .backward_bias import bias_gradient
from .backward_keys import key_gradients
from .backward_operands import LOG2_E, BackwardVisits, Operands
from .backward_queries import query_gradient
from .backward_tiles import BackwardTiles, tiles_for


def gradients(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    lo: Int[Array, "_ s"] | None = None,
    hi: Int[Array, "_ s"] | None = None,
    bias: Float[Array, "_ _ s t"] | None = None,
    visits: BackwardVisits | None = None,
    dout: Float[Array, "b s n hv"],
    lse: Float[Array, "b n s"],
    delta: Float[Array, "b n s"],
    scale: float,
    soft_cap: float | None = None,
    dtype: Any,
    interpret: bool = False,
    tiles: BackwardTiles | None = None,
    multiprocessors: int | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of softmax attention of each query to its range of keys.

        p  = exp(soft_cap tanh(scale q k / soft_cap) + bias - lse), 0 outside of [lo, hi)
        ds = p (dout v - delta), times 1 - tanh^2 where there is a soft cap
        dq = scale ds k;  dk = scale ds^T q;  dv = p^T dout

    Args:
        q: Queries in bfloat16 or float16; head i reads kv head `i // (n / k)`.
        k: Keys.
        v: Values.
        lo: First key that a query sees, `[b or 1, s]`; neither `lo` nor `hi` falls along a row.
        hi: One behind the last, likewise; where `hi <= lo` a query sees nothing.
        bias: `[b or 1, n or 1, s, t]`.
        visits: Those of these ranges, where they are known; `lo` and `hi` then are not read.
        dout: Gradient of the output.
        lse: Natural log-partition of each row; -inf where it sees nothing.
        delta: `sum(out dout) - dlse` over the head.
        scale: Factor of the products.
        soft_cap: Bound of the logits before the bias.
        dtype: Of dq, dk and dv: that of q, or float32.
        interpret: Whether to run it on the CPU.
        tiles: Shapes of tiles, where those of the table are not wanted.
        multiprocessors: That blocks should fill, where not those of the target in force.

    Returns:
        dq, dk, dv, and the gradient of the bias in float32 and its shape, None without one.

    Raises:
        ValueError: There are no tiles for these head sizes.

    Cost, for P pairs of a query and a key in tiles that are visited: 2 P n (4 h + 3 hv) FLOPs for
    the 5 matmuls of the formulas, as dq and dk/dv compute scores and dp each; a bias adds
    2 P n (h + hv) and is copied transposed. Lengths that tiles do not divide are filled up by a
    copy.
    Source: Dao 2023, FlashAttention-2.
    """
    if tiles is None:
        laden = {"biased": bias is not None, "soft_cap": soft_cap is not None}
        tiles = tiles_for(q.shape[-1], v.shape[-1], **laden)
    s, t = q.shape[1], k.shape[1]
    if visits is None:
        assert lo is not None and hi is not None
        with jax.named_scope(RANGES):
            visits = BackwardVisits.of(lo, hi, t, tiles, bias is not None)
    empty = jnp.isneginf(lse)
    # exp2(x - inf) is 0 for every finite x.
    rows = jnp.stack(
        [jnp.where(empty, jnp.inf, lse * LOG2_E), jnp.where(empty, 0.0, delta)], axis=2
    )
    operands = Operands(
        q=pad_to_multiple(q, {1: tiles.s_multiple}),
        k=pad_to_multiple(k, {1: tiles.t_multiple}),
        v=pad_to_multiple(v, {1: tiles.t_multiple}),
        dout=pad_to_multiple(dout.astype(q.dtype), {1: tiles.s_multiple}),
        rows=pad_to_multiple(rows.astype(jnp.float32), {3: tiles.s_multiple}),
        visits=visits,
        bias=None
        if bias is None
        else pad_to_multiple(bias, {2: tiles.s_multiple, 3: tiles.t_multiple}),
        scale=scale,
        soft_cap=soft_cap,
        dtype=jnp.dtype(dtype),
        interpret=interpret,
    )
    dq = query_gradient(operands, tiles.of_queries)
    dk, dv = key_gradients(operands, tiles.of_keys, multiprocessors or target_multiprocessors())
    dbias = None
    if bias is not None:
        dbias = bias_gradient(operands, tiles.of_bias)[..., :s, :t]
    return dq[:, :s], dk[:, :t], dv[:, :t], dbias
