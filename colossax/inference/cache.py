"""The cache of one sequence: a value, given up to each call and given back by it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from colossax.config import BoundPlan
from colossax.nn import CacheSpec
from colossax.sharding import cache_spec

Cache = dict[str, Any]
"""Arrays by name, such as keys and values; of a model with several kinds of layers, by kind."""

Specs = CacheSpec | Mapping[str, CacheSpec]


class CacheLayout:
    """Shapes of a cache and where its arrays live; it holds none."""

    def __init__(self, bound: BoundPlan, spec: Specs):
        """Allocate nothing.

        Args:
            bound: Plan and devices.
            spec: What the model asks for.
        """
        self._spec = spec
        self._precision = bound.plan.precision
        self.shardings = _for_each(
            spec,
            lambda one: {
                name: NamedSharding(bound.mesh, cache_spec(bound, array.shape, array.dims))
                for name, array in one.arrays.items()
            },
        )
        self._empty = jax.jit(self.zeros, out_shardings=self.shardings)

    @property
    def abstract(self) -> Any:
        """Shapes, dtypes and shardings."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(self.zeros),
            self.shardings,
        )

    def empty(self) -> Cache:
        """A cache before the first token, each array made where it lives."""
        return self._empty()

    def zeros(self) -> Cache:
        """Likewise, within a program that says where they live."""
        return _for_each(self._spec, lambda one: one.zeros(self._precision))


def _for_each(spec: Specs, make: Callable[[CacheSpec], Any]) -> Any:
    """What is made of the spec, or of each kind's."""
    if isinstance(spec, Mapping):
        return {kind: make(one) for kind, one in spec.items()}
    return make(spec)
