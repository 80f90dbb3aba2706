"""What the Mosaic kernels of attention are tried on before `auto` takes them."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import tolerance
from colossax.pallas.proof.trial import Trial
from colossax.pallas.target import current_target

from .api import IMPLEMENTATIONS, attention
from .block import attend_block, block_gradients
from .mask import Mask
from .merge import row_delta
from .mosaic_gpu.shapes import HEAD_SIZES
from .spec import AttentionSpec, AttentionVariant

SOFT_CAP = 5.0
BIAS_TOKENS = 2048
"""Of the larger case with a bias, which is an array of their square."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the cases.

    Attributes:
        small: Queries of a row of the small case; keys are as many and half as many again.
        tokens: Queries and keys of the larger case.
        heads: Of the larger case.
    """

    small: int = 203
    tokens: int = 4096
    heads: int = 16


def variants() -> Iterator[AttentionVariant]:
    """All that `auto` asks for, the usual ones first; a bias has the dtype of q or float32."""
    for dtype in ("bfloat16", "float16"):
        for h, hv in HEAD_SIZES:
            one = AttentionVariant(head_dim=h, v_head_dim=hv, dtype=dtype)
            for soft_cap in (False, True):
                for bias in ("", "float32", dtype):
                    yield dataclasses.replace(one, soft_cap=soft_cap, bias=bias)
                yield dataclasses.replace(one, soft_cap=soft_cap, block=True)


def trials(
    variant: AttentionVariant, *, kernel: str = "mosaic", sizes: Sizes = Sizes()
) -> Iterator[Trial]:
    """A small case of uneven sizes with four kinds of rows, and a larger one that is timed."""
    small = sizes.small
    yield _trial(
        variant,
        kernel,
        "windows, packed rows and fewer heads of keys",
        _mask(small, small + small // 2),
        (4, small, small + small // 2, 4, 2),
    )
    tokens = min(sizes.tokens, BIAS_TOKENS) if variant.bias else sizes.tokens
    larger = (1, tokens, tokens, sizes.heads, sizes.heads)
    trial = _trial(variant, kernel, f"{tokens} tokens, causal", Mask(causal=True), larger)
    yield dataclasses.replace(trial, peers=_peers(variant, larger))


def _mask(s: int, t: int) -> Mask:
    """Rows under one window: plain, packed, later in a ring, and with places far apart or equal.

    The last row is wider than the window, as its tokens share their places by eights.
    """
    rows, keys = np.arange(s), np.arange(t)
    q_segments = np.stack([0 * rows, np.searchsorted([s // 3, s // 3 + 1, s - 9], rows), 0 * rows])
    kv_segments = np.stack([0 * keys, np.searchsorted([s // 3, s // 3 + 5, t - 9], keys), 0 * keys])
    q_segments[1, s - 9 :] = 7  # of which there are no keys
    q_positions = np.stack([rows, rows, rows + s // 2])
    return Mask(
        causal=True,
        window=(2 * s // 5, None),
        q_segments=_with(q_segments, 0 * rows),
        kv_segments=_with(kv_segments, 0 * keys),
        q_positions=_with(q_positions, rows // 8),
        kv_positions=_with(np.stack([keys] * 3), keys // 8),
        ascending=True,
    )


def _with(rows: np.ndarray, last: np.ndarray) -> Any:
    return jnp.asarray(np.concatenate([rows, last[None]]), jnp.int32)


def _trial(
    variant: AttentionVariant, kernel: str, name: str, mask: Mask, sizes: tuple[int, ...]
) -> Trial:
    call = _block_call if variant.block else _attention_call
    run = functools.partial(call, variant, mask)
    return Trial(
        name=name,
        inputs=_inputs(variant, sizes),
        kernel=functools.partial(run, kernel),
        truth=functools.partial(run, "xla"),
        tolerance=tolerance(variant.dtype),
    )


def _inputs(variant: AttentionVariant, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """q, k, v, the output's gradient, a bias or nothing, and what a ring has found before."""
    b, s, t, n, k = sizes
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = (
        (b, s, n, variant.head_dim),
        (b, t, k, variant.head_dim),
        (b, t, k, variant.v_head_dim),
        (b, s, n, variant.v_head_dim),
    )
    arrays = [jax.random.normal(r, x, variant.dtype) for r, x in zip(keys, shapes, strict=False)]
    if variant.bias:
        arrays.append(jax.random.normal(keys[4], (1, n if b > 1 else 1, s, t), variant.bias))
    if variant.block:
        out = jax.random.normal(keys[5], shapes[3], jnp.float32)
        # Near 0 of either sign; some rows have seen nothing.
        lse = jax.random.uniform(keys[6], (b, n, s), minval=-0.3, maxval=0.3)
        arrays += [out, jnp.where(jnp.arange(s) % 7 == 3, -jnp.inf, lse)]
    return tuple(arrays)


def _attention_call(
    variant: AttentionVariant, mask: Mask, name: str, q: Any, k: Any, v: Any, dout: Any, *bias: Any
) -> dict[str, Any]:
    """Output, log-partition, and their gradients."""

    def call(*arrays: Any) -> Any:
        return attention(
            *arrays[:3],
            mask=mask,
            biases=arrays[3:],
            soft_cap=SOFT_CAP if variant.soft_cap else None,
            return_lse=name != "cudnn",
            implementation=name,
        )

    result, pull = jax.vjp(call, q, k, v, *bias)
    if name == "cudnn":
        return _named(("out", "dq", "dk", "dv"), (result, *pull(dout)))
    out, lse = result
    gradients = pull((dout, jnp.cos(jnp.arange(lse.size, dtype=lse.dtype)).reshape(lse.shape)))
    named = _named(("out", "dq", "dk", "dv", "dbias"), (out, *gradients))
    return {**named, **_log_partition("lse", lse)}


def _block_call(
    variant: AttentionVariant,
    mask: Mask,
    name: str,
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    out: Any,
    lse: Any,
) -> dict[str, Any]:
    """A step of a ring alone, one that goes on from another, and what it adds to the gradients."""
    given = {
        "mask": mask,
        "scale": 1 / math.sqrt(variant.head_dim),
        "soft_cap": SOFT_CAP if variant.soft_cap else None,
        "implementation": name,
    }
    alone, alone_lse = attend_block(q, k, v, **given)
    merged, merged_lse = attend_block(q, k, v, carried=(out, lse), **given)
    delta = row_delta(merged, merged_lse, dout, jnp.zeros_like(lse))
    *gradients, _ = block_gradients(q, k, v, dout=dout, lse=merged_lse, delta=delta, **given)
    named = _named(("out", "out of both", "dq", "dk", "dv"), (alone, merged, *gradients))
    both = _log_partition("lse of both", merged_lse)
    return {**named, **_log_partition("lse", alone_lse), **both}


def _named(names: tuple[str, ...], arrays: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(names, arrays, strict=False))


def _log_partition(name: str, lse: Any) -> dict[str, Any]:
    """Where it is finite, and where: -inf cannot be subtracted."""
    seen = ~jnp.isneginf(lse)
    return {name: jnp.where(seen, lse, 0.0), f"-inf in {name}": seen.astype(jnp.float32)}


def _peers(variant: AttentionVariant, sizes: tuple[int, ...]) -> dict[str, Any]:
    """What would be taken in place of the kernels, in the dtype of the call."""
    b, s, t, n, k = sizes
    mask = Mask(causal=True)
    spec = AttentionSpec(
        batch=b,
        q_length=s,
        kv_length=t,
        heads=n,
        kv_heads=k,
        head_dim=variant.head_dim,
        v_head_dim=variant.v_head_dim,
        dtype=jnp.dtype(variant.dtype),
        mask=mask,
        soft_cap=variant.soft_cap,
        biases=(jax.ShapeDtypeStruct((1, 1, s, t), variant.bias),) if variant.bias else (),
        return_lse=variant.block,
    )
    cudnn = IMPLEMENTATIONS["cudnn"].why_not(spec, current_target()) is None
    call = _block_call if variant.block else _attention_call
    names = ("cudnn", "xla") if cudnn else ("xla",)
    return {name: functools.partial(call, variant, mask, name) for name in names}
