"""Weights: values that know how they are gathered, multiplied, looked up and differentiated."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from colossax.errors import InputError
from colossax.sharding.dense import products
from colossax.sharding.lookup import lookup
from colossax.sharding.ops import compute_dtype, gather_weight
from colossax.typing import Dims


@runtime_checkable
class Weight(Protocol):
    """A matrix `[*in, *out]`, or a table `[rows, d]`, kept as its type likes: a pytree of arrays.

    What it multiplies is differentiated as anything else in JAX; a type may bring rules of its own
    (`jax.custom_vjp`), of which each array's gradient has that array's shape and dtype.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the matrix, whatever is kept of it."""
        ...

    @property
    def dims(self) -> Dims:
        """Their logical names."""
        ...

    @staticmethod
    def multiply(
        x: Array, maps: Sequence[tuple[Any, Array | None]], *, contract: int
    ) -> tuple[Array, ...]:
        """`x` times the weight, plus bias, of each map: all those of this type and one input.

        So a type may gather or quantise `x` once for all. Weights made of others multiply them by
        one call of `linears`.

        Args:
            x: `[*lead, *in]` in the compute dtype.
            maps: Weights of this type, each with its bias `[*out]` at rest or None.
            contract: How many dims `*in` are.

        Returns:
            `[*lead, *out]` of each, in the compute dtype.
        """
        ...

    def rows(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """Rows of a table in the compute dtype; see `colossax.sharding.lookup`."""
        ...

    def gathered(self, *, to: Dims | None = None) -> Array:
        """The dense matrix in the compute dtype, gathered along the axes that split the batch.

        Args:
            to: See `colossax.sharding.gather_weight`.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """A weight kept as what it is: one array at rest, with its logical dims."""

    w: Any
    dims: Dims = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Weight`."""
        return self.w.shape

    @staticmethod
    def multiply(
        x: Array, maps: Sequence[tuple[Any, Array | None]], *, contract: int
    ) -> tuple[Array, ...]:
        """See `Weight`."""
        return products(x, [(dense.w, dense.dims, bias) for dense, bias in maps], contract=contract)

    def rows(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """See `Weight`."""
        return lookup(self.w, ids, self.dims)

    def gathered(self, *, to: Dims | None = None) -> Array:
        """See `Weight`."""
        return gather_weight(self.w, self.dims, to=to)


Map = tuple[Weight, Array | None] | tuple[Array, Dims, Array | None]
"""Weight and bias of a linear map; or an array, its dims, and the bias."""


def linear(
    x: Float[Array, "*lead_and_in"],
    w: Float[Array, "*in_and_out"] | Weight,
    dims: Dims | None = None,
    *,
    contract: int = 1,
    bias: Array | None = None,
) -> Float[Array, "*lead_and_out"]:
    """`x` times `w` over the last `contract` dims of `x` and the first of `w`, plus `bias`.

    Args:
        x: `[*lead, *in]`; cast to the plan's compute dtype.
        w: A weight, or an array `[*in, *out]` at rest; gathered by the plan.
        dims: Logical dims of an array; a weight has its own.
        contract: How many dims are contracted.
        bias: `[*out]`, with dims `dims[contract:]`.

    Returns:
        `[*lead, *out]` in the compute dtype.

    Raises:
        InputError: An array without dims, or a weight with some.
        ValueError: Input and weight do not meet.
    """
    if isinstance(w, Weight) == (dims is not None):
        raise InputError(
            f"linear: w is a {type(w).__name__} of shape {w.shape} and comes with dims {dims}; name"
            f" the dims of an array, and leave them out where a weight has its own"
        )
    one: Any = (w, bias) if dims is None else (w, dims, bias)
    return linears(x, (one,), contract=contract)[0]


def linears(
    x: Float[Array, "*lead_and_in"], maps: Sequence[Map], *, contract: int = 1
) -> tuple[Array, ...]:
    """Several linear maps of one input: what `linear` gives for each, but `x` is moved once.

    Weights of one type multiply together, see `Weight.multiply`. Of those that are `Dense`, with
    `plan.tensor_matmul` other than `compiler`, an input of two leading dims `[b, s, *in]` is
    gathered once for all maps, and the sum of their gradients is reduced once; see
    `colossax.sharding.matmul`. An input of other rank (chosen tokens, pooled rows) is left to the
    compiler.

    Args:
        x: `[*lead, *in]`; cast to the plan's compute dtype.
        maps: Of each, the weight and its bias `[*out]` or None; a weight that is a plain array
            `[*in, *out]` at rest is followed by its dims.
        contract: How many dims are contracted.

    Raises:
        ValueError: Input and weight do not meet.
        PlanError: A size is not a multiple of the devices of its axes.
    """
    x = x.astype(compute_dtype(x.dtype))
    pairs = [_pair(one) for one in maps]
    by_type: dict[type[Weight], list[int]] = {}
    for at, (weight, _) in enumerate(pairs):
        _check_meets(x, weight, contract)
        by_type.setdefault(type(weight), []).append(at)
    outputs: dict[int, Array] = {}
    for kind, places in by_type.items():
        ys = kind.multiply(x, [pairs[at] for at in places], contract=contract)
        outputs.update(zip(places, ys, strict=True))
    return tuple(outputs[at] for at in range(len(pairs)))


def _pair(one: Map) -> tuple[Weight, Array | None]:
    return one if len(one) == 2 else (Dense(one[0], tuple(one[1])), one[2])


def _check_meets(x: Array, weight: Weight, contract: int) -> None:
    inner = weight.shape[:contract]
    if x.shape[x.ndim - contract :] != inner:
        raise ValueError(
            f"linear: input {x.shape} ends in {x.shape[x.ndim - contract :]}, weight {weight.shape}"
            f" of dims {weight.dims} begins with {inner}; they must be equal"
        )
