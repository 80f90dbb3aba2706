"""Shapes on which grouped matmuls are measured, and how far from float64 they are there."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.pallas.bench import Case, relative_error, tolerance
from colossax.pallas.target import Target

from .api import IMPLEMENTATIONS, grouped_matmul
from .spec import GroupedSpec

ANCHOR = "dense"
"""One matmul of as many FLOPs."""

CHECKED = 64
"""Rows, or columns of a weight gradient, that are compared with float64."""

PASSES = ("forward", "dx", "dw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows `t` of `d` features in `e` groups to `f`, balanced or by Zipf's law."""

    t: int
    d: int
    f: int
    e: int
    zipf: bool

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.t} x {self.d} x {self.f}, {self.e} {'Zipf' if self.zipf else 'equal'} groups"

    def sizes(self) -> np.ndarray:
        """Rows of each group; they sum to t."""
        shares = 1.0 / np.arange(1, self.e + 1) if self.zipf else np.ones(self.e)
        ends = np.round(np.cumsum(shares / shares.sum()) * self.t).astype(np.int32)
        return np.diff(ends, prepend=0).astype(np.int32)

    def inputs(self, seed: int, dtype: Any) -> tuple[Any, ...]:
        """x, w, the gradient of the output, the sizes, and w's first matrix."""
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = (self.t, self.d), (self.e, self.d, self.f), (self.t, self.f)
        x, w, dy = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))
        return x, w, dy, jnp.asarray(self.sizes()), w[0]


def cases(target: Target, *, scale: int, dtype: Any) -> Iterator[Case]:
    """Each pass on each shape; sizes are divided by `scale` for slower devices."""
    t, d, f = 16_384 // scale, max(128, 4096 // scale), max(128, 2048 // scale)
    for e in (8, 64):
        for zipf in (False, True):
            shape = Shape(t=t, d=d, f=f, e=min(e, t // 8), zipf=zipf)
            spec = GroupedSpec(
                rows=t, groups=shape.e, features_in=d, features_out=f, dtype=jnp.dtype(dtype)
            )
            names = [
                name
                for name in ("mosaic", "xla")
                if IMPLEMENTATIONS[name].why_not(spec, target) is None
            ]
            for one in PASSES:
                functions: dict[str, Callable[..., Any]] = {
                    name: jax.jit(functools.partial(_grouped, one, name)) for name in names
                }
                functions[ANCHOR] = jax.jit(functools.partial(_dense, one))
                yield Case(
                    kernel=f"grouped {one}",
                    shape=shape.label,
                    flops=2.0 * t * d * f,
                    inputs=functools.partial(shape.inputs, dtype=dtype),
                    functions=functions,
                    anchor=ANCHOR,
                    truth=functools.partial(_truths, shape, one),
                    error=functools.partial(_error, shape, one),
                    tolerance=tolerance(dtype),
                )


def _grouped(one: str, name: str, x: Any, w: Any, dy: Any, sizes: Any, _first: Any) -> Any:
    if one == "forward":
        return grouped_matmul(x, w, sizes, implementation=name)
    place = PASSES.index(one) - 1
    other = (x, w)[1 - place]

    def by_one(operand: Any) -> Any:
        pair = (operand, other) if place == 0 else (other, operand)
        return grouped_matmul(*pair, sizes, implementation=name)

    return jax.vjp(by_one, (x, w)[place])[1](dy)[0]


def _dense(one: str, x: Any, _w: Any, dy: Any, _sizes: Any, first: Any) -> Any:
    left, right, rule = {
        "forward": (x, first, "td,df->tf"),
        "dx": (dy, first, "tf,df->td"),
        "dw": (x, dy, "td,tf->df"),
    }[one]
    product = jnp.einsum(rule, left, right, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def _truths(shape: Shape, one: str, given: Any) -> dict[bool, np.ndarray]:
    """Of the grouped matmul and, under True, of the dense one."""
    x, w, dy, sizes, first = given
    alone = np.asarray([shape.t])
    return {
        False: _truth(shape, one, x, w, dy, np.asarray(sizes)),
        True: _truth(shape, one, x, first[None], dy, alone),
    }


def _truth(shape: Shape, one: str, x: Any, w: Any, dy: Any, sizes: np.ndarray) -> np.ndarray:
    ends = np.cumsum(sizes)
    if one == "dw":
        products = []
        for group in _groups_checked(len(sizes)):
            rows = slice(ends[group] - sizes[group], ends[group])
            products.append(_wide(x[rows]).T @ _wide(dy[rows, :CHECKED]))
        return np.stack(products)
    rows = _rows_checked(shape)
    left = _wide((x if one == "forward" else dy)[rows])
    groups = np.searchsorted(ends, rows, side="right")
    matrices = {group: _wide(w[group]) for group in np.unique(groups)}
    turned = {g: m if one == "forward" else m.T for g, m in matrices.items()}
    return np.stack([row @ turned[group] for row, group in zip(left, groups, strict=True)])


def _error(shape: Shape, one: str, name: str, truths: Any, out: Any) -> float:
    """Over some rows; of dw over some columns of the first, a middle and the last matrix."""
    dense = name == ANCHOR
    if one != "dw":
        return relative_error(_wide(out[_rows_checked(shape)]), truths[dense])
    matrices = out[None] if dense else out[np.asarray(_groups_checked(shape.e))]
    return relative_error(_wide(matrices[:, :, :CHECKED]), truths[dense])


def _rows_checked(shape: Shape) -> np.ndarray:
    chosen = np.random.default_rng(2).choice(shape.t, min(CHECKED, shape.t), replace=False)
    return np.sort(chosen)


def _groups_checked(groups: int) -> list[int]:
    return sorted({0, groups // 2, groups - 1})


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)
