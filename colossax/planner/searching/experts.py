"""What tokens of a mixture send to meet their experts, by each form of `plan.experts.dispatch`.

The bytes are those of `colossax.sharding.experts.traffic`, without what is sent of numbers of
experts and rows; tests hold the two against each other, and both against compiled programs.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from colossax.config import MESH_AXES, ExpertsConfig, MeshAxis
from colossax.planner.profiling import LayerKind, ModelProfile
from colossax.planner.searching.parts import Parts
from colossax.planner.searching.sent import Sent, sent_along

_NUMBER = 4
"""Bytes of a weight of a choice."""

PASSES, GATHER, WEIGHTS = "passes", "gather", "weights"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where tokens and experts of a layer lie.

    Attributes:
        sizes: Devices by mesh axis.
        own: Axes that split the tokens between layers.
        group: Axes over which experts are split.
        features: Axes that split the experts' hidden features.
        choices: Of a token, on average.
        width: Of a token.
        wide: Bytes of a number that travels.
    """

    sizes: Mapping[str, int]
    own: frozenset[str]
    group: tuple[str, ...]
    features: tuple[str, ...]
    choices: float
    width: int
    wide: int

    def form(self, asked: ExpertsConfig) -> str:
        """The dispatch that a plan's is settled as."""
        if not self.group:
            return WEIGHTS
        if asked.dispatch != "auto":
            return asked.dispatch
        together = not self.own.intersection(self.group)
        return GATHER if together or self.size(self.group) <= self.choices else PASSES

    def sent(self, asked: ExpertsConfig) -> list[Sent]:
        """Of one of the tokens that a device holds between layers, forward and backward.

        Rows that are sent go out and back, and in backward out again with the gradients of outputs,
        and gradients of rows come back: five times. Tokens that are gathered are so three times,
        and what their experts made of them is summed and scattered twice. Where devices hold the
        same tokens, one of them sends each row and all get what comes back, or all of them sum.

        Args:
            asked: Of the plan.
        """
        form, hierarchical = self.form(asked), asked.hierarchical and len(self.group) > 1
        apart = (*self.group, *self.features)
        shared = tuple(axis for axis in apart if axis not in self.own)
        gathered = tuple(axis for axis in apart if axis in self.own)
        one, weights = float(self.width * self.wide), _NUMBER * self.choices
        # Devices with the same tokens get what comes back, and gradients of what went.
        back = 2 * self._share(shared) * (2 * one + weights)
        if form in (GATHER, WEIGHTS):
            n = self.size(gathered) - 1
            found = [
                sent_along("all-gather", gathered, n * (3 * one + 5 * weights), 3, False),
                sent_along("reduce-scatter", gathered, 2 * n * one, 2, False),
                sent_along("all-reduce", shared, back, 2, False),
            ]
            return [each for each in found if each.axes]
        rows = asked.capacity * self.choices / self.size(shared)
        levels = (self.group[:1], self.group[1:]) if hierarchical else (self.group,)
        of_row, n = 5 * one + 3 * _NUMBER, self.size(self.features) - 1
        found = [
            sent_along("all-to-all", axes, self._share(axes) * rows * of_row, 10, False)
            for axes in levels
        ]
        found += [
            sent_along("all-gather", self.features, 3 * n * rows * one, 3, False),
            sent_along("reduce-scatter", self.features, 2 * n * rows * one, 2, False),
            sent_along("all-gather", shared, back / 2, 2, False),
        ]
        return [each for each in found if each.axes]

    def rows(self, asked: ExpertsConfig) -> float:
        """Of a buffer, over those that tokens choose: gathered tokens have one too."""
        return asked.capacity if self.group else 1.0

    def copies(self, asked: ExpertsConfig) -> int:
        """Devices whose tokens are gathered, as long as a layer is computed; 0 where none are."""
        if self.form(asked) not in (GATHER, WEIGHTS):
            return 0
        apart = (*self.group, *self.features)
        gathered = self.size(tuple(axis for axis in apart if axis in self.own))
        return gathered if gathered > 1 else 0

    def size(self, axes: tuple[str, ...]) -> int:
        """Devices along these together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def _share(self, axes: tuple[str, ...]) -> float:
        """Of what a ring of these holds, what each sends."""
        return 1 - 1 / self.size(axes)


def experts_sent(profile: ModelProfile, parts: Parts, kind: LayerKind, held: float) -> list[Sent]:
    """What a device sends for so many tokens in one call of a layer; nothing without experts.

    Args:
        profile: The model.
        parts: Plan and mesh.
        kind: Of layer.
        held: Tokens of a device between layers.
    """
    if kind.leaves not in parts.experts:
        parts.experts[kind.leaves] = _of_a_token(profile, parts, kind)
    return [one._replace(bytes=held * one.bytes) for one in parts.experts[kind.leaves]]


def _of_a_token(profile: ModelProfile, parts: Parts, kind: LayerKind) -> tuple[Sent, ...]:
    meeting = meeting_of(profile, parts, kind)
    return () if meeting is None else tuple(meeting.sent(parts.bound.plan.experts))


def meeting_of(profile: ModelProfile, parts: Parts, kind: LayerKind) -> Meeting | None:
    """Where tokens and experts of a kind of layers lie under a plan; None without experts."""
    known = mixture_of(profile, kind)
    if known is None:
        return None
    tensor = MeshAxis.TENSOR.value
    own = set(parts.split)
    if tensor in parts.axes("activations", ("seq:residual",), (profile.tokens,)):
        own.add(tensor)
    group = parts.group(("experts",), (known.experts,))
    split = parts.axes("weights", ("expert_mlp",), (known.hidden,))
    return Meeting(
        sizes=parts.bound.mesh.shape,
        own=frozenset(own),
        group=tuple(axis for axis in MESH_AXES if axis in group),
        features=tuple(axis for axis in split if axis == tensor and axis not in group),
        choices=known.choices,
        width=known.width,
        wide=np.dtype(parts.bound.plan.precision.compute).itemsize,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Experts of a kind of layers.

    Attributes:
        experts: How many.
        choices: Of a token, on average.
        width: Of a token.
        hidden: Of an expert.
    """

    experts: int
    choices: float
    width: int
    hidden: int


def mixture_of(profile: ModelProfile, kind: LayerKind) -> Mixture | None:
    """Of the first matrices of experts that a layer multiplies by; None without."""
    for one in kind.traced.maps:
        info = profile.infos[kind.leaves[one.leaf]]
        if not {"experts", "expert_embed", "expert_mlp"} <= set(info.dims):
            continue
        sizes = dict(zip(info.dims, info.shape, strict=True))
        matrix = sizes["expert_embed"] * sizes["expert_mlp"]
        return Mixture(
            experts=sizes["experts"],
            choices=one.flops / (2 * kind.tokens * matrix),
            width=sizes["expert_embed"],
            hidden=sizes["expert_mlp"],
        )
    return None
