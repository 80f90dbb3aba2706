"""Attention of a drafter's tokens to keys and values of its target's last layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from colossax.errors import InputError
from colossax.layerwise import LayerState
from colossax.nn.attention import AttentionShape, Side
from colossax.nn.layers import Linear
from colossax.nn.rope import rotate
from colossax.pallas.attention import Mask, Pages
from colossax.sharding import attend_cache, attention, constrain, current_order, linears


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetKeys:
    """What the target has seen of whole rows.

    Attributes:
        k: Keys of its last layer, turned by position as its cache holds them, `[b, s, k, h]`.
        v: Values, likewise.
        mask: Which of them a token sees, see `block_mask`.
    """

    k: Any
    v: Any
    mask: Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetPages:
    """What the target has seen, in its cache.

    Attributes:
        cache: `k` and `v` of the layers of its last layer's kind, `[layers, rows, slots, k, h]`,
            whole; see `target_pages`.
        verified: Of each token, how many positions of its sequence the target has seen: the
            drafter sees those before, `[t]` int32.
        pages: Whose the rows are; None: as those of the drafter's own cache.
        layer: The last one's row among those.
    """

    cache: Any
    verified: Int[Array, " t"]
    pages: Pages | None = None
    layer: int = dataclasses.field(metadata={"static": True})


def target_pages(
    target: Any, cache: Mapping[str, Any], verified: Int[Array, " t"], pages: Pages | None = None
) -> TargetPages:
    """The part of a target's cache that a drafter reads; nothing is copied.

    Args:
        target: The model, as `nn.Decoder`.
        cache: As its `decode` gives it, by kind where it has several kinds of layers.
        verified, pages: See `TargetPages`.

    Raises:
        InputError: The cache holds no keys and values of its last layer.
    """
    order = target.layers.order
    held = cache[order[-1]] if order[-1] else cache
    if not {"k", "v"} <= held.keys():
        raise InputError(
            f"target: the cache of its last layer holds {', '.join(sorted(held))}, and a drafter"
            " reads k and v; give a decoder that keeps them"
        )
    return TargetPages(
        cache={name: held[name] for name in ("k", "v")},
        verified=verified,
        pages=pages,
        layer=order.count(order[-1]) - 1,
    )


def block_mask(
    length: int,
    block: int,
    offsets: Int[Array, " b"],
    segments: Int[Array, "b s"] | None = None,
) -> Mask:
    """Who sees which tokens of the target, of rows of this length.

    The token at place i of a row sees those of its document at places below
    `block floor((i + o) / block) - o`, with o the row's offset: what a target has seen when a draft
    of `block` tokens begins there.

    Args:
        length: Tokens of a row, in the order in force.
        block: Tokens of a draft.
        offsets: Of each row, 0 to `block - 1`; or one for all.
        segments: Documents, as of `Decoder.hidden`.
    """
    places = jnp.asarray(current_order().indices(length), jnp.int32)[None]
    begun = (places + offsets[:, None]) // block * block - offsets[:, None]
    return Mask(
        causal=True,
        q_positions=begun - 1,
        kv_positions=places,
        q_segments=segments,
        kv_segments=segments,
        ascending=True,
    )


class TargetAttention(nnx.Module):
    """Queries of the drafter's tokens, keys and values of the target's, see `Side.source`."""

    def __init__(self, shape: AttentionShape, *, rngs: nnx.Rngs, std: float, out_std: float):
        self.shape = shape
        dims = ("embed", "heads", "head_dim")
        sizes = (shape.embed, shape.heads, shape.head_dim)
        self.q = Linear(sizes, dims, rngs=rngs, std=std)
        back = (*sizes[1:], shape.embed), (*dims[1:], "embed")
        self.o = Linear(*back, rngs=rngs, contract=2, std=out_std)

    def mix(
        self, x: Float[Array, "b s d"], side: Side, state: LayerState
    ) -> tuple[Float[Array, "b s d"], LayerState, dict]:
        """See `Sublayer`."""
        (q,) = linears(x, (self.q.map,))
        q = constrain(q, "batch:inner", "seq", "heads", "head_dim")
        if self.shape.turned and side.rope is not None:
            q = rotate(q, side.rope, interleaved=self.shape.interleaved)
        q, seen, flat = checkpoint_name(q, "qkv"), side.source, side.flat
        if flat is None:
            out = attention(q, seen.k.astype(q.dtype), seen.v.astype(q.dtype), mask=seen.mask)
        else:
            out, _ = attend_cache(
                q[0],
                None,
                seen.cache,
                seen.layer,
                seat=flat.seat,
                position=seen.verified - 1,
                slot=flat.slot,
                pages=flat.pages if seen.pages is None else seen.pages,
            )
            out = out[None]
        return self.o(constrain(out, "batch:inner", "seq", "heads", "head_dim")), state, {}
