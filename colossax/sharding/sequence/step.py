"""One step of a ring: attention of one rank's queries to the keys of one rank, and its gradients.

What a step's queries see of its keys is known beforehand (masks.py). In zigzag order XLA computes a
step as a pair of blocks (pairs.py).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from colossax.pallas.attention import (
    Mask,
    Operands,
    Scoring,
    backward_block,
    forward_block,
    merge_blocks,
)

from .axes import Packing
from .masks import RingMasks, ring_masks_local
from .pairs import forward_of_pairs, keys_of_pairs, pair_keys, pair_queries, queries_of_pairs
from .settings import Settings

Keys = tuple[Array, Array]
"""What travels: keys and values of a rank."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """What stays on its device; the last three only backward."""

    q: Any
    dout: Any = None
    lse: Any = None
    delta: Any = None

    def paired(self, early: Array) -> "Queries":
        """Those of the pair of blocks."""
        rows = self.q.shape[0]

        def pair(x: Any, axis: int = 1) -> Any:
            return None if x is None else pair_queries(x, early, rows, axis)

        return Queries(
            q=pair(self.q), dout=pair(self.dout), lse=pair(self.lse, 2), delta=pair(self.delta, 2)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Attention of this rank's queries to the keys of one rank."""

    settings: Settings
    masks: RingMasks
    scoring: Scoring
    queries: Queries

    @classmethod
    def of(
        cls, settings: Settings, operands: Operands, scoring: Scoring, **backward: Array
    ) -> "Step":
        """Of a rank's operands; `backward` are the fields of `Queries` that only it has."""
        masks = ring_masks_local(settings, operands, scoring)
        queries = Queries(q=operands.q, **backward)
        return cls(settings=settings, masks=masks, scoring=scoring, queries=queries)

    @property
    def inner_offsets(self) -> tuple[int, ...]:
        """Places along the inner ring that hold keys anybody sees."""
        axes = self.settings.axes
        return tuple(range(1, axes.inner_size)) if axes.outer_size > 1 else self.masks.offsets

    def own_forward_local(self, keys: Keys) -> tuple[Array, Array]:
        """Output and log-partition over this rank's own keys."""
        return self._attend(self.queries, keys, self.masks.of_own, None)

    def forward_local(
        self, keys: Keys, number: int | Int[Array, ""], carried: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """What is carried with the keys of the step of this number, from 1, merged in."""
        queries, keys, mask, early = self._arrived(keys, number)
        if not self.masks.paired:
            return self._attend(queries, keys, mask, carried)
        outputs = self._attend(queries.paired(early), _pair(keys, early), mask, None)
        return merge_blocks(*carried, *forward_of_pairs(*outputs, early))

    def own_backward_local(self, keys: Keys) -> tuple[Any, Any]:
        """Gradients through this rank's own keys: of q and scoring, and of k and v, packed."""
        return self._gradients(self.queries, keys, self.masks.of_own, lambda x: x, lambda x: x)

    def backward_local(self, keys: Keys, number: int | Int[Array, ""]) -> tuple[Any, Any]:
        """Gradients through the keys of the step of this number, from 1, likewise."""
        queries, keys, mask, early = self._arrived(keys, number)
        if not self.masks.paired:
            return self._gradients(queries, keys, mask, lambda x: x, lambda x: x)
        return self._gradients(
            queries.paired(early),
            _pair(keys, early),
            mask,
            functools.partial(queries_of_pairs, early=early),
            functools.partial(keys_of_pairs, early=early),
        )

    def _arrived(
        self, keys: Keys, number: int | Int[Array, ""]
    ) -> tuple[Queries, Keys, Mask, Bool[Array, ""]]:
        """Queries, keys and `RingMasks.of_step`, none before the keys are here.

        Else XLA would prepare the queries of all steps outside of loops at once, and hold them, and
        hide hops behind less.
        """
        here = self.queries, keys, jnp.asarray(number, jnp.int32)
        queries, keys, number = jax.lax.optimization_barrier(here)
        return queries, keys, *self.masks.of_step(number)

    def _attend(
        self, queries: Queries, keys: Keys, mask: Mask, carried: tuple[Array, Array] | None
    ) -> tuple[Array, Array]:
        return forward_block(
            Operands(q=queries.q, k=keys[0], v=keys[1], mask=mask),
            self.scoring,
            carried=carried,
            implementation=self.settings.implementation,
        )

    def _gradients(
        self,
        queries: Queries,
        keys: Keys,
        mask: Mask,
        of_queries: Callable[[Array], Array],
        of_keys: Callable[[Array], Array],
    ) -> tuple[Any, Any]:
        gradients, of_scoring = backward_block(
            Operands(q=queries.q, k=keys[0], v=keys[1], mask=mask),
            self.scoring,
            dout=queries.dout,
            lse=queries.lse,
            delta=queries.delta,
            implementation=self.settings.implementation,
        )
        dkv = of_keys(gradients.k), of_keys(gradients.v)
        return (of_queries(gradients.q), of_scoring), Packing.of(dkv).pack(dkv)


def _pair(keys: Keys, early: Array) -> Keys:
    k, v = (pair_keys(x, early, x.shape[0]) for x in keys)
    return k, v
