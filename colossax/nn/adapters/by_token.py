"""A weight with narrow pairs of several adapters beside it, of which each token takes its own."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from colossax.errors import InputError
from colossax.sharding import Dense, Weight, linear, linears
from colossax.typing import Dims

RANK = "rank"
"""Dim of the columns of an adapter's first matrix."""

ADAPTERS = "adapters"
"""Dim of adapters that lie side by side."""


@dataclasses.dataclass(frozen=True, eq=False)
class Turns:
    """Whose every token of a call is.

    Attributes:
        numbers: `[t]` int32: 0: the base's; a: of the a-th adapter of those that are multiplied.
        chosen: `[k]` int32, counted from 0: which are, in a step that cannot have all; None: all.
    """

    numbers: Any
    chosen: Any = None

    def of_tokens(self, seats: Int[Array, " t"], valid: Bool[Array, " t"]) -> "Turns":
        """Of tokens, where this is of seats; those that are none have no adapter."""
        return Turns(jnp.where(valid, self.numbers[seats], 0), self.chosen)

    def mask(self, lead: tuple[int, ...], count: int) -> Array:
        """Whether an adapter is a token's, `[*lead, count]`.

        Raises:
            InputError: The rows are no tokens of this call.
        """
        if math.prod(lead) != self.numbers.size:
            raise InputError(
                f"adapters: a map reads rows {list(lead)}, and the step has"
                f" {self.numbers.size} tokens, whose adapters are known; leave that map out of"
                " adapter.targets, or merge the adapter"
            )
        own = self.numbers.reshape(*lead, 1)
        return own == jnp.arange(1, count + 1, dtype=jnp.int32)


# A user context, as the plan: what is traced for other tokens is traced anew.
_TURNS = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def turns(found: Turns | None) -> Iterator[None]:
    """Say to the maps traced inside whose their tokens are; None: nothing is said."""
    with _TURNS(found):
        yield


def seats_turns(of_seats: Int[Array, " r"], adapters: int) -> Turns:
    """Of one token of each seat; with fewer seats than adapters only theirs are multiplied.

    Args:
        of_seats: Number of each seat's adapter, from 1; 0: none.
        adapters: How many there are.
    """
    if adapters <= of_seats.size:
        return Turns(of_seats)
    present = jnp.sort(of_seats)
    place = 1 + jnp.searchsorted(present, of_seats).astype(jnp.int32)
    return Turns(jnp.where(of_seats > 0, place, 0), jnp.maximum(present - 1, 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedByToken:
    """`x W + scale (x A) B`, with `A`, `B` and scale of each token's adapter; see `turns`.

    All first matrices are multiplied at once, `[t, in] @ [in, k r]`; what is another token's
    adapter's becomes 0 there, and all second matrices are multiplied at once too. Nothing is sorted
    and, but where there are more adapters than seats, no matrix is gathered.

    Attributes:
        base: `W`, `[*in, *out]`, of any type of weight.
        down: `A` of each, `[*in, n, r]`; narrower ones end in zeros, and so do absent ones.
        up: `B` of each, `[n, r, *out]`.
        scales: Of the products.

    Cost: `2 k r (in + out)` FLOPs a token, k the smaller of adapters and seats, and `k r (in +
    out)` numbers read a step; tests/nn/test_adapters_by_token.py counts them.
    """

    base: Weight
    down: Any
    up: Any
    contract: int = dataclasses.field(metadata={"static": True})
    scales: tuple[float, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Weight`."""
        return self.base.shape

    @property
    def dims(self) -> Dims:
        """See `Weight`."""
        return self.base.dims

    @staticmethod
    def multiply(
        x: Array, maps: Sequence[tuple[Any, Array | None]], *, contract: int
    ) -> tuple[Array, ...]:
        """See `Weight`; `x` is moved once for all maps, wide and narrow.

        Raises:
            InputError: Nobody said whose the tokens are.
        """
        found = _TURNS.value
        if found is None:
            raise InputError(
                "adapters: several are beside one base, and nobody said whose each token is; run"
                " the model by inference.Engine, or load one adapter alone"
            )
        wide = [(one.base, bias) for one, bias in maps]
        narrow = [(one._side_by_side(found), None) for one, _ in maps]
        ys = linears(x, [*wide, *narrow], contract=contract)
        parts = zip(maps, ys[: len(maps)], ys[len(maps) :], strict=True)
        return tuple(one._finished(y, part, found) for (one, _), y, part in parts)

    def _side_by_side(self, found: Turns) -> Dense:
        """All first matrices as one."""
        down = self.down
        if found.chosen is not None:
            down = jnp.take(down, found.chosen, axis=self.contract)
        ins = down.shape[: self.contract]
        return Dense(down.reshape(*ins, -1), (*self.dims[: self.contract], RANK))

    def _finished(self, y: Array, narrow: Array, found: Turns) -> Array:
        """The whole map from its two parts."""
        up, scales = self.up, jnp.asarray(self.scales, narrow.dtype)
        if found.chosen is not None:
            up, scales = jnp.take(up, found.chosen, axis=0), scales[found.chosen]
        count, rank, *outs = up.shape
        lead = narrow.shape[:-1]
        each = narrow.reshape(*lead, count, rank) * scales[:, None]
        # Zeros in place of others' numbers, which may be too large for the compute dtype.
        own = jnp.where(found.mask(lead, count)[..., None], each, 0).reshape(narrow.shape)
        whole = Dense(up.reshape(count * rank, *outs), (RANK, *self.dims[self.contract :]))
        return y + linear(own, whole)

    def rows(self, ids: Array) -> Array:
        """See `Weight`.

        Raises:
            InputError: A table has no adapter.
        """
        raise InputError("adapters: rows are read of a matrix with adapters; it is none of a map")

    def gathered(self, *, to: Dims | None = None) -> Array:
        """See `Weight`.

        Raises:
            InputError: There is no one matrix.
        """
        raise InputError(
            "adapters: a map that is not only multiplied has several beside it; leave it out of"
            " adapter.targets, or merge the adapter"
        )
