"""Attention of a decoder's tokens to what an encoder made of a source."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from colossax.layerwise import LayerState
from colossax.nn.attention import Attention, Side
from colossax.nn.cache import CacheArray, CacheSpec
from colossax.nn.dropout import pairs_of
from colossax.pallas.attention import Mask
from colossax.sharding import CACHE_DIMS, attend_cache, attention, constrain, linears


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What an encoder gave.

    Attributes:
        hidden: `[b, t, d]`, as inside of a block.
        mask: Which of its tokens a query sees.
        seat: In generation, the row of the cache that keys and values of each go to, `[b]`.
    """

    hidden: Any
    mask: Any = Mask(causal=False)
    seat: Int[Array, " b"] | None = None


class CrossAttention(Attention):
    """Queries of a decoder's tokens, keys and values of its source, see `Side.source`.

    In generation keys and values are computed once, when a source is read, and kept for each layer;
    later tokens find them in the cache.
    """

    def cache_spec(
        self, *, layers: int, seats: int, slots: int, chunk: int | None = None
    ) -> CacheSpec:
        """Keys and values of the longest source of each seat, whatever `slots` and `chunk` are."""
        longest, shape = self.shape.longest_source, self.shape
        assert longest is not None
        sizes = (layers, seats, longest, shape.kv_heads, shape.head_dim)
        one = CacheArray(shape=sizes, dims=CACHE_DIMS)
        return CacheSpec(arrays={"source_k": one, "source_v": one}, kind="sequence")

    def mix(
        self, x: Float[Array, "b s d"], side: Side, state: LayerState
    ) -> tuple[Float[Array, "b s d"], LayerState, dict]:
        """See `Sublayer`."""
        (q,) = linears(x, (self.q.map,))
        q = constrain(q, "batch:inner", "seq", "heads", "head_dim")
        source, flat = side.source, side.flat
        if flat is None:
            q, k, v = (checkpoint_name(a, "qkv") for a in (q, *self._keys(source.hidden)))
            dropout = pairs_of(side.noise, self.shape.heads)
            out = attention(q, k, v, mask=source.mask, dropout=dropout, **self.shape.scores)
        else:
            if source is not None:
                state = self._read(source, state)
            out, _ = attend_cache(
                q[0],
                None,
                {"k": state.carried["source_k"], "v": state.carried["source_v"]},
                state.row,
                seat=flat.seat,
                position=flat.source - 1,
                slot=flat.slot,
                **self.shape.scores,
            )
            out = out[None]
        return self.o(constrain(out, "batch:inner", "seq", "heads", "head_dim")), state, {}

    def _keys(self, hidden: Float[Array, "b t d"]) -> tuple[Array, Array]:
        k, v = (
            constrain(x, "batch:inner", "seq", "kv_heads", "head_dim")
            for x in linears(hidden, (self.k.map, self.v.map))
        )
        return k, v

    def _read(self, source: Source, state: LayerState) -> LayerState:
        """The state with this layer's keys and values of sources, each in its seat."""
        kept = dict(state.carried)
        for name, new in zip(("source_k", "source_v"), self._keys(source.hidden), strict=True):
            old = kept[name]
            filled = ((0, 0), (0, old.shape[2] - new.shape[1]), (0, 0), (0, 0))
            rows = jnp.pad(new.astype(old.dtype), filled)
            kept[name] = old.at[state.row, source.seat].set(rows, mode="drop")
        return dataclasses.replace(state, carried=kept)
