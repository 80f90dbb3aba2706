"""All parameters of a step, by number."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from colossax.sharding.rules import home_stage
from colossax.typing import ParamInfo

if TYPE_CHECKING:
    from colossax.step.step import Step

Leaves = dict[int, Any]
"""Parameters by their number among all: arrays, or such as a rehearsal has in their place."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Numbered:
    """All parameters, by their number in the tree.

    Attributes:
        infos: Of each.
        shapes: Likewise.
        learns: Whether it does.
        homes: Number of the stage that holds it.
        structure: Of the tree.
    """

    infos: Sequence[ParamInfo]
    shapes: Sequence[Any]
    learns: Sequence[bool]
    homes: Sequence[int]
    structure: Any

    @classmethod
    def of(cls, step: "Step") -> "Numbered":
        """Those of a step."""
        infos, structure = jax.tree.flatten(step.spec.infos)
        return cls(
            infos=infos,
            shapes=[
                jax.ShapeDtypeStruct(i.shape, i.at_rest(step.bound.plan.precision.params))
                for i in infos
            ],
            learns=jax.tree.leaves(step.trainable),
            homes=[home_stage(step.bound, info) for info in infos],
            structure=structure,
        )

    def shapes_of(self, numbers: Sequence[int]) -> dict[int, Any]:
        """Of some."""
        return {at: self.shapes[at] for at in numbers}

    def hosted(self, numbers: Sequence[int]) -> frozenset[tuple[str, int]]:
        """Runs of layers, of those to which these belong, that have any in host memory."""
        infos = [self.infos[at] for at in numbers]
        return frozenset(info.segment for info in infos if info.on_host and info.segment)

    def of_runs(self, runs: Collection[tuple[str, int]], leaves: Sequence[Any]) -> dict[Any, Any]:
        """By run, of each of its parameters the leaf if it is in host memory, else None.

        Args:
            runs: Of layers.
            leaves: Of all parameters.
        """
        pairs = list(zip(self.infos, leaves, strict=True))
        return {
            run: [leaf if info.on_host else None for info, leaf in pairs if info.segment == run]
            for run in sorted(runs)
        }

    def tree(self, leaves: Mapping[int, Any]) -> Any:
        """These in the tree, None in place of the others."""
        return jax.tree.unflatten(self.structure, [leaves.get(at) for at in range(len(self.infos))])
