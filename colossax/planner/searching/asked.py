"""What a search is told to hold to."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from colossax.config import FrozenDict, nearest
from colossax.errors import InputError
from colossax.planner.searching.parts import Parts
from colossax.sharding import resolve
from colossax.typing import ParamInfo


@runtime_checkable
class HasParameters(Protocol):
    """What is known of a model."""

    @property
    def infos(self) -> Sequence[ParamInfo]:
        """Of each parameter."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is given or ruled out.

    Attributes:
        sizes: Of mesh axes, that are to be as given.
        forbidden: Mesh axes that are to be left out.
        dims: Logical dims of parameters, with the mesh axes that are to split each.
        allowed: Settings that may be changed though they change what is computed, with values.
    """

    sizes: Mapping[str, int] = FrozenDict()
    forbidden: frozenset[str] = frozenset()
    dims: Mapping[str, tuple[str, ...]] = FrozenDict()
    allowed: Mapping[str, tuple[str, ...]] = FrozenDict()

    @property
    def pinned(self) -> dict[str, int]:
        """Sizes of axes, those that are left out among them."""
        return {**self.sizes, **dict.fromkeys(sorted(self.forbidden), 1)}

    def without(self, axis: str) -> "Asked":
        """The same, with a mesh axis left out."""
        return dataclasses.replace(self, sizes={**self.sizes, axis: 1})

    @property
    def shown(self) -> str:
        """For people; empty where nothing is asked."""
        sizes = [f"{axis}={size}" for axis, size in self.pinned.items()]
        return ", ".join(sizes + [f"{dim}={'+'.join(axes)}" for dim, axes in self.dims.items()])

    def check(self, profile: HasParameters) -> None:
        """Refuse a dim that no parameter has.

        Raises:
            InputError: With the nearest.
        """
        known = sorted({dim for info in profile.infos for dim in info.dims if dim is not None})
        for dim in self.dims:
            if dim not in known:
                raise InputError(
                    f"--pin {dim}: is neither a mesh axis nor a dim of any parameter"
                    f"{nearest(dim, known)}"
                )

    def held(self, infos: Sequence[ParamInfo], parts: Parts) -> bool:
        """Whether each parameter that has such a dim is split over its axes."""
        for info in infos:
            for dim in self.dims.keys() & set(info.dims):
                spec = resolve(parts.bound, "params", info.dims, info.shape, name=info.path)
                entry = spec[info.dims.index(dim)]
                split = (entry,) if isinstance(entry, str) else tuple(entry or ())
                if not set(self.dims[dim]) <= set(split):
                    return False
        return True


NOTHING_ASKED = Asked()
