"""Shapes on which attention to pages is measured, and how far from float64 it is there."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import Case, relative_error, tolerance
from colossax.pallas.target import Target

from .api import IMPLEMENTATIONS, paged_attention, spec_of
from .proof import PAGE, counted, paged, parted
from .seen import Seen

CHECKED = 2
"""Sequences that are compared with float64."""


def cases(target: Target, *, scale: int, dtype: Any) -> Iterator[Case]:
    """Tokens that each see a sequence, and that count what they give to each slot of it too.

    Sizes are divided by `scale` for slower devices.
    """
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
        case = Case(
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
        yield case
        if sequences > 1:
            yield _counting(case, names, sum(lengths) * heads[1])


def _counting(case: Case, names: list[str], places: int) -> Case:
    """The same with masses of so many slots and kv heads, which are read and written."""
    functions = {name: jax.jit(functools.partial(counted, name)) for name in names}
    return dataclasses.replace(
        case,
        kernel="paged heavy",
        functions={**functions, "xla": jax.jit(functools.partial(counted, None))},
        truth=functools.partial(_truth, mass=True),
        error=_error_with_mass,
        moved_bytes=case.moved_bytes + 8.0 * places,
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


def _truth(given: tuple[Any, ...], mass: bool = False) -> Any:
    """Of the first sequences, in float64; with masses, those by page, place and kv head too."""
    q, k, v, rows, hi = given
    found = []
    masses = np.full(k.shape[1:4], np.nan)
    for i in range(min(CHECKED, q.shape[0])):
        keys, values = (_wide(x[0, rows[i]]).reshape(-1, *x.shape[3:]) for x in (k, v))
        there = slice(0, int(hi[i, 0]))
        logits = np.einsum("krh,ckh->krc", _wide(q[i, 0]), keys[there]) * q.shape[-1] ** -0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        found.append(np.einsum("krc,ckh->krh", weights, values[there]))
        flat = np.zeros(keys.shape[:2])
        flat[there] = weights.sum(1).T
        masses[np.asarray(rows[i])] = flat.reshape(-1, *k.shape[2:4])
    return (np.stack(found), masses) if mass else np.stack(found)


def _error(_name: str, truth: np.ndarray, out: Any) -> float:
    return relative_error(_wide(out[: len(truth)]), truth)


def _error_with_mass(name: str, truth: Any, found: Any) -> float:
    """The greater one, of pages that the truth has."""
    (outputs, masses), there = truth, ~np.isnan(truth[1])
    of_mass = relative_error(_wide(found[1][0])[there], masses[there])
    return max(_error(name, outputs, found[0]), of_mass)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)
