"""What tokens gave of their attention to each slot of what they saw."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .seen import Seen

LOG2_E = math.log2(math.e)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mass:
    """Logits of one pass over the keys, and the log-partitions by which they become shares.

    Shares are made where they are asked for, a few slots at a time: all of them at once would be
    written and read again. A group may lie here in several of fewer tokens, one behind the other.

    Attributes:
        logits: `[s, k, w r, slots]` float32 in units of log 2, rows of a token side by side;
            whatever was in memory where nothing is seen. Slots may be a few more than pages have.
        lse: `[s, k, w r]` float32, natural, sink included; -inf where nothing is seen.
        seen: By the tokens of these groups.
        tokens: Of a group as it was asked for.
    """

    logits: Any
    lse: Any
    seen: Seen
    tokens: int = dataclasses.field(metadata={"static": True})

    def of(self, start: int | Int[Array, ""], count: int) -> Float[Array, "g w k c"]:
        """What each token gave to each of `count` slots, summed over the query heads.

        Args:
            start: The first slot; may be traced.
            count: Which all lie within `logits`.

        Cost: reads `4 w r` bytes of each slot and kv head, and writes `4 w`.
        """
        groups, width = self.seen.lo.shape
        kv_heads = self.logits.shape[1]
        by_head = groups, kv_heads, width, -1
        slots = start + jnp.arange(count, dtype=jnp.int32)
        logits = jax.lax.dynamic_slice_in_dim(self.logits, start, count, axis=3)
        lse = jnp.where(jnp.isneginf(self.lse), 0.0, self.lse) * LOG2_E
        shares = jnp.exp2(logits - lse[..., None]).reshape(*by_head, count)
        there = self.seen.of(slots)[:, None, :, None]
        summed = jnp.sum(jnp.where(there, shares, 0.0), axis=3)
        several = -(-self.tokens // width)
        summed = jnp.moveaxis(summed.reshape(-1, several, kv_heads, width, count), 2, 3)
        return summed.reshape(-1, several * width, kv_heads, count)[:, : self.tokens]
