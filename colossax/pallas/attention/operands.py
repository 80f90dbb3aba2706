"""The two values of every attention: what is attended, and how a query scores a key."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from colossax.pallas.dropout import PairDropout

from .mask import Mask
from .relative import RelativeBias


# Fields are Any: trees of these types also hold gradients, partition specs, shapes or None.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """What is attended.

    Attributes:
        q: Queries `[*b, s, n, h]`.
        k: Keys `[*b, t, k, h]`.
        v: Values `[*b, t, k, hv]`.
        mask: A `Mask`; None among gradients.
    """

    q: Any
    k: Any
    v: Any
    mask: Any

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of a row."""
        return self.q.shape[-3], self.k.shape[-3]

    @property
    def masked(self) -> Mask:
        """The mask, which is there but among gradients."""
        assert isinstance(self.mask, Mask)
        return self.mask

    def replace(self, **changes: Any) -> "Operands":
        """With other fields."""
        return dataclasses.replace(self, **changes)

    def gradients(self, dq: Any, dk: Any, dv: Any) -> "Operands":
        """As a tree, rounded to the dtypes of what they are gradients of; a mask has none."""
        return Operands(
            q=dq.astype(self.q.dtype),
            k=dk.astype(self.k.dtype),
            v=dv.astype(self.v.dtype),
            mask=None,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a query and a key make a logit, see `api.attention`.

    Attributes:
        scale: Factor of `q . k`.
        soft_cap: Bound of the logits, before biases.
        alibi_slopes: `[n]` or None: penalty per head and unit of distance.
        sinks: `[n]` or None: one more logit per head, in the denominator only.
        biases: Added to the logits, each broadcastable to `[*b, n, s, t]`, or a `RelativeBias`.
        dropout: A `PairDropout` of the probabilities, or None; None among gradients.
    """

    scale: float = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    alibi_slopes: Any = None
    sinks: Any = None
    biases: tuple[Any, ...] = ()
    dropout: Any = None

    @classmethod
    def of(
        cls,
        q: Any,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        biases: Sequence[Any] = (),
        dropout: PairDropout | None = None,
    ) -> "Scoring":
        """Of the arguments of `api.attention`, for queries `[..., h]`."""
        return cls(
            scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
            soft_cap=None if soft_cap is None else float(soft_cap),
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            biases=tuple(biases),
            dropout=dropout,
        )

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Biases that are arrays over pairs of tokens."""
        return tuple(x for x in self.biases if not isinstance(x, RelativeBias))

    @property
    def relative(self) -> tuple[RelativeBias, ...]:
        """Biases that are functions of relative position."""
        return tuple(x for x in self.biases if isinstance(x, RelativeBias))

    @property
    def by_distance(self) -> bool:
        """Whether logits, or which probabilities are dropped, depend on positions."""
        placed = self.alibi_slopes is not None or self.dropout is not None
        return placed or bool(self.relative)

    @property
    def without_sinks(self) -> "Scoring":
        """What computes logits; slopes and parameters are in float32. A sink scales the output."""

        def wide(tree: Any) -> Any:
            return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

        biases = (wide(x) if isinstance(x, RelativeBias) else x for x in self.biases)
        slopes = wide(self.alibi_slopes)
        return self.replace(alibi_slopes=slopes, sinks=None, biases=tuple(biases))

    def replace(self, **changes: Any) -> "Scoring":
        """With other fields."""
        return dataclasses.replace(self, **changes)
