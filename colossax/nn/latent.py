"""Multi-head latent attention: keys and values of all heads from one narrow vector a token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from colossax.layerwise import LayerState
from colossax.nn.attention import Side, Window
from colossax.nn.cache import CacheArray, CacheSpec
from colossax.nn.config import LatentConfig
from colossax.nn.dropout import Noise, pair_shapes, pairs_of
from colossax.nn.layers import Linear, RMSNorm
from colossax.nn.rope import rotate
from colossax.pallas.attention import Mask, Operands, Scoring
from colossax.sharding import attend_cache, attention, constrain, linears

LATENT_DIMS = ("layers", None, None, "kv_latent")
"""Of a cache of latents: `[layers, seats, slots, kv_rank + rope_dim]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes and switches of a latent attention block.

    `interleaved` is that of `rotate`; `norm_eps` that of the norms of latents.
    """

    embed: int
    heads: int
    sizes: LatentConfig
    interleaved: bool = False
    norm_eps: float = 1e-6
    window: Window = None

    @property
    def scale(self) -> float:
        """What logits are multiplied by."""
        return self.sizes.scale * self.sizes.head_dim**-0.5

    def call(
        self, mask: Mask, x: Float[Array, "b s d"], *, noise: Noise | None = None
    ) -> tuple[Operands, Scoring]:
        """See `AttentionShape`."""
        qk, v = (
            jax.ShapeDtypeStruct((*x.shape[:2], self.heads, width), x.dtype)
            for width in (self.sizes.head_dim, self.sizes.v_dim)
        )
        dropout = pair_shapes(noise, x.shape[0], self.heads)
        scoring = Scoring.of(qk, scale=self.scale, dropout=dropout)
        return Operands(q=qk, k=qk, v=v, mask=mask), scoring


class LatentAttention(nnx.Module):
    """Attention whose keys and values are `kv_up(norm(latent))`, but for a shared rotary part.

    `kv_down` maps a token to its latent, `kv_rank` wide, and to the part of its keys that is turned
    by position, `rope_dim` wide and the same for all heads. Queries come from the residual stream
    (`q`), or from a latent of their own (`q_down`, `q_norm`, `q_up`).

    In training keys and values are made for every head. With a cache they never are: it keeps
    `kv_rank + rope_dim` numbers a token, the part of `kv_up` that makes keys is multiplied into the
    queries, and that which makes values into what the heads have summed up: the heads share one
    key, the latent, and its first `kv_rank` numbers are their value.

    Cost: for recomputation the latents are marked `qkv`, not what is made from them: of DeepSeek-V3
    2,112 numbers a token in place of 65,536. With a cache, a token and head multiplies
    `kv_rank (nope_dim + v_dim)` weights, and `2 kv_rank + rope_dim` numbers of each visible slot.

    Source: DeepSeek-AI 2024, DeepSeek-V2.
    """

    def __init__(self, shape: LatentShape, *, rngs: nnx.Rngs, std: float, out_std: float):
        self.shape, sizes, heads = shape, shape.sizes, shape.heads

        def linear(shape: tuple[int, ...], *dims: str) -> Linear:
            return Linear(shape, dims, rngs=rngs, std=std)

        q, rank = (heads, sizes.head_dim), sizes.q_rank
        self.q = linear((shape.embed, *q), "embed", "heads", "head_dim") if rank is None else None
        self.q_down = None if rank is None else linear((shape.embed, rank), "embed", "q_latent")
        self.q_norm = None if rank is None else RMSNorm(rank, eps=shape.norm_eps, dim="q_latent")
        self.q_up = None if rank is None else linear((rank, *q), "q_latent", "heads", "head_dim")
        self.kv_down = linear((shape.embed, sizes.kv_rank + sizes.rope_dim), "embed", "kv_latent")
        self.kv_norm = RMSNorm(sizes.kv_rank, eps=shape.norm_eps, dim="kv_latent")
        kv = (sizes.kv_rank, heads, sizes.nope_dim + sizes.v_dim)
        self.kv_up = linear(kv, "kv_latent", "heads", "head_dim")
        self.o = Linear(
            (heads, sizes.v_dim, shape.embed),
            ("heads", "head_dim", "embed"),
            rngs=rngs,
            contract=2,
            std=out_std,
        )

    def cache_spec(
        self, *, layers: int, seats: int, slots: int, chunk: int | None = None
    ) -> CacheSpec:
        """Latents and shared keys of these many layers, side by side.

        By the rules they lie whole on every device; `cache={"kv_latent": "tensor"}` splits them.
        """
        width = self.shape.sizes.kv_rank + self.shape.sizes.rope_dim
        one = CacheArray(shape=(layers, seats, slots, width), dims=LATENT_DIMS, coded=True)
        return CacheSpec(arrays={"latent": one})

    def mix(
        self, x: Float[Array, "b s d"], side: Side, state: LayerState
    ) -> tuple[Float[Array, "b s d"], LayerState, dict]:
        """See `Sublayer`."""
        q, latent, shared = self._projected(x, side.rope)
        if side.flat is None:
            out = self._attend(q, latent, shared, side)
        else:
            out, state = self._attend_cache(q, latent, shared, side.flat, state)
        return self.o(constrain(out, "batch:inner", "seq", "heads", "head_dim")), state, {}

    def _projected(self, x: Array, rope: Any) -> tuple[Array, Array, Array]:
        """Queries `[b, s, n, h]`, latents `[b, s, r]`, and keys of all heads `[b, s, 1, hr]`."""
        rank, nope = self.shape.sizes.kv_rank, self.shape.sizes.nope_dim
        first = self.q_down if self.q is None else self.q
        assert first is not None
        q, down = linears(x, (first.map, self.kv_down.map))
        down = constrain(checkpoint_name(down, "qkv"), "batch:inner", "seq", None)
        latent, shared = self.kv_norm(down[..., :rank]), down[..., None, rank:]
        q = checkpoint_name(q, "qkv")
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(constrain(q, "batch:inner", "seq", None)))
        q = constrain(q, "batch:inner", "seq", "heads", "head_dim")
        turned = rotate(q[..., nope:], rope, interleaved=self.shape.interleaved)
        q = jnp.concatenate([q[..., :nope], turned], axis=-1)
        return q, latent, rotate(shared, rope, interleaved=self.shape.interleaved)

    def _attend(self, q: Array, latent: Array, shared: Array, side: Side) -> Array:
        """With keys and values made for every head."""
        nope = self.shape.sizes.nope_dim
        kv = constrain(self.kv_up(latent), "batch:inner", "seq", "heads", "head_dim")
        of_all = jnp.broadcast_to(shared, (*kv.shape[:-1], shared.shape[-1]))
        k = jnp.concatenate([kv[..., :nope], of_all], axis=-1)
        k = constrain(k, "batch:inner", "seq", "heads", "head_dim")
        return attention(
            q,
            k,
            kv[..., nope:],
            mask=side.mask(self.shape.window),
            scale=self.shape.scale,
            dropout=pairs_of(side.noise, self.shape.heads),
        )

    def _attend_cache(
        self, q: Array, latent: Array, shared: Array, flat: Any, state: LayerState
    ) -> tuple[Array, LayerState]:
        """With queries and sums in place of keys and values that go through `kv_up`."""
        rank, nope = self.shape.sizes.kv_rank, self.shape.sizes.nope_dim
        up = self.kv_up.weight.gathered().astype(q.dtype)
        into = jnp.einsum("tnh,rnh->tnr", q[0, ..., :nope], up[..., :nope])
        into = jnp.concatenate([into, q[0, ..., nope:]], axis=-1)
        summed, cache = attend_cache(
            constrain(into, None, "heads", None),
            {"latent": jnp.concatenate([latent[0], shared[0, :, 0]], axis=-1)},
            state.carried,
            state.row,
            dims={"latent": LATENT_DIMS},
            seat=flat.seat,
            position=flat.position,
            slot=flat.slot,
            pages=flat.pages,
            scale=self.shape.scale,
            read=lambda held: (held["latent"][:, None], held["latent"][:, None, :rank]),
        )
        out = jnp.einsum("tnr,rnh->tnh", summed, up[..., nope:])
        return out[None], dataclasses.replace(state, carried=cache)
