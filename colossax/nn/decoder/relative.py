"""A bias of attention by the distance of query and key, in buckets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from colossax.nn.config import RelativeConfig
from colossax.nn.module import param
from colossax.pallas.attention import RelativeBias
from colossax.sharding import gather_weight


class RelativePositions(nnx.Module):
    """Numbers by head and bucket, `table` `[heads, buckets]`; all layers of a stack share them."""

    def __init__(
        self, config: RelativeConfig, heads: int, *, causal: bool, rngs: nnx.Rngs, std: float
    ):
        """Make the table.

        Args:
            config: Buckets.
            heads: Of queries.
            causal: Whether no query sees a key behind it.
            rngs: Key of the table.
            std: Its deviation.
        """
        self.buckets = Buckets(config=config, causal=causal)
        shape = (heads, config.buckets)
        self.table = param(
            jax.random.normal(rngs.params(), shape, jnp.float32) * std, ("heads", "buckets")
        )

    def __call__(self) -> RelativeBias:
        """The bias as attention takes it: a function of positions, so that rings have it too."""
        table = gather_weight(self.table[...], ("heads", "buckets"), dtype=jnp.dtype("float32"))
        return RelativeBias(params=table, fn=self.buckets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """`(table [heads, buckets], distances) -> [heads, ...]`, see `RelativeConfig`.

    Two of one configuration are equal, so that what is compiled for one serves the other.

    Cost: which bucket a distance has is a table of `farthest + 1` whole numbers a side, made while
    tracing; for each pair of tokens one look-up of `heads` numbers.
    """

    config: RelativeConfig
    causal: bool

    def __call__(
        self, table: Float[Array, "n buckets"], distance: Int[Array, "*pairs"]
    ) -> Float[Array, "n *pairs"]:
        most = self.config.farthest
        at = jnp.clip(distance, 0 if self.causal else -most, most)
        return table[:, jnp.asarray(self.of_distances)[at if self.causal else at + most]]

    @functools.cached_property
    def of_distances(self) -> np.ndarray:
        """The bucket of each distance, `[farthest + 1]`; of both sides from `-farthest` on."""
        each = self.config.of_side(self.causal)
        exact, most = each // 2, self.config.farthest
        distances = np.arange(most + 1, dtype=np.float32)
        # In float32 and truncated, as T5 does: near whole numbers another way would differ.
        share = np.log(np.maximum(distances, 1) / np.float32(exact)) / np.float32(
            np.log(most / exact)
        )
        large = exact + (share * np.float32(each - exact)).astype(np.int32)
        before = np.where(
            distances < exact, distances.astype(np.int32), np.minimum(large, each - 1)
        )
        if self.causal:
            return before
        return np.concatenate([before[:0:-1] + each, before])
