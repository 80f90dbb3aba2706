"""Shapes on which attention to pages is measured, and how far from float64 it is there."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import Case, relative_error, tolerance
from colossax.pallas.target import Target

from .api import IMPLEMENTATIONS, paged_attention, spec_of
from .proof import PAGE, paged, parted
from .seen import Seen

CHECKED = 2
"""Sequences that are compared with float64."""


def cases(target: Target, *, scale: int, dtype: Any) -> Iterator[Case]:
    """Tokens that each see a sequence; sizes are divided by `scale` for slower devices."""
    heads, h = (max(4, 32 // scale), max(1, 8 // scale)), 128 if scale == 1 else 64
    for sequences, slots in ((64, 2048), (8, 16_384), (1, 32_768)):
        lengths = (max(PAGE, slots // scale),) * max(1, sequences // scale)
        given = functools.partial(_inputs, lengths, heads, h, dtype)
        shapes = jax.eval_shape(lambda given=given: given(0))
        spec = spec_of(*shapes[:3], rows=shapes[3])
        names = [n for n in ("mosaic",) if IMPLEMENTATIONS[n].why_not(spec, target) is None]
        functions: dict[str, Callable[..., Any]] = {
            name: jax.jit(functools.partial(_attend, name)) for name in names
        }
        functions["xla"] = jax.jit(parted)
        pairs = sum(lengths) * heads[1] * 2 * h
        yield Case(
            kernel="paged decode",
            shape=f"{len(lengths)} x {lengths[0]}, {heads[0]}/{heads[1]} of {h}",
            flops=2.0 * pairs * heads[0] // heads[1],
            inputs=given,
            functions=functions,
            anchor="xla",
            truth=_truth,
            error=_error,
            tolerance=tolerance(dtype),
            moved_bytes=float(pairs * jnp.dtype(dtype).itemsize),
        )


def _inputs(
    lengths: tuple[int, ...], heads: tuple[int, int], h: int, dtype: Any, seed: int
) -> tuple[Any, ...]:
    q, k, v, rows = paged(lengths, heads, h, 1, dtype, seed)
    return q, k, v, rows, jnp.asarray(lengths, jnp.int32)[:, None]


def _attend(name: str, q: Any, k: Any, v: Any, rows: Any, hi: Any) -> Any:
    seen = Seen(lo=jnp.zeros_like(hi), hi=hi)
    scale = q.shape[-1] ** -0.5
    found = paged_attention(q, k, v, 0, rows=rows, seen=seen, scale=scale, implementation=name)
    return found.out[:, 0]


def _truth(given: tuple[Any, ...]) -> np.ndarray:
    """Of the first sequences, in float64."""
    q, k, v, rows, hi = given
    found = []
    for i in range(min(CHECKED, q.shape[0])):
        keys, values = (_wide(x[0, rows[i]]).reshape(-1, *x.shape[3:]) for x in (k, v))
        there = slice(0, int(hi[i, 0]))
        logits = np.einsum("krh,ckh->krc", _wide(q[i, 0]), keys[there]) * q.shape[-1] ** -0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        found.append(np.einsum("krc,ckh->krh", weights, values[there]))
    return np.stack(found)


def _error(_name: str, truth: np.ndarray, out: Any) -> float:
    return relative_error(_wide(out[: len(truth)]), truth)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)
