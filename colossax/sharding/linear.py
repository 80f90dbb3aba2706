"""Linear maps: of weights of any type; those of dense ones gathered and multiplied by the plan."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.sharding.context import current, recomputed
from colossax.sharding.lookup import lookup
from colossax.sharding.matmul import Island, layout_of, matmuls
from colossax.sharding.matmul.float8 import Factors, float8_matmul
from colossax.sharding.ops import (
    as_in_block,
    compute_dtype,
    gather_weight,
    gathered,
    reduction_dtype,
    summed_gradient,
)
from colossax.sharding.weights import Weight
from colossax.typing import Dims

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """A weight kept as what it is: one array at rest, with its logical dims.

    Attributes:
        w: The array.
        dims: Its dims.
        history: Of the largest numbers that its matmuls met, see `sharding/matmul/float8.py`; None:
            there is none.
    """

    w: Any
    dims: Dims = dataclasses.field(metadata={"static": True})
    history: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Weight`."""
        return self.w.shape

    @staticmethod
    def multiply(
        x: Array, maps: Sequence[tuple[Any, Array | None]], *, contract: int
    ) -> tuple[Array, ...]:
        """See `Weight`."""
        return _products(x, maps, contract=contract)

    def rows(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """See `Weight`."""
        return lookup(self.w, ids, self.dims)

    def gathered(self, *, to: Dims | None = None) -> Array:
        """See `Weight`."""
        return gather_weight(self.w, self.dims, to=to)


def _products(
    x: Array, maps: Sequence[tuple[Dense, Array | None]], *, contract: int
) -> tuple[Array, ...]:
    """`x @ w + bias` of each map, all of dense weights."""
    bound = current()
    if bound is None or bound.single or not _is_manual(bound) or x.ndim - contract != 2:
        return tuple(_by_compiler(x, *one, contract) for one in maps)
    shapes = tuple((weight.shape, tuple(weight.dims)) for weight, _ in maps)
    island = Island(
        layout=layout_of(bound, x.shape, shapes, contract),
        way=bound.plan.tensor_matmul,
        summed=reduction_dtype(bound, x.dtype),
        keep=recomputed(),
    )
    return matmuls(island, x, tuple(weight.w for weight, _ in maps), tuple(b for _, b in maps))


def _is_manual(bound: BoundPlan) -> bool:
    """Whether matmuls communicate as `colossax.sharding.matmul` says, not as the compiler does."""
    chosen = bound.plan.tensor_matmul
    return chosen != "compiler" and (chosen != "auto" or bound.plan.tensor_layout != "1d")


def _by_compiler(x: Array, weight: Dense, bias: Array | None, contract: int) -> Array:
    w, dims = weight.w, weight.dims
    lead, inner, out = x.shape[: x.ndim - contract], w.shape[:contract], w.shape[contract:]
    # One dim of tokens: with [b, s] apart, the weight gradient contracts two dims, for which
    # XLA's CPU backend transposes instead of calling its matmul (90 against 129 GFLOP per second).
    flat = (math.prod(lead),) if _tokens_merge(lead) else lead
    bound, x = current(), x.reshape(*flat, math.prod(inner))
    static = Factors(bound=bound, dims=tuple(dims), contract=contract, recomputed=recomputed())
    if bound is not None and bound.plan.precision.in_float8(static.dims):
        y = float8_matmul(static, x, w, bias, weight.history)
    else:
        y = _matmul(static, x, w, bias)
    return y.reshape(*lead, *out)


# One rule for gather and matmul together, so that backward can keep the weight at rest and gather
# it again: with a rule for the gather alone the matmul would keep every layer's full weight. In
# a layer that is recomputed the second gather is part of that, and a third would cost its bytes.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static: Factors, x: Array, w: Array, bias: Array | None) -> Array:
    return _forward(static, x, _matrix(static, w, x), bias)


def _forward(static: Factors, x: Array, matrix: Array, bias: Array | None) -> Array:
    y = jnp.dot(x, matrix)
    if bias is None:
        return y
    return y + gathered(static.bound, static.dims[static.contract :], x.dtype, bias).ravel()


def _matrix(static: Factors, w: Array, x: Array) -> Array:
    return gathered(static.bound, static.dims, x.dtype, w).reshape(x.shape[-1], -1)


def _matmul_fwd(static: Factors, x: Array, w: Array, bias: Array | None):
    matrix = _matrix(static, w, x)
    return _forward(static, x, matrix, bias), (x, matrix if static.recomputed else None, w, bias)


def _matmul_bwd(static: Factors, residuals: Any, dy: Array):
    x, matrix, w, bias = residuals
    bound, dims = static.bound, static.dims
    summed = reduction_dtype(bound, x.dtype)
    dy = as_in_block(bound, dims[static.contract :], dy)
    dx = jnp.dot(dy, (_matrix(static, w, x) if matrix is None else matrix).T)
    tokens = tuple(range(x.ndim - 1))
    dw = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), preferred_element_type=summed)
    dw = summed_gradient(bound, dims, dw.reshape(w.shape), w)
    if bias is None:
        return dx, dw, None
    db = jnp.sum(dy, axis=tokens, dtype=jnp.float32).astype(summed).reshape(bias.shape)
    return dx, dw, summed_gradient(bound, dims[static.contract :], db, bias)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _tokens_merge(lead: tuple[int, ...]) -> bool:
    """Whether [b, s] may become one dim: a split sequence would have to be gathered for it."""
    bound = current()
    if bound is None or bound.single:
        return True
    rules = bound.rules.activations
    phases = [choices for dim, choices in rules.items() if dim.split(":")[0] == "seq"]
    axes = {axis for choices in phases for choice in choices for axis in choice}
    return len(lead) == 2 and bound.size(sorted(axes)) == 1
