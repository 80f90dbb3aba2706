"""Parameters that learn at another rate, or decay otherwise, chosen by patterns of their paths."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jaxtyping import Array

from colossax.config import FrozenDict, at_least
from colossax.errors import InputError
from colossax.optim.dims import decays, is_dims, map_with_dims
from colossax.typing import Dims, NamedDims

DecayOf = Callable[[Dims], float]
"""Rate of weight decay of a parameter with these dims."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """Numbers of parameters by pattern: a regular expression that is found in the path.

    A parameter that two patterns of one field choose is refused, so that their order is no matter.

    Attributes:
        multiples: What the learning rate is multiplied by, decay included.
        decays: Weight decay in place of the optimizer's; of matrices and tables only, see `decays`.
    """

    multiples: Mapping[str, float] = FrozenDict()
    decays: Mapping[str, float] = FrozenDict()

    def __post_init__(self):
        for field in ("multiples", "decays"):
            object.__setattr__(self, field, FrozenDict(getattr(self, field)))
            for pattern, number in getattr(self, field).items():
                at_least(0).check(number, f"groups.{field} '{pattern}'")
                try:
                    re.compile(pattern)
                except re.error as problem:
                    raise InputError(
                        f"groups.{field}: '{pattern}' is no regular expression ({problem}); give"
                        " a part of a path, as attn/ or embed"
                    ) from problem

    def decay_of(self, rate: float) -> DecayOf:
        """The rates of an optimizer whose own is `rate`: 0 for norms and biases."""
        return lambda dims: _of(self.decays, dims, rate) if decays(dims) else 0.0

    def multiple_of(self, dims: Dims) -> float:
        """What multiplies the learning rate of a parameter with these dims."""
        return _of(self.multiples, dims, 1.0)

    def scaled(self, dims: Any) -> list[optax.GradientTransformation]:
        """What multiplies steps, if anything does."""
        if not self.multiples:
            return []

        def scale(leaf_dims: Dims, step: Array) -> Array:
            multiple = self.multiple_of(leaf_dims)
            return step if multiple == 1 else step * multiple

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            del params
            return map_with_dims(scale, dims, updates), state

        return [optax.GradientTransformation(lambda params: optax.EmptyState(), update)]

    def check(self, dims: Any) -> None:
        """Refuse patterns that choose nothing, or one parameter twice.

        Args:
            dims: Of all parameters that learn.

        Raises:
            InputError: Names the pattern.
        """
        leaves = jax.tree.leaves(dims, is_leaf=is_dims)
        paths = [leaf.path for leaf in leaves if isinstance(leaf, NamedDims)]
        for field in ("multiples", "decays"):
            owners: dict[str, str] = {}
            for pattern in getattr(self, field):
                found = [path for path in paths if re.search(pattern, path)]
                if not found:
                    raise InputError(
                        f"groups.{field}: '{pattern}' is found in the path of no parameter that"
                        f" learns; the first of them is {paths[0] if paths else 'none'}"
                    )
                for path in found:
                    if owners.setdefault(path, pattern) != pattern:
                        raise InputError(
                            f"groups.{field}: {path} is chosen by '{owners[path]}' and by"
                            f" '{pattern}'; make one of them narrower"
                        )


ALIKE = Groups()
"""No groups: all parameters learn alike."""


def check_groups(optimizer: Any, dims: Any) -> None:
    """Refuse patterns of an optimizer, or of several by model, that do not fit the parameters.

    Raises:
        InputError: See `Groups.check`.
    """
    if isinstance(optimizer, Mapping):
        for name, one in optimizer.items():
            check_groups(one, dims.get(name))
    elif isinstance(groups := getattr(optimizer, "groups", None), Groups):
        groups.check(dims)


def _of(numbers: Mapping[str, float], dims: Dims, otherwise: float) -> float:
    """The number of the pattern that chooses a parameter."""
    if not numbers:
        return otherwise
    if not isinstance(dims, NamedDims):
        raise InputError(
            f"groups: patterns are of paths, and dims {dims} do not know theirs; give"
            " typing.NamedDims, as steps do"
        )
    chosen = (number for pattern, number in numbers.items() if re.search(pattern, dims.path))
    return next(chosen, otherwise)
