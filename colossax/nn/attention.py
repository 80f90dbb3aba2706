"""The attention block: projections, position encoding, and the plan's attention between."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from colossax.layerwise import LayerState
from colossax.nn.cache import CacheArray, CacheSpec, window_slots
from colossax.nn.layers import Linear, RMSNorm
from colossax.nn.rope import rotate
from colossax.pallas.attention import Mask, Operands, Scoring
from colossax.sharding import CACHE_DIMS, attend_cache, attention, constrain, linears

Window = tuple[int | None, int | None] | None
"""Keys seen strictly before and after a query, None for all: as of `Mask`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatTokens:
    """Addresses of the tokens of one inference call, `[t]` int32 each.

    Attributes:
        seat: Row of the cache; negative is padding.
        position: Position in the sequence, counted from 0.
        slot: Place in the seat where what is kept of it goes, counted as positions are: a cache
            with fewer takes them in turn.
    """

    seat: Int[Array, " t"]
    position: Int[Array, " t"]
    slot: Int[Array, " t"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """What every layer of a decoder shares.

    Attributes:
        masks: Who sees whom: one for each window that layers have, or one that was given.
        given: Whether that is so: then it holds for all layers, whatever their windows.
        rope: Tables of the rotary embedding, or None.
        flat: Addresses in the cache, where there is one.
        valid: `[b, s]`, which tokens are some, where layers ask; None: all.
        token_ids: `[b, s]`, where layers ask.
        key: Data of a random key for each row, `[b, 2]`, for layers that draw; None: they do not.
    """

    masks: Any = (Mask(causal=True),)
    given: bool = dataclasses.field(default=False, metadata={"static": True})
    rope: Any = None
    flat: Any = None
    valid: Any = None
    token_ids: Any = None
    key: Any = None

    def mask(self, window: Window) -> Mask:
        """That of layers with this window."""
        if self.given:
            return self.masks[0]
        made = (mask for mask in self.masks if mask.window == window)
        return next(made, None) or self.masks[0].changed(window=window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes and switches of an attention block; `head_dim` need not be embed / heads.

    `window` is `(left, right)`, as of `Mask`: keys strictly before and after a query.
    """

    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    alibi: bool = False
    window: Window = None

    def call(self, mask: Mask, x: Float[Array, "b s d"]) -> tuple[Operands, Scoring]:
        """What `sharding.attention` will be given for this input, in shapes, but for the mask."""
        q, kv = (
            jax.ShapeDtypeStruct((*x.shape[:2], heads, self.head_dim), x.dtype)
            for heads in (self.heads, self.kv_heads)
        )
        slopes = jax.ShapeDtypeStruct((self.heads,), jnp.float32) if self.alibi else None
        return Operands(q=q, k=kv, v=kv, mask=mask), Scoring.of(q, alibi_slopes=slopes)


class Attention(nnx.Module):
    """Multi-, grouped- or single-kv-head attention with optional rope, alibi, q/k norms, window."""

    def __init__(self, shape: AttentionShape, *, rngs: nnx.Rngs, std: float, out_std: float):
        self.shape = shape
        q = (shape.embed, shape.heads, shape.head_dim)
        kv = (shape.embed, shape.kv_heads, shape.head_dim)
        kv_dims = ("embed", "kv_heads", "head_dim")
        bias = shape.qkv_bias
        self.q = Linear(q, ("embed", "heads", "head_dim"), rngs=rngs, bias=bias, std=std)
        self.k = Linear(kv, kv_dims, rngs=rngs, bias=bias, std=std)
        self.v = Linear(kv, kv_dims, rngs=rngs, bias=bias, std=std)
        self.o = Linear(
            (shape.heads, shape.head_dim, shape.embed),
            ("heads", "head_dim", "embed"),
            rngs=rngs,
            contract=2,
            bias=shape.out_bias,
            std=out_std,
        )
        norm = (
            (lambda: RMSNorm(shape.head_dim, eps=shape.norm_eps, dim="head_dim"))
            if shape.qk_norm
            else (lambda: None)
        )
        self.q_norm, self.k_norm = norm(), norm()

    def cache_spec(
        self, *, layers: int, seats: int, slots: int, chunk: int | None = None
    ) -> CacheSpec:
        """Keys and values of these many layers, `[layers, seats, slots, kv_heads, head_dim]`.

        With a window, and chunks of at most `chunk` tokens, of as many slots as `window_slots`.
        """
        left = Mask(causal=True, window=self.shape.window).left
        kept = window_slots(left, slots=slots, chunk=chunk)
        shape = (layers, seats, kept, self.shape.kv_heads, self.shape.head_dim)
        one = CacheArray(shape=shape, dims=CACHE_DIMS)
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
        if side.rope is not None:
            q, k = rotate(q, side.rope), rotate(k, side.rope)
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, v))
        slopes = jnp.asarray(alibi_slopes(self.shape.heads)) if self.shape.alibi else None
        if side.flat is None:
            out = attention(q, k, v, mask=side.mask(self.shape.window), alibi_slopes=slopes)
        else:
            out, state = self._attend_cache(q, k, v, side.flat, state, slopes)
        return self.o(constrain(out, "batch:inner", "seq", "heads", "head_dim")), state, {}

    def _attend_cache(self, q, k, v, flat, state, slopes):
        out, cache = attend_cache(
            q[0],
            {"k": k[0], "v": v[0]},
            state.carried,
            state.row,
            seat=flat.seat,
            position=flat.position,
            slot=flat.slot,
            window=self.shape.window,
            alibi_slopes=slopes,
        )
        return out[None], dataclasses.replace(state, carried=cache)


def alibi_slopes(heads: int) -> np.ndarray:
    """Slope per head, `[heads]` float32: 2^(-8 i / n) for n the largest power of two up to heads.

    The remaining heads take every other slope of 2n. Source: Press et al. 2021, ALiBi.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return np.asarray(slopes + extra, np.float32)
