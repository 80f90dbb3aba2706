"""Muon: steps of matrices with all singular values near one, each layer and expert by itself."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from colossax.config import BoundPlan, above, nearest
from colossax.config.bounds import DECAYS
from colossax.errors import InputError
from colossax.optim.by_leaf import NOTHING, by_leaf
from colossax.optim.contract import DimsOptimizer, LearningRate, check_rates
from colossax.optim.dims import is_hidden_matrix, is_unit_dim, sides
from colossax.optim.groups import ALIKE, Groups
from colossax.optim.transforms import decayed
from colossax.sharding import compute_dtype, current, resolve
from colossax.typing import Dims

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that is iterated: steep at 0, near 1 from there to 1."""

_ROUNDS = 5
_LIKE_ADAM = 0.2
"""RMS of AdamW's steps, which those of Muon get, so that both learn at one rate."""

GATHERS = ("auto", "whole", "shared")


@dataclasses.dataclass(frozen=True)
class MuonRule:
    """See `muon`; a `by_leaf.Rule`."""

    momentum: float
    nesterov: bool
    rounds: int
    gather: str
    b1: float
    b2: float
    eps: float
    moment_dtype: DTypeLike
    fields = ("mu", "nu")

    def start(self, dims: Dims, p: Any) -> tuple[Any, ...]:
        mu = jnp.zeros(p.shape, self.moment_dtype)
        return mu, NOTHING if is_hidden_matrix(dims) else jnp.zeros(p.shape, jnp.float32)

    def move(
        self, dims: Dims, count: Int[Array, ""], g: Array, p: Array, state: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        mu, nu = state[0].astype(jnp.float32), state[1]
        if not is_hidden_matrix(dims):
            mu, nu = self.b1 * mu + (1 - self.b1) * g, self.b2 * nu + (1 - self.b2) * jnp.square(g)
            first, second = 1 - self.b1**count, 1 - self.b2**count
            step = (mu / first) / (jnp.sqrt(nu / second) + self.eps)
            return step, (mu.astype(self.moment_dtype), nu)
        mu = self.momentum * mu + g
        along = g + self.momentum * mu if self.nesterov else mu
        step = orthogonal(along, dims, rounds=self.rounds, gather=self.gather)
        return step, (mu.astype(self.moment_dtype), nu)


def muon(
    learning_rate: LearningRate,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    rounds: int = _ROUNDS,
    gather: str = "auto",
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    groups: Groups = ALIKE,
    moment_dtype: DTypeLike = jnp.float32,
) -> DimsOptimizer:
    """Muon for matrices, AdamW for all else: `p -= lr (0.2 sqrt(max(rows, cols)) O + decay p)`.

    `m = momentum m + g`, and O is `g + momentum m` with its singular values brought to about 1, of
    each layer and expert by itself. By that factor its RMS is about 0.2, as AdamW's steps have it,
    so that both take one rate and one decay. A matrix has two sides (`dims.sides`); embeddings,
    heads, norms, biases and routers are AdamW's.

    Args:
        learning_rate: A number, or a schedule of the step count from 0.
        momentum: Of matrices.
        nesterov: Steps along `g + momentum m` instead of m.
        rounds: Of the iteration that makes O.
        gather: How devices that hold parts of a matrix get it; see `orthogonal`.
        b1: Of AdamW.
        b2: Of AdamW.
        eps: Of AdamW.
        weight_decay: Times the parameter; matrices and tables only, see `decays`.
        groups: Other rates and decays, by pattern.
        moment_dtype: Of all moments but AdamW's second, which is float32.

    Raises:
        InputError: An argument is out of range.

    Cost: one `moment_dtype` a parameter of a matrix; `orthogonal` has FLOPs and bytes.
    Reference: Jordan et al. 2024, Muon; the scale is that of Liu et al. 2025, Muon is Scalable for
    LLM Training.
    """
    above(0).check(eps, "muon: eps")
    above(0).check(rounds, "muon: rounds")
    if gather not in GATHERS:
        raise InputError(f"muon: gather: unknown '{gather}'{nearest(gather, GATHERS)}")
    DECAYS.check(momentum, "muon: momentum")
    sizes = {"weight_decay": weight_decay}
    check_rates("muon", learning_rate, shares={"b1": b1, "b2": b2}, sizes=sizes)
    rule = MuonRule(momentum, nesterov, rounds, gather, b1, b2, eps, moment_dtype)
    return decayed(lambda dims: by_leaf(rule, dims), learning_rate, weight_decay, groups)


def orthogonal(
    x: Float[Array, "..."], dims: Dims, *, rounds: int = _ROUNDS, gather: str = "auto"
) -> Float[Array, "..."]:
    """`0.2 sqrt(max(rows, cols)) U V^T` of each matrix `U S V^T`, about: 0.7 to 1.2 in place of 1.

    `X = x / |x|`, then `X = a X + (b A + c A^2) X` with `A = X X^T`, over and over, in the compute
    dtype of the plan in force (float32 without one), X with no more rows than columns.

    Args:
        x: Matrices in float32.
        dims: Their names; two sides.
        rounds: How often.
        gather: With a plan in force: `whole`, every device gets all matrices of which it has a
            part, and computes them all; `shared`, each gets some of them whole, as many as layers
            and experts can be divided among those devices; `auto`, `shared` where any can.

    Cost, per matrix of r rows, c >= r columns: `rounds (4 r^2 c + 2 r^3)` FLOPs. Of K devices that
    hold parts of n bytes (all their layers, compute dtype), `whole` sends `(K - 1) / K n` each.
    `shared` sends `(k - 1) / k n / K` for each of their axes, of k devices, there and as much back,
    for a K-th of the work.
    """
    rows, cols = sides(dims)
    scale = _LIKE_ADAM * math.sqrt(max(_size(x, rows), _size(x, cols)))
    narrow = x.astype(compute_dtype(jnp.dtype(jnp.float32)))
    bound = current()
    if bound is None or bound.single:
        return scale * _iterated(narrow, rows, cols, rounds).astype(jnp.float32)
    home = resolve(bound, "optimizer", dims, x.shape)
    way = gathering(bound, home, dims, x.shape, gather)
    # First where it lies: else the compiler may gather before it narrows, and send twice as much.
    for spec in way:
        narrow = laid(bound, narrow, spec)
    found = _iterated(narrow, rows, cols, rounds)
    for spec in reversed(way):
        found = laid(bound, found, spec)
    return scale * found.astype(jnp.float32)


def gathering(
    bound: BoundPlan, home: PartitionSpec, dims: Dims, shape: tuple[int, ...], gather: str
) -> list[PartitionSpec]:
    """Where matrices lie on the way from `home` to where no side of them is split.

    One axis after another is exchanged: where several move at once, the compiler gathers all.
    """
    lie = [list(_axes(entry)) for entry in (*home, *[None] * (len(dims) - len(home)))]
    way, split = [home], [at for at, dim in enumerate(dims) if not is_unit_dim(dim)]
    if gather != "whole":
        for at in split:
            for axis in reversed(lie[at][:]):
                if _taken(bound, axis, lie, dims, shape):
                    lie[at].remove(axis)
                    way.append(_spec(lie))
    if any(lie[at] for at in split):
        way.append(_spec([[] if at in split else axes for at, axes in enumerate(lie)]))
    return way


def _taken(
    bound: BoundPlan, axis: str, lie: list[list[str]], dims: Dims, shape: tuple[int, ...]
) -> bool:
    """Split the first unit dim over one more axis that divides it, if there is one."""
    for at, dim in enumerate(dims):
        if is_unit_dim(dim) and shape[at] % bound.size((*lie[at], axis)) == 0:
            lie[at].append(axis)
            return True
    return False


def _spec(lie: list[list[str]]) -> PartitionSpec:
    return PartitionSpec(*(tuple(axes) or None for axes in lie))


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def laid(bound: BoundPlan, x: Array, spec: PartitionSpec) -> Array:
    """An array that is to lie so."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))


def _size(x: Array, axes: tuple[int, ...]) -> int:
    return math.prod(x.shape[at] for at in axes)


def _iterated(x: Array, rows: tuple[int, ...], cols: tuple[int, ...], rounds: int) -> Array:
    """U V^T, about; the shape of `x`, each side of which is one dim meanwhile."""
    units = [at for at in range(x.ndim) if at not in (*rows, *cols)]
    order = [*units, *rows, *cols]
    turned = jnp.transpose(x, order)
    lead = turned.shape[: len(units)]
    y = turned.reshape(*lead, _size(x, rows), _size(x, cols))
    tall = y.shape[-2] > y.shape[-1]
    y = jnp.swapaxes(y, -1, -2) if tall else y
    wide = y.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
    y = (wide / jnp.maximum(norm, 1e-20)).astype(x.dtype)
    a, b, c = COEFFICIENTS

    def once(_: Any, y: Array) -> Array:
        square = y @ jnp.swapaxes(y, -1, -2)
        return a * y + (b * square + c * (square @ square)) @ y

    y = jax.lax.fori_loop(0, rounds, once, y)
    y = jnp.swapaxes(y, -1, -2) if tall else y
    back = [order.index(at) for at in range(x.ndim)]
    return jnp.transpose(y.reshape(turned.shape), back)
