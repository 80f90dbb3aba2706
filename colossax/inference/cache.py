"""The cache of one sequence: a value, given up to each call and given back by it."""

from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.nn import CacheSpec
from colossax.sharding import cache_spec

Cache = dict[str, Array]
"""Arrays by name, such as keys and values."""


class CacheLayout:
    """Shapes of a cache and where its arrays live; it holds none."""

    def __init__(self, bound: BoundPlan, spec: CacheSpec):
        """Allocate nothing.

        Args:
            bound: Plan and devices.
            spec: What the model asks for.
        """
        self._spec = spec
        self._precision = bound.plan.precision
        self.shardings = {
            name: NamedSharding(bound.mesh, cache_spec(bound, one.shape, one.dims))
            for name, one in spec.arrays.items()
        }
        self._empty = jax.jit(self._zeros, out_shardings=self.shardings)

    @property
    def abstract(self) -> Any:
        """Shapes, dtypes and shardings."""
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.shardings[name])
            for name, x in jax.eval_shape(self._zeros).items()
        }

    def empty(self) -> Cache:
        """A cache before the first token, each array made where it lives."""
        return self._empty()

    def _zeros(self) -> Cache:
        return self._spec.zeros(self._precision)
