"""The attention block: projections, position encoding, and the plan's attention between."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from colossax.errors import InputError
from colossax.layerwise import LayerState
from colossax.nn.cache import CacheArray, CacheSpec, window_slots
from colossax.nn.config import QueryGrowth
from colossax.nn.dropout import Noise, pair_shapes, pairs_of
from colossax.nn.layers import HeadsLayerNorm, HeadsRMSNorm, Linear, RMSNorm
from colossax.nn.module import param
from colossax.nn.rope import rotate
from colossax.nn.stack.taps import tapped
from colossax.pallas.attention import Mask, Operands, Pages, Retrieved, Scoring
from colossax.pallas.attention.codes import SCALE
from colossax.pallas.attention.kept import HEAVY
from colossax.sharding import (
    CACHE_DIMS,
    attend_cache,
    attend_retrieved,
    attention,
    constrain,
    gather_weight,
    linears,
)

OWN = ("k", "v")
"""What self-attention keeps of a token; others of a block may keep something too."""

Window = tuple[int | None, int | None] | None
"""Keys seen strictly before and after a query, None for all: as of `Mask`."""

Sight = tuple[Window, int | None]
"""What layers see: a window, and positions of a chunk."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatTokens:
    """Addresses of the tokens of one inference call, `[t]` int32 each.

    Attributes:
        seat: Row of the cache; negative is padding.
        position: Position in the sequence, counted from 0.
        slot: Place in the seat where what is kept of it goes, counted as positions are: a cache
            with fewer takes them in turn.
        source: How many tokens its seat's source has, where there is one.
        pages: Rows of the cache of each seat, where those are pages; None: a seat is a row.
        closer: How much closer than positions say it sees the first pages of its seat, where seats
            keep those and a window (`Pages.kept`); None: none does.
        length: How long its sequence is, for rotary embeddings that ask; None: what comes of it in
            this call is all.
        retrieved: Of tokens that are guessed, which pages they see and where they stand; then the
            cache is only read. None: they see all of their seat.
    """

    seat: Int[Array, " t"]
    position: Int[Array, " t"]
    slot: Int[Array, " t"]
    source: Int[Array, " t"] | None = None
    pages: Pages | None = None
    closer: Int[Array, " t"] | None = None
    length: Int[Array, " t"] | None = None
    retrieved: Retrieved | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """What every layer of a decoder shares.

    Attributes:
        masks: Who sees whom: one for each sight that layers have, or one that was given.
        sights: Of each mask; none where one was given, which holds for all layers.
        rope: Tables of the rotary embedding, or None.
        local_rope: Those of layers that do not see all keys, where they have others.
        turns: What turns queries that meet first pages which are closer: `rope`'s and
            `local_rope`'s tables by those names.
        positions: `[b, s]`, where layers without rope ask.
        biases: Of self-attention, shared by all layers.
        source: What cross-attention reads, or None.
        flat: Addresses in the cache, where there is one.
        valid: `[b, s]`, which tokens are some, where layers ask; None: all.
        token_ids: `[b, s]`, where layers ask.
        key: Data of a random key for each row, `[b, 2]`, for gates that draw; None: they do not.
        noise: What is dropped, see `Noise`; a sublayer gets its own. None: nothing is.
    """

    masks: Any = (Mask(causal=True),)
    sights: tuple[Sight, ...] = dataclasses.field(default=(), metadata={"static": True})
    rope: Any = None
    local_rope: Any = None
    turns: Any = None
    positions: Any = None
    biases: tuple[Any, ...] = ()
    source: Any = None
    flat: Any = None
    valid: Any = None
    token_ids: Any = None
    key: Any = None
    noise: Any = None

    def mask(self, window: Window, chunk: int | None = None) -> Mask:
        """That of layers with this window, and chunks of so many positions.

        Raises:
            InputError: No layer's attention has such chunks.
        """
        if not self.sights:
            return self.masks[0]
        if (window, chunk) in self.sights:
            return self.masks[self.sights.index((window, chunk))]
        for mask, (_, made) in zip(self.masks, self.sights, strict=True):
            if made == chunk:
                return mask.changed(window=window)
        raise InputError(
            f"attention: there is no mask for chunks of {chunk} positions; give the chunk in the"
            " configuration, or in the shape of the layer's Attention"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes and switches of an attention block; `head_dim` need not be embed / heads.

    `window` is `(left, right)`, as of `Mask`: keys strictly before and after a query. The others
    are fields of `DecoderConfig`, of the layer's kind; `turned` is whether it has rope,
    `local_rope` whether that is `Side.local_rope`.
    """

    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    key_bias: bool = True
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_norm_layer: bool = False
    qk_unit: bool = False
    sinks: bool = False
    query_growth: QueryGrowth | None = None
    score_scale: float | None = None
    score_cap: float | None = None
    norm_eps: float = 1e-6
    norm_from_one: bool = False
    alibi: bool = False
    alibi_scale: float = 1.0
    window: Window = None
    chunk: int | None = None
    turned: bool = True
    local_rope: bool = False
    interleaved: bool = False
    longest_source: int | None = None

    @property
    def sight(self) -> Sight:
        """What it sees."""
        return self.window, self.chunk

    @property
    def scores(self) -> dict[str, Any]:
        """How products of queries and keys become scores, as attention takes it."""
        return {"scale": self.score_scale, "soft_cap": self.score_cap}

    def call(
        self,
        mask: Mask,
        x: Float[Array, "b s d"],
        *,
        source: Float[Array, "b t d"] | None = None,
        biases: Sequence[Any] = (),
        noise: Noise | None = None,
    ) -> tuple[Operands, Scoring]:
        """What `sharding.attention` will be given for this input, in shapes, but for the mask.

        Args:
            mask: Who sees whom.
            x: Of queries.
            source: Of keys and values; None: x.
            biases: Of scores.
            noise: What is dropped.
        """
        q, kv = (
            jax.ShapeDtypeStruct((*of.shape[:2], heads, self.head_dim), x.dtype)
            for heads, of in ((self.heads, x), (self.kv_heads, x if source is None else source))
        )
        of_heads = jax.ShapeDtypeStruct((self.heads,), jnp.float32)
        scoring = Scoring.of(
            q,
            alibi_slopes=of_heads if self.alibi else None,
            sinks=of_heads if self.sinks else None,
            biases=jax.tree.map(lambda b: jax.ShapeDtypeStruct(b.shape, b.dtype), tuple(biases)),
            dropout=pair_shapes(noise, x.shape[0], self.heads),
            **self.scores,
        )
        return Operands(q=q, k=kv, v=kv, mask=mask), scoring


class Attention(nnx.Module):
    """Multi-, grouped- or single-kv-head attention with optional rope, alibi, q/k norms, window.

    Where its shape has sinks they are a parameter `sinks` `[heads]`.
    """

    def __init__(self, shape: AttentionShape, *, rngs: nnx.Rngs, std: float, out_std: float):
        self.shape = shape
        q = (shape.embed, shape.heads, shape.head_dim)
        kv = (shape.embed, shape.kv_heads, shape.head_dim)
        kv_dims = ("embed", "kv_heads", "head_dim")
        bias = shape.qkv_bias
        self.q = Linear(q, ("embed", "heads", "head_dim"), rngs=rngs, bias=bias, std=std)
        self.k = Linear(kv, kv_dims, rngs=rngs, bias=bias and shape.key_bias, std=std)
        self.v = Linear(kv, kv_dims, rngs=rngs, bias=bias, std=std)
        self.o = Linear(
            (shape.heads, shape.head_dim, shape.embed),
            ("heads", "head_dim", "embed"),
            rngs=rngs,
            contract=2,
            bias=shape.out_bias,
            std=out_std,
        )
        self.q_norm = _norm_of(shape, shape.heads, "heads")
        self.k_norm = _norm_of(shape, shape.kv_heads, "kv_heads")
        self.sinks = param(jnp.zeros((shape.heads,)), ("heads",)) if shape.sinks else None

    def cache_spec(
        self, *, layers: int, seats: int, slots: int, chunk: int | None = None
    ) -> CacheSpec:
        """Keys and values of these many layers, `[layers, seats, slots, kv_heads, head_dim]`.

        With a window or chunks of positions, and calls of at most `chunk` tokens, of as many slots
        as `window_slots`.
        """
        left = Mask(causal=True, window=self.shape.window).left
        if self.shape.chunk is not None:
            left = self.shape.chunk - 1 if left is None else min(left, self.shape.chunk - 1)
        kept = window_slots(left, slots=slots, chunk=chunk)
        shape = (layers, seats, kept, self.shape.kv_heads, self.shape.head_dim)
        one = CacheArray(shape=shape, dims=CACHE_DIMS, coded=True)
        kind = "contiguous" if kept == slots else "windowed"
        return CacheSpec(arrays={"k": one, "v": one}, kind=kind)

    def mix(
        self, x: Float[Array, "b s d"], side: Side, state: LayerState
    ) -> tuple[Float[Array, "b s d"], LayerState, dict]:
        """See `Sublayer`."""
        q, k, v = linears(x, (self.q.map, self.k.map, self.v.map))
        q = constrain(q, "batch:inner", "seq", "heads", "head_dim")
        k = constrain(k, "batch:inner", "seq", "kv_heads", "head_dim")
        v = constrain(v, "batch:inner", "seq", "kv_heads", "head_dim")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._placed(q, k, side)
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, v))
        state = tapped(state, k=k, v=v)
        slopes = None
        if self.shape.alibi:
            slopes = jnp.asarray(alibi_slopes(self.shape.heads) * self.shape.alibi_scale)
        sinks = None
        if self.sinks is not None:
            sinks = gather_weight(self.sinks[...], ("heads",), dtype=jnp.dtype("float32"))
        of_heads = {"alibi_slopes": slopes, "sinks": sinks, "biases": side.biases}
        if side.flat is None:
            mask = side.mask(*self.shape.sight)
            dropout = pairs_of(side.noise, self.shape.heads)
            out = attention(q, k, v, mask=mask, dropout=dropout, **of_heads, **self.shape.scores)
        else:
            sink_q = self._closer(q, side)
            out, state = self._attend_cache(q, k, v, side.flat, state, of_heads, sink_q)
        return self.o(constrain(out, "batch:inner", "seq", "heads", "head_dim")), state, {}

    def _placed(self, q: Array, k: Array, side: Side) -> tuple[Array, Array]:
        """Queries and keys as their positions make them."""
        shape = self.shape
        rope = side.local_rope if shape.local_rope else side.rope
        if shape.turned and rope is not None:
            q, k = (rotate(x, rope, interleaved=shape.interleaved) for x in (q, k))
            return (_unit(q, shape.norm_eps), _unit(k, shape.norm_eps)) if shape.qk_unit else (q, k)
        growth = shape.query_growth
        if growth is not None and side.positions is not None:
            steps = jnp.floor((side.positions.astype(jnp.float32) + 1) / growth.step)
            by = 1 + growth.scale * jnp.log1p(steps)
            q = (q.astype(jnp.float32) * by[..., None, None]).astype(q.dtype)
        return q, k

    def _closer(self, q: Array, side: Side) -> Array | None:
        """Queries as they meet first pages that are closer than positions say."""
        name = "local_rope" if self.shape.local_rope else "rope"
        if side.turns is None or not self.shape.turned or name not in side.turns:
            return None
        return rotate(q, side.turns[name])[0]

    def _attend_cache(self, q, k, v, flat, state, of_heads, sink_q):
        if flat.retrieved is not None:
            window, chunk = self.shape.sight
            out, cache = attend_retrieved(
                q[0],
                {"k": k[0], "v": v[0]},
                state.carried,
                state.row,
                retrieved=flat.retrieved,
                window=window,
                chunk=chunk,
                **{name: x for name, x in of_heads.items() if name != "biases"},
                **self.shape.scores,
            )
            return out[None], dataclasses.replace(state, carried=cache)
        out, cache = attend_cache(
            q[0],
            {"k": k[0], "v": v[0]},
            {n: x for n, x in state.carried.items() if n.removesuffix(SCALE) in OWN + HEAVY},
            state.row,
            seat=flat.seat,
            position=flat.position,
            slot=flat.slot,
            window=self.shape.window,
            chunk=self.shape.chunk,
            pages=flat.pages,
            sink_q=sink_q,
            **of_heads,
            **self.shape.scores,
        )
        return out[None], dataclasses.replace(state, carried={**state.carried, **cache})


def _norm_of(
    shape: AttentionShape, heads: int, dim: str
) -> RMSNorm | HeadsRMSNorm | HeadsLayerNorm | None:
    sizes, dims = (heads, shape.head_dim), (dim, "head_dim")
    if shape.qk_norm_whole:
        return HeadsRMSNorm(sizes, dims, eps=shape.norm_eps)
    if shape.qk_norm_layer:
        return HeadsLayerNorm(sizes, dims, eps=shape.norm_eps)
    if shape.qk_norm:
        from_one = shape.norm_from_one
        return RMSNorm(shape.head_dim, eps=shape.norm_eps, dim="head_dim", from_one=from_one)
    return None


def _unit(x: Float[Array, "b s n h"], eps: float) -> Float[Array, "b s n h"]:
    """Over the root mean square of its last dim, in float32."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + eps)).astype(x.dtype)


def alibi_slopes(heads: int) -> np.ndarray:
    """Slope per head, `[heads]` float32: 2^(-8 i / n) for n the largest power of two up to heads.

    The remaining heads take every other slope of 2n. Source: Press et al. 2021, ALiBi.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return np.asarray(slopes + extra, np.float32)
