"""Shapes on which attention is measured, and how far from float64 it is there."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import Case, relative_error, tolerance
from colossax.pallas.target import Target

from .api import IMPLEMENTATIONS, attention
from .block import attend_block
from .mask import Mask, row_ranges
from .spec import AttentionSpec

ANCHOR = "cudnn"
STEP = "step"
"""The one implementation of a ring step; beside it stands attention to its block alone."""

ROWS_CHECKED = 64
ALL_ROWS_UP_TO = 2048
TOKENS = 16_384
WIDTH = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One shape of attention; `documents` packed in each row, `offset` a ring's.

    `window` is that of `Mask`; the label counts its keys as people do, the query's own included.
    """

    tokens: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: tuple[int | None, int | None] | None = None
    documents: int = 1
    offset: int = 0

    @property
    def label(self) -> str:
        """For people."""
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else str(self.heads)
        kind = "causal" if self.causal else "full"
        more = [f"window {self.window[0] + 1}"] if self.window and self.window[0] else []
        more += [f"{self.documents} documents"] if self.documents > 1 else []
        more += [f"offset {self.offset}"] if self.offset else []
        return " ".join([f"{self.rows} x {self.tokens}, {heads} of {self.head_dim}, {kind}", *more])

    def mask(self) -> Mask:
        """Who sees whom."""
        fields: dict[str, Any] = {}
        if self.documents > 1:
            segments = jnp.asarray(document_of(self.tokens, self.documents)[None])
            fields = {"q_segments": segments, "kv_segments": segments}
        if self.offset:
            places = jnp.arange(self.tokens, dtype=jnp.int32)[None]
            fields = {"q_positions": places + self.offset, "kv_positions": places}
        return Mask(causal=self.causal, window=self.window, ascending=True, **fields)

    def pairs(self) -> int:
        """Visible pairs of a query and a key, of all rows and heads."""
        lo, hi = row_ranges(self.mask(), self.tokens, self.tokens)
        return int(np.sum(np.asarray(hi - lo, np.int64))) * self.rows * self.heads

    def inputs(self, seed: int, dtype: Any) -> tuple[Any, ...]:
        """q, k, v and the gradient of the output."""
        keys = jax.random.split(jax.random.key(seed), 4)
        q, k = ((self.rows, self.tokens, n, self.head_dim) for n in (self.heads, self.kv_heads))
        return tuple(
            jax.random.normal(key, size, dtype)
            for key, size in zip(keys, (q, k, k, q), strict=True)
        )


def document_of(tokens: int, documents: int) -> np.ndarray:
    """Documents of uneven lengths, the same in every run: shares drawn once."""
    shares = np.random.default_rng(0).dirichlet(np.full(documents, 4.0))
    ends = np.round(np.cumsum(shares) * tokens).astype(int)
    return (
        np.searchsorted(ends, np.arange(tokens), side="right")
        .clip(0, documents - 1)
        .astype(np.int32)
    )


def shapes(scale: int) -> Iterator[Shape]:
    """The shapes measured; tokens are divided by `scale`, heads too, for slower devices."""
    tokens, width = TOKENS // scale, max(128, WIDTH // scale)
    for length in (1024, 4096, 16_384):
        for size in (64, 128):
            for causal in (False, True):
                yield Shape(
                    tokens=max(64, length // scale),
                    rows=max(1, tokens // max(64, length // scale)),
                    heads=width // size,
                    kv_heads=width // size,
                    head_dim=size,
                    causal=causal,
                )
    long = {"tokens": 32_768 // scale, "rows": 1, "head_dim": 128, "causal": True}
    many = max(4, 32 // scale)
    yield Shape(**{**long, "tokens": 8192 // scale}, heads=many, kv_heads=many // 4)
    heads = {"heads": max(2, 16 // scale), "kv_heads": max(2, 16 // scale)}
    yield Shape(**long, **heads, window=(max(15, 1024 // scale - 1), None))
    yield Shape(**long, **heads, documents=16)
    yield Shape(**{**long, "tokens": 8192 // scale}, **heads, offset=8192 // scale)


def checks(scale: int) -> Iterator[Shape]:
    """Shapes of uneven length, short enough for float64 gradients of all keys."""
    base = {"tokens": 1900 // scale, "rows": 2, "heads": 4, "kv_heads": 2, "causal": True}
    for size in (64, 96, 128, 192, 256):
        yield Shape(**base, head_dim=size)
    yield Shape(**base, head_dim=128, window=(max(7, 300 // scale - 1), None))
    yield Shape(**base, head_dim=128, documents=5)
    yield Shape(**base, head_dim=128, offset=700 // scale)


def cases(target: Target, *, scale: int, dtype: Any) -> Iterator[Case]:
    """Forward and backward of each shape, in every implementation that takes it."""
    for shape in itertools.chain(checks(scale), shapes(scale)):
        names = [n for n in IMPLEMENTATIONS if _takes(n, shape, target, dtype)]
        names = [n for n in names if n not in ("interpret", "reference")]
        forward = {name: jax.jit(functools.partial(_forward, shape, name)) for name in names}
        anchor = ANCHOR if ANCHOR in names else None
        flops = shape.pairs() * shape.head_dim
        common = {
            "shape": shape.label,
            "anchor": anchor,
            "tolerance": tolerance(dtype),
            "truth": functools.partial(_truth, shape),
        }
        inputs = functools.partial(shape.inputs, dtype=dtype)
        yield Case(
            kernel="attention forward",
            flops=4.0 * flops,
            inputs=lambda seed, inputs=inputs: inputs(seed)[:3],
            functions=forward,
            error=_forward_error,
            **common,
        )
        if shape.offset:
            plain = forward[names[0]]
            yield Case(
                kernel="ring step",
                flops=4.0 * flops,
                inputs=functools.partial(_with_carried, shape, inputs),
                functions={
                    STEP: jax.jit(functools.partial(_step, shape)),
                    names[0]: lambda q, k, v, *_, plain=plain: plain(q, k, v),
                },
                error=_step_error,
                **{
                    **common,
                    "anchor": names[0],
                    "truth": functools.partial(_step_truths, shape),
                },
            )
        yield Case(
            kernel="attention backward",
            flops=10.0 * flops,
            inputs=functools.partial(_with_residuals, shape, inputs, names),
            functions={name: _backward(name) for name in names},
            error=_backward_error,
            **common,
        )


def _takes(name: str, shape: Shape, target: Target, dtype: Any) -> bool:
    spec = AttentionSpec(
        batch=shape.rows,
        q_length=shape.tokens,
        kv_length=shape.tokens,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        dtype=jnp.dtype(dtype),
        mask=shape.mask(),
    )
    return IMPLEMENTATIONS[name].why_not(spec, target) is None


def _forward(shape: Shape, name: str, q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, mask=shape.mask(), implementation=name)


def _with_carried(shape: Shape, inputs: Callable[[int], Any], seed: int) -> tuple[Any, ...]:
    """q, k, v and a result as random keys of one block more would leave it, of equal weight."""
    q, k, v, out = inputs(seed)
    # Of T keys with logits of variance 1, lse is log T + 1/2, and the output's variance e / T.
    out = out.astype(jnp.float32) * math.sqrt(math.e / shape.tokens)
    noise = jax.random.normal(jax.random.key(seed), (shape.rows, shape.heads, shape.tokens))
    return q, k, v, out, math.log(shape.tokens) + 0.5 + noise


def _step(shape: Shape, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    """One step of a ring as the sequence schemes take it, merged with those before."""
    scale = 1 / math.sqrt(shape.head_dim)
    return attend_block(q, k, v, mask=shape.mask(), scale=scale, carried=(out, lse))[0]


def _with_residuals(
    shape: Shape, inputs: Callable[[int], Any], names: list[str], seed: int
) -> tuple[Any, ...]:
    """q, k, v, the output's gradient, and what each implementation keeps for its backward pass."""
    q, k, v, dout = inputs(seed)
    kept = {}
    for name in names:
        forward = functools.partial(_forward, shape, name)
        _, kept[name] = jax.jit(functools.partial(jax.vjp, forward))(q, k, v)
    return q, k, v, dout, kept


def _backward(name: str) -> Callable[..., Any]:
    pull = jax.jit(lambda kept, dout: kept(dout))
    return lambda q, k, v, dout, kept: pull(kept[name], dout)


@dataclasses.dataclass(frozen=True)
class _Truth:
    """Of the last row of the batch and the query heads of its last kv head, in float64.

    dk and dv only where all queries are sampled.
    """

    rows: np.ndarray
    out: list[np.ndarray]
    lse: list[np.ndarray]
    dq: list[np.ndarray]
    dk: Any = None
    dv: Any = None


def _truth(shape: Shape, given: Any) -> _Truth:
    group = shape.heads // shape.kv_heads
    truth = _Truth(_sample(shape), [], [], [])
    k, v = (_wide(x[-1, :, -1]) for x in given[1:3])
    lo, hi = (np.asarray(x)[0] for x in row_ranges(shape.mask(), shape.tokens, shape.tokens))
    keys = np.arange(shape.tokens)
    seen = (keys >= lo[truth.rows, None]) & (keys < hi[truth.rows, None])
    scale = 1 / math.sqrt(shape.head_dim)
    dk, dv = 0.0, 0.0
    for head in range(shape.heads - group, shape.heads):
        q = _wide(given[0][-1, truth.rows, head])
        logits = np.where(seen, q @ k.T * scale, -np.inf)
        top = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=1, keepdims=True)
        p = weights / total
        truth.out.append(p @ v)
        truth.lse.append((top + np.log(total))[:, 0])
        if len(given) < 4:
            continue
        dout = _wide(given[3][-1, truth.rows, head])
        ds = p * (dout @ v.T - np.sum(dout * truth.out[-1], axis=1, keepdims=True)) * scale
        truth.dq.append(ds @ k)
        dk, dv = dk + ds.T @ q, dv + p.T @ dout
    all_rows = len(truth.rows) == shape.tokens
    return dataclasses.replace(truth, dk=dk if all_rows else None, dv=dv if all_rows else None)


def _step_truths(shape: Shape, given: Any) -> dict[bool, _Truth]:
    """Of attention to the block alone and, under True, merged with what is carried."""
    alone = _truth(shape, given[:3])
    merged, heads = [], range(shape.heads - len(alone.out), shape.heads)
    for head, out, lse in zip(heads, alone.out, alone.lse, strict=True):
        before, before_lse = _wide(given[3][-1, alone.rows, head]), given[4][-1, head, alone.rows]
        # Of the whole softmax; every query sees a key here.
        share = 1 / (1 + np.exp(_wide(before_lse) - lse))[:, None]
        merged.append(share * out + (1 - share) * before)
    return {False: alone, True: dataclasses.replace(alone, out=merged)}


def _sample(shape: Shape) -> np.ndarray:
    if shape.tokens <= ALL_ROWS_UP_TO:
        return np.arange(shape.tokens)
    return np.sort(np.random.default_rng(1).choice(shape.tokens, ROWS_CHECKED, replace=False))


def _of_heads(x: Any, truth: _Truth) -> np.ndarray:
    """Sampled rows of the heads that are checked, head by head."""
    heads = len(truth.out)
    return np.swapaxes(_wide(x[-1, truth.rows, -heads:]), 0, 1)


def _forward_error(_name: str, truth: _Truth, out: Any) -> float:
    return relative_error(_of_heads(out, truth), np.stack(truth.out))


def _step_error(name: str, truths: dict[bool, _Truth], out: Any) -> float:
    return _forward_error(name, truths[name == STEP], out)


def _backward_error(_name: str, truth: _Truth, gradients: Any) -> float:
    """The worst of dq in sampled rows and, where all rows are sampled, of dk and dv."""
    errors = [relative_error(_of_heads(gradients[0], truth), np.stack(truth.dq))]
    for gradient, wanted in ((gradients[1], truth.dk), (gradients[2], truth.dv)):
        if wanted is not None:
            errors.append(relative_error(_wide(gradient[-1, :, -1]), wanted))
    return max(errors)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)
