"""Moments in eight bits: a code of one byte for each number, a scale for each block of them."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from colossax.config import above
from colossax.optim.by_leaf import NOTHING, by_leaf
from colossax.optim.contract import DimsOptimizer, LearningRate, check_rates
from colossax.optim.dims import decays, is_unit_dim
from colossax.optim.groups import ALIKE, Groups
from colossax.optim.transforms import decayed
from colossax.typing import Dims

LARGEST_BLOCK = 256
"""Numbers that share a scale, at most: it has to divide their dim, whatever the mesh."""

_SMALLEST_BLOCK = 16
"""Below it scales would cost more than a quarter of a byte a number."""


_DECADES = 7


@functools.cache
def dynamic_codes(*, signed: bool) -> np.ndarray:
    """The 256 numbers that codes stand for, from -1 or 0 to 1, in order.

    Seven decades below 1, each with twice as many numbers as the next smaller one: midpoints of
    equal parts of a tenth to 1, times a power of ten.

    Reference: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, section 2.
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = np.linspace(0.1, 1.0, _count(decade, signed=signed) + 1)
        mids = (parts[:-1] + parts[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
        found += [*mids, *(-mids if signed else ())]
    return np.sort(np.asarray(found, np.float64)).astype(np.float32)


def _count(decade: int, *, signed: bool) -> int:
    """Numbers above 0 in a decade, counted from the smallest."""
    return 2 ** (decade + (not signed))


def block_of(dims: Dims, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(Dim, block) of a parameter: the largest block that divides a dim, the last of equals.

    None for vectors, and where no dim has a block worth its scale. Neither stack nor mesh decide.
    """
    if not decays(dims):
        return None
    sizes = {at: _block(shape[at]) for at, dim in enumerate(dims) if not is_unit_dim(dim)}
    at = max(sizes, key=lambda each: (sizes[each], each))
    return (at, sizes[at]) if sizes[at] >= _SMALLEST_BLOCK else None


@functools.cache
def _block(size: int) -> int:
    return max(block for block in range(1, LARGEST_BLOCK + 1) if size % block == 0)


def quantised(x: Array, at: int, block: int, *, signed: bool) -> tuple[Array, Array]:
    """Codes (uint8, as `x`) and scales (float32, of dim `at` a number for each block).

    A code stands for the number nearest to `x / scale`; the scale is the largest magnitude.
    """
    split = _in_blocks(x, at, block)
    scale = jnp.max(jnp.abs(split), axis=at + 1, keepdims=True)
    codes = _nearest(split / jnp.where(scale > 0, scale, 1.0), signed=signed)
    return codes.reshape(x.shape), jnp.squeeze(scale, at + 1)


def dequantised(codes: Array, scale: Array, at: int, *, signed: bool) -> Array:
    """The numbers, in float32."""
    table = jnp.asarray(dynamic_codes(signed=signed))
    numbers = _in_blocks(table[codes], at, codes.shape[at] // scale.shape[at])
    return (numbers * jnp.expand_dims(scale, at + 1)).reshape(codes.shape)


def _in_blocks(x: Array, at: int, block: int) -> Array:
    """Dim `at` as two, blocks and what is in them."""
    return x.reshape(*x.shape[:at], x.shape[at] // block, block, *x.shape[at + 1 :])


def _nearest(share: Array, *, signed: bool) -> UInt8[Array, "..."]:
    """Codes of the numbers nearest to these, of -1 to 1.

    Worked out where they stand: a search in the table would keep its bounds for each number, and a
    GPU then holds several arrays of 4 bytes a parameter. One product is rounded, all else is exact,
    so that it is the same in every program.
    """
    table = dynamic_codes(signed=signed)
    zero = int(np.searchsorted(table, 0.0))
    joints = (table[1:] + table[:-1])[zero:] / 2
    size = jnp.abs(share)
    rank = jnp.zeros(share.shape, jnp.int32)
    first = 1
    for decade in range(_DECADES):
        count = _count(decade, signed=signed)
        # Part i of a decade ends where this is count + 9 (i + 1).
        ninths = jnp.floor(size * np.float32(10 * count * 10.0 ** (_DECADES - 1 - decade)))
        part = (ninths.astype(jnp.int32) - count) // 9
        within = first + jnp.clip(part, 0, count - 1)
        rank = jnp.where(size > joints[first - 1], within, rank)
        first += count
    rank = jnp.where(share > joints[first - 1], first, rank)
    return jnp.where(share < 0, zero - rank, zero + rank).astype(jnp.uint8)


@dataclasses.dataclass(frozen=True)
class Adam8Rule:
    """See `adamw_8bit`; a `by_leaf.Rule`."""

    b1: float
    b2: float
    eps: float
    fields = ("mu", "mu_scale", "nu", "nu_scale")

    def start(self, dims: Dims, p: Any) -> tuple[Any, ...]:
        blocks = block_of(dims, p.shape)
        if blocks is None:
            zeros = jnp.zeros(p.shape, jnp.float32)
            return zeros, NOTHING, zeros, NOTHING
        at, block = blocks
        shape = (*p.shape[:at], p.shape[at] // block, *p.shape[at + 1 :])
        scale = jnp.zeros(shape, jnp.float32)
        return (*(x for signed in (True, False) for x in (_zero_codes(p.shape, signed), scale)),)

    def move(
        self, dims: Dims, count: Int[Array, ""], g: Array, p: Array, state: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        mu, mu_scale, nu, nu_scale = state
        blocks = block_of(dims, p.shape)
        if blocks is not None:
            mu = dequantised(mu, mu_scale, blocks[0], signed=True)
            nu = dequantised(nu, nu_scale, blocks[0], signed=False)
        mu = self.b1 * mu + (1 - self.b1) * g
        nu = self.b2 * nu + (1 - self.b2) * jnp.square(g)
        first, second = 1 - self.b1**count, 1 - self.b2**count
        step = (mu / first) / (jnp.sqrt(nu / second) + self.eps)
        if blocks is not None:
            mu, mu_scale = quantised(mu, *blocks, signed=True)
            nu, nu_scale = quantised(nu, *blocks, signed=False)
        return step, (mu, mu_scale, nu, nu_scale)


def _zero_codes(shape: tuple[int, ...], signed: bool) -> Array:
    at = int(np.searchsorted(dynamic_codes(signed=signed), 0.0))
    return jnp.full(shape, at, jnp.uint8)


def adamw_8bit(
    learning_rate: LearningRate,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    groups: Groups = ALIKE,
) -> DimsOptimizer:
    """AdamW whose moments of matrices and tables are kept in eight bits; vectors keep float32.

    A step uses moments as they are before they are rounded. Blocks lie within a layer and an
    expert, so that neither stack nor mesh change a bit.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Times the parameter; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.

    Raises:
        InputError: An argument is out of range.

    Cost: 2 bytes of state a parameter and 8 for each block of at most 256; none is sent where
    devices hold whole blocks.
    Reference: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization.
    """
    above(0).check(eps, "adamw_8bit: eps")
    shares = {"b1": b1, "b2": b2}
    check_rates("adamw_8bit", learning_rate, shares=shares, sizes={"weight_decay": weight_decay})
    rule = Adam8Rule(b1, b2, eps)
    return decayed(lambda dims: by_leaf(rule, dims), learning_rate, weight_decay, groups)
