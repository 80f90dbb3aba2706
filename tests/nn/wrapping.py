"""Weights made of another one, as tests put them into models."""

import dataclasses
from typing import Any

import jax

from colossax.sharding import linear, linears


class Wrapping:
    """What a weight around `base` has of it."""

    base: Any

    @property
    def shape(self):
        return self.base.shape

    @property
    def dims(self):
        return self.base.dims

    def rows(self, ids):
        return self.base.rows(ids)

    def gathered(self, *, to=None):
        return self.base.gathered(to=to)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Wrapping):
    """A weight of maps with a narrow pair beside it."""

    base: Any
    down: Any
    up: Any

    @staticmethod
    def multiply(x, maps, *, contract):
        wide = [(own.base, bias) for own, bias in maps]
        ys = linears(x, [*wide, *((own.down, None) for own, _ in maps)], contract=contract)
        pairs = zip(maps, ys[: len(maps)], ys[len(maps) :], strict=True)
        return tuple(y + linear(narrow, own.up) for (own, _), y, narrow in pairs)

    def rows(self, ids):
        raise NotImplementedError

    def gathered(self, *, to=None):
        raise NotImplementedError
