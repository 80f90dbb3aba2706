"""A frozen weight with a narrow pair beside it."""

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.errors import InputError
from colossax.sharding import (
    Dense,
    Weight,
    constrain,
    current,
    gather_weight,
    linear,
    linears,
)
from colossax.typing import Dims


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """`W + scale A B`, of which the product is never made where `x` is multiplied.

    Attributes:
        base: `W`, `[*in, *out]`, of any type of weight.
        down: `A`, `[*in, rank]`.
        up: `B`, `[rank, *out]`.
        stretch: None; or what is added to the lengths of the columns of `W`, `[*out]`, to give
            those of the whole.
        scale: Of the product.
        noise: What `A` does not read of `x`, see `InputNoise`; None: it reads all.

    Cost: `2 rank (in + out)` FLOPs a token forward; with `stretch` also `2 rank in out` a call and
    the reading of `W` at rest, of whose columns devices sum `(rank + 1) out` numbers.
    """

    base: Weight
    down: Dense
    up: Dense
    stretch: Dense | None
    scale: float = dataclasses.field(metadata={"static": True})
    noise: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Weight`."""
        return self.base.shape

    @property
    def dims(self) -> Dims:
        """See `Weight`."""
        return self.base.dims

    @property
    def _contract(self) -> int:
        return len(self.down.shape) - 1

    @staticmethod
    def multiply(
        x: Array, maps: Sequence[tuple[Any, Array | None]], *, contract: int
    ) -> tuple[Array, ...]:
        """See `Weight`; `x` is moved once for the wide maps and the narrow ones, but for those that
        do not read all of it."""
        wide = [(one.base, None if one.stretch else bias) for one, bias in maps]
        whole = [one.down for one, _ in maps if one.noise is None]
        ys = linears(x, [*wide, *((down, None) for down in whole)], contract=contract)
        rest = iter(ys[len(maps) :])
        narrow = [
            next(rest) if one.noise is None else linear(one.noise(x), one.down, contract=contract)
            for one, _ in maps
        ]
        pairs = zip(maps, ys[: len(maps)], narrow, strict=True)
        return tuple(one._finished(y, narrow, bias) for (one, bias), y, narrow in pairs)

    def _finished(self, y: Array, narrow: Array, bias: Array | None) -> Array:
        """The whole map from its two parts."""
        y = y + linear(narrow * self.scale, self.up)
        if self.stretch is None:
            return y
        y = (y * self._ratio()).astype(y.dtype)
        return y if bias is None else y + gather_weight(bias, self.dims[self._contract :])

    def _ratio(self) -> Float[Array, "*out"]:
        """Wanted length of each column over that which it has; this one has no gradient.

        Gradients through it are small and dear (section 4.3 of the paper).
        """
        assert self.stretch is not None
        f32 = jnp.dtype("float32")
        own, whole = jax.lax.stop_gradient(
            column_lengths(_at_rest(self.base), self.down.w, self.up.w, self.scale)
        )
        out = self.stretch.dims
        added = gather_weight(self.stretch.w, out, dtype=f32)
        own, whole = _everywhere(own, out), _everywhere(whole, out)
        # A column of zeros has no direction: whatever it is multiplied by, it stays.
        return jnp.where(whole > 0, (own + added) / jnp.where(whole > 0, whole, 1), 1)

    def rows(self, ids: Array) -> Array:
        """See `Weight`.

        Raises:
            InputError: A table has no adapter.
        """
        raise InputError("adapter: rows are read of a matrix with an adapter; it is none of a map")

    def gathered(self, *, to: Dims | None = None) -> Array:
        """See `Weight`; the product is added to the matrix."""
        base = self.base.gathered(to=to)
        f32 = jnp.dtype("float32")
        down, up = (gather_weight(one.w, one.dims, dtype=f32) for one in (self.down, self.up))
        whole = base + (jnp.tensordot(down, up, axes=1) * self.scale).astype(base.dtype)
        return whole if self.stretch is None else (whole * self._ratio()).astype(base.dtype)


def column_lengths(
    w: Float[Array, "*in_and_out"],
    down: Float[Array, "*in rank"],
    up: Float[Array, "rank *out"],
    scale: float,
) -> Float[Array, "2 *out"]:
    """Lengths of the columns of `W` and of `W + scale A B`, in float32, without that sum.

    `|w + s A b|^2 = |w|^2 + 2 s (A^T w) b + s^2 b (A^T A) b`. Where `B` is 0 both are equal to the
    bit.
    """
    inner = down.ndim - 1
    ins, outs = string.ascii_lowercase[:inner], string.ascii_lowercase[inner : w.ndim]
    w, down, up = (one.astype(jnp.float32) for one in (w, down, up))
    high = jax.lax.Precision.HIGHEST
    square = jnp.sum(w * w, axis=tuple(range(inner)))
    cross = jnp.einsum(f"{ins}z,{ins}{outs}->z{outs}", down, w, precision=high)
    gram = jnp.einsum(f"{ins}y,{ins}z->yz", down, down, precision=high)
    own = jnp.einsum(f"yz,z{outs}->y{outs}", gram, up, precision=high)
    added = jnp.sum((2 * scale * cross + scale**2 * own) * up, axis=0)
    return jnp.sqrt(jnp.stack([square, jnp.maximum(square + added, 0)]))


def _everywhere(lengths: Array, out: Dims) -> Array:
    """A vector of columns as activations of them are laid out."""
    bound = current()
    return lengths if bound is None else constrain(lengths, *out)


def _at_rest(base: Weight) -> Array:
    """The matrix, wherever its parts lie."""
    if isinstance(base, Adapted):
        raise InputError("adapter: DoRA of a matrix that has an adapter; merge that one first")
    return base.w if isinstance(base, Dense) else base.gathered()
