"""GaLore: Adam for matrices within the few directions along which their gradients are large."""

import dataclasses
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan, above, at_least, nearest
from colossax.errors import InputError
from colossax.optim.by_leaf import NOTHING, Rule, by_leaf
from colossax.optim.contract import DimsOptimizer, LearningRate, check_rates
from colossax.optim.dims import is_hidden_matrix, sides, unit_axes
from colossax.optim.groups import ALIKE, Groups
from colossax.optim.muon import gathering, laid
from colossax.optim.quantised import Adam8Rule
from colossax.optim.transforms import decayed
from colossax.sharding import compute_dtype, current, resolve
from colossax.typing import Dims

GALORE_STATES = ("float32", "mixed", "8bit")

_ROUNDS = 2
"""Of a refresh: from noise they find 0.98 of what the best directions hold where singular values
fall as `k^-1/2`, 0.86 where the gradient is noise too."""

_SHIFT = 1e-6
"""Share of the old directions in a round, beside the gradient's squared norm."""


@dataclasses.dataclass(frozen=True)
class AdamRule:
    """Adam's direction; a `by_leaf.Rule`."""

    b1: float
    b2: float
    eps: float
    moment_dtype: DTypeLike
    fields = ("mu", "nu")

    def start(self, dims: Dims, p: Any) -> tuple[Any, ...]:
        return jnp.zeros(p.shape, self.moment_dtype), jnp.zeros(p.shape, jnp.float32)

    def move(
        self, dims: Dims, count: Int[Array, ""], g: Array, p: Array, state: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        mu = self.b1 * state[0].astype(jnp.float32) + (1 - self.b1) * g
        nu = self.b2 * state[1] + (1 - self.b2) * jnp.square(g)
        first, second = 1 - self.b1**count, 1 - self.b2**count
        step = (mu / first) / (jnp.sqrt(nu / second) + self.eps)
        return step, (mu.astype(self.moment_dtype), nu)


@dataclasses.dataclass(frozen=True)
class GaLoreRule:
    """See `galore`; a `by_leaf.Rule`."""

    adam: Rule
    rank: int
    interval: int
    scale: float
    rounds: int

    @property
    def fields(self) -> Sequence[str]:
        return (*self.adam.fields, "projection")

    def start(self, dims: Dims, p: Any) -> tuple[Any, ...]:
        low = low_rank(dims, p.shape, self.rank)
        if low is None:
            return (*self.adam.start(dims, p), NOTHING)
        moments = jax.ShapeDtypeStruct(low.moment_shape, jnp.float32)
        return (*self.adam.start(dims, moments), low.noise())

    def move(
        self, dims: Dims, count: Int[Array, ""], g: Array, p: Array, state: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        *moments, projection = state
        low = low_rank(dims, p.shape, self.rank)
        if low is None:
            step, new = self.adam.move(dims, count, g, p, tuple(moments))
            return step, (*new, NOTHING)
        projection = jax.lax.cond(
            (count - 1) % self.interval == 0,
            lambda old: low.refreshed(g, old, self.rounds),
            low.beside_gradient,
            projection,
        )
        within = low.projected(g, projection)
        step, new = self.adam.move(dims, count, within, within, tuple(moments))
        return self.scale * low.full(step, projection), (*new, projection)


def galore(
    learning_rate: LearningRate,
    *,
    rank: int = 128,
    interval: int = 200,
    scale: float = 0.25,
    rounds: int = _ROUNDS,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    groups: Groups = ALIKE,
    state: str = "float32",
) -> DimsOptimizer:
    """GaLore for matrices, AdamW for all else: `p -= lr (scale P Adam(P^T g) + weight_decay p)`.

    P holds `rank` orthonormal directions of a matrix's shorter side (of its first, if both are
    alike), of each layer and expert by itself. They are found in the first update and in every
    `interval`-th after it, from that update's gradient (`LowRank.refreshed`). Moments and
    Adam's count go on over a refresh, as in the paper; updates that are skipped count for neither.
    A matrix has two sides (`dims.sides`); embeddings, heads, norms, biases and routers are
    AdamW's, without `scale`, and so are matrices whose shorter side is `rank` or less, for which
    directions would save nothing.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        rank: Directions.
        interval: Updates from one refresh of the directions to the next.
        scale: Times the steps of matrices: a direction moves by about `scale lr`.
        rounds: Of the iteration that finds directions.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Times the parameter; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        state: Moments as kept: `float32`; `mixed`, the first in bfloat16; `8bit`, as `adamw_8bit`
            keeps them.

    Raises:
        InputError: An argument is out of range.

    Cost, of a matrix of m rows and n >= m columns: state of `4 m rank` bytes for P and `8 n rank`
    for moments (6 if mixed, 2 and 8 for each block in eight bits), against AdamW's `8 m n`.
    `4 m n rank` FLOPs an update in bfloat16 where the plan computes in it, else float32. Devices
    that share rows add up `n rank` float32 and gather as many steps; nothing else is sent but at
    a refresh.
    Reference: Zhao et al. 2024, GaLore: Memory-Efficient LLM Training by Gradient Low-Rank
    Projection.
    """
    for name, number in {"rank": rank, "interval": interval, "rounds": rounds}.items():
        at_least(1).check(number, f"galore: {name}")
    for name, value in {"scale": scale, "eps": eps}.items():
        above(0).check(value, f"galore: {name}")
    if state not in GALORE_STATES:
        raise InputError(f"galore: state: unknown '{state}'{nearest(state, GALORE_STATES)}")
    sizes = {"weight_decay": weight_decay}
    check_rates("galore", learning_rate, shares={"b1": b1, "b2": b2}, sizes=sizes)
    dtype = jnp.bfloat16 if state == "mixed" else jnp.float32
    adam = Adam8Rule(b1, b2, eps) if state == "8bit" else AdamRule(b1, b2, eps, dtype)
    rule = GaLoreRule(adam, rank, interval, scale, rounds)
    return decayed(lambda dims: by_leaf(rule, dims), learning_rate, weight_decay, groups)


def low_rank(dims: Dims, shape: tuple[int, ...], rank: int) -> "LowRank | None":
    """How a parameter is projected; None where it is AdamW's."""
    if not is_hidden_matrix(dims):
        return None
    short, long = sorted(sides(dims), key=lambda side: math.prod(shape[at] for at in side))
    if rank >= math.prod(shape[at] for at in short):
        return None
    return LowRank(dims, shape, short, long, rank)


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Matrices and what is kept in place of their sides; all arrays have the parameter's dims.

    Attributes:
        dims: Of the parameter.
        shape: Of it.
        short: Numbers of the dims of the side that is projected.
        long: Of those of the other.
        rank: Directions.
    """

    dims: Dims
    shape: tuple[int, ...]
    short: tuple[int, ...]
    long: tuple[int, ...]
    rank: int

    @property
    def moment_shape(self) -> tuple[int, ...]:
        """Of the projected gradient: directions in place of the shorter side."""
        return self._cut(self.short)

    @property
    def projection_shape(self) -> tuple[int, ...]:
        """Directions in place of the longer side."""
        return self._cut(self.long)

    def _cut(self, side: tuple[int, ...]) -> tuple[int, ...]:
        sizes = {at: self.rank if at == side[0] else 1 for at in side}
        return tuple(sizes.get(at, size) for at, size in enumerate(self.shape))

    def noise(self) -> Float[Array, "..."]:
        """Where the first refresh begins: the same normal numbers for each layer and expert."""
        units = [self.shape[at] for at in unit_axes(self.dims)]
        rows = math.prod(self.shape[at] for at in self.short)
        key = jax.random.key(0, impl="threefry2x32")
        one = jax.random.normal(key, (rows, self.rank), jnp.float32)
        return self._as_projection(jnp.broadcast_to(one, (*units, rows, self.rank)))

    def projected(self, g: Array, projection: Array) -> Float[Array, "..."]:
        """`P^T g`, in float32."""
        whole, along, within = self._letters()
        found = _product(f"{along},{whole}->{within}", jnp.squeeze(projection, self.long[1:]), g)
        return self._laid(jnp.expand_dims(found, self.short[1:]), self.short)

    def full(self, step: Array, projection: Array) -> Float[Array, "..."]:
        """`P step`, in float32."""
        whole, along, within = self._letters()
        step = jnp.squeeze(self._laid(step, self.short), self.short[1:])
        along_rows = jnp.squeeze(projection, self.long[1:])
        return self._laid(_product(f"{along},{within}->{whole}", along_rows, step), ())

    def beside_gradient(self, projection: Array) -> Array:
        """Each device gets all directions of the rows that it has."""
        return self._laid(projection, self.long)

    def refreshed(self, g: Array, projection: Array, rounds: int) -> Float[Array, "..."]:
        """P that follows the gradient's largest singular vectors, from the one before.

        `P = orthonormal((g g^T / |g|^2 + 1e-6) P)`, over and over, in float32: subspace iteration,
        which many rounds bring to the singular vectors in the order of their values.

        Not the vectors themselves: their signs are anyone's choice, those of near values turn into
        one another by rounding alone, and moments that are kept would mean something else then.
        Here directions move as little as gradients do, and signs are those of before. Where the
        gradient has nothing (experts without tokens) the small share of the old directions keeps
        them, rather than rounding. There are products of matrices and one loop over columns, which
        GPUs and TPUs compile alike, many layers at once; a library's eigenvectors would need a
        square of the side, and a program for each kind of device. Devices that hold parts of a
        matrix exchange it once, as Muon does (`gather` auto), so that each has all of what it
        computes.

        Cost, of m rows and n >= m columns: `rounds (4 m n r + 8 m r^2)` FLOPs, a float32 copy of
        the gradient; it is sent once, and twice the old P.
        """
        bound, way = self._way()
        for place in way:
            g = laid(bound, g, place)
        if way:
            projection = laid(bound, projection, way[-1])
        x, y = self._matrices(g), self._matrices(projection)
        x = x / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x), (-2, -1), keepdims=True)), 1e-30)

        def once(_: Any, y: Array) -> Array:
            return orthonormal(_times(x, _times(x.mT, y)) + _SHIFT * y)

        y = jax.lax.fori_loop(0, rounds, once, y)
        found = self._as_projection(y)
        return self.beside_gradient(laid(bound, found, way[-1]) if way else found)

    def _home(self) -> tuple[BoundPlan | None, list[Any]]:
        """The plan in force, if several devices share arrays, and where each dim lies under it."""
        bound = current()
        if bound is None or bound.single:
            return None, []
        return bound, list(resolve(bound, "optimizer", self.dims, self.shape))

    def _way(self) -> tuple[Any, list[PartitionSpec]]:
        """Where a gradient lies on its way to devices that have matrices whole; none on one."""
        bound, home = self._home()
        if bound is None:
            return None, []
        return bound, gathering(bound, PartitionSpec(*home), self.dims, self.shape, "auto")

    def _laid(self, x: Array, side: tuple[int, ...]) -> Array:
        """As the parameter's state, but whole along a side."""
        bound, home = self._home()
        if bound is None:
            return x
        spec = [None if at in side else entry for at, entry in enumerate(home)]
        return laid(bound, x, PartitionSpec(*spec))

    def _letters(self) -> tuple[str, str, str]:
        """Of gradient, projection and moments, for `einsum`; `z` are the directions."""
        whole = string.ascii_lowercase[: len(self.shape)]

        def cut(side: tuple[int, ...]) -> str:
            return "".join(
                "z" if at == side[0] else letter
                for at, letter in enumerate(whole)
                if at not in side[1:]
            )

        return whole, cut(self.long), cut(self.short)

    def _matrices(self, x: Array) -> Float[Array, "... m n"]:
        """Shorter side, then the longer one or its directions, each as one dim."""
        order = self._order()
        turned = jnp.transpose(x, order)
        units = turned.shape[: len(order) - len(self.short) - len(self.long)]
        rows = math.prod(x.shape[at] for at in self.short)
        return turned.reshape(*units, rows, -1).astype(jnp.float32)

    def _as_projection(self, y: Float[Array, "... m r"]) -> Array:
        order, shape = self._order(), self.projection_shape
        turned = y.reshape([shape[at] for at in order])
        return jnp.transpose(turned, [order.index(at) for at in range(len(order))])

    def _order(self) -> list[int]:
        return [*unit_axes(self.dims), *self.short, *self.long]


def orthonormal(y: Float[Array, "... m r"]) -> Float[Array, "... m r"]:
    """Columns made orthonormal from the first on, each with the sign it has: Q of `y = Q R`, R > 0.

    Gram and Schmidt's way, each column taken off twice, which is enough for float32 while the
    condition of y is below about 1e6.
    """

    def column(at: Any, q: Array) -> Array:
        v = jax.lax.dynamic_slice_in_dim(y, at, 1, -1)
        for _ in range(2):
            v = v - _times(q, _times(q.mT, v))
        norm = jnp.sqrt(jnp.sum(jnp.square(v), -2, keepdims=True))
        return jax.lax.dynamic_update_slice_in_dim(q, v / jnp.maximum(norm, 1e-30), at, -1)

    return jax.lax.fori_loop(0, y.shape[-1], column, jnp.zeros_like(y))


def _times(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _product(how: str, a: Array, b: Array) -> Float[Array, "..."]:
    """In bfloat16 where the plan in force computes in it, summed in float32."""
    # float16 would take small gradients for 0.
    narrow = compute_dtype(jnp.dtype(jnp.float32)) == jnp.bfloat16
    dtype, precision = (jnp.bfloat16, None) if narrow else (jnp.float32, jax.lax.Precision.HIGHEST)
    return jnp.einsum(
        how,
        a.astype(dtype),
        b.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
