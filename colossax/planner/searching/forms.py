"""Ways for tokens to meet their experts on a mesh, of which any may be the fastest there.

Those that leave values alone: rows in passes, axis by axis where the group has several, tokens that
are gathered, or the experts. Of two that no number of rows makes the faster one is left out.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from colossax.aot import Target
from colossax.config import ExpertsConfig, MeshAxis, Plan
from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.experts import (
    GATHER,
    PASSES,
    WEIGHTS,
    Meeting,
    Mixture,
    mixture_of,
)
from colossax.planner.searching.seconds import Rates, link_across, link_for
from colossax.sharding.expert_group import group_of

_INNER = (MeshAxis.EXPERT, MeshAxis.RING, MeshAxis.ULYSSES, MeshAxis.TENSOR)

_WHOLE = frozenset({MeshAxis.EXPERT, MeshAxis.RING, MeshAxis.ULYSSES})
"""Axes along which experts can be gathered."""


class Form(NamedTuple):
    """One of them.

    Attributes:
        experts: Of the plan.
        words: For people; empty where it is what the plan takes of itself.
    """

    experts: ExpertsConfig
    words: str

    @property
    def gathers(self) -> bool:
        """Whether the experts are gathered, and not tokens or rows sent."""
        return self.experts.dispatch == WEIGHTS


class _Timed(NamedTuple):
    """Seconds of all layers' tokens: of messages, whatever their size, and of a row."""

    form: Form
    begins: float
    row: float


class Forms:
    """Of a model on a target."""

    def __init__(self, profile: ModelProfile, plan: Plan, target: Target, rates: Rates):
        """Args:
        profile: The model.
        plan: A dispatch other than `auto` that is given in it stays, with all that goes with it.
        target: Where.
        rates: Of devices and links.
        """
        self._asked, self._target, self._rates = plan.experts, target, rates
        self._wide = np.dtype(plan.precision.compute).itemsize
        self._tokens = profile.tokens
        found = [(kind, mixture_of(profile, kind)) for kind in profile.kinds]
        share = 1 / profile.tokens
        self._mixtures = [
            (kind.calls * kind.tokens * share, one) for kind, one in found if one is not None
        ]
        self._known: dict[tuple[int | bool, ...], list[Form]] = {}

    def __call__(self, mesh: Mapping[str, int], *, splits: bool, folded: bool) -> list[Form]:
        """Those of a mesh, what the plan takes of itself first, where it is among them.

        Args:
            mesh: Sizes by axis.
            splits: Whether the sequence is split over `tensor` between blocks.
            folded: Whether the mesh with devices of `expert` along `fsdp` is searched too: experts
                that are gathered are alike on both.
        """
        # Axes of a group are the innermost, so that no other tells which links it crosses.
        key = (*(mesh[axis] for axis in _INNER), splits, folded)
        if key not in self._known:
            self._known[key] = self._of(mesh, splits=splits, folded=folded)
        return self._known[key]

    def _of(self, mesh: Mapping[str, int], *, splits: bool, folded: bool) -> list[Form]:
        asked = self._asked
        own = frozenset(
            axis for axis in _INNER if mesh[axis] > 1 and (axis != MeshAxis.TENSOR or splits)
        )
        groups = {group_of(asked, mesh, one.experts) for _, one in self._mixtures}
        settled = asked.dispatch != "auto" or asked.placement is not None
        if settled or len(groups) != 1 or not (group := groups.pop()):
            return [self._timed(mesh, own, asked, "").form]
        found = self._undominated(mesh, own, group)
        whole = mesh[MeshAxis.EXPERT] == 1 or not folded
        # Along `tensor` alone hidden features are split, for which tokens are gathered.
        if whole and asked.group is None and _WHOLE.intersection(group):
            experts = dataclasses.replace(asked, dispatch=WEIGHTS)
            found.append(self._timed(mesh, own, experts, "experts gathered").form)
        return found

    def _undominated(
        self, mesh: Mapping[str, int], own: frozenset[str], group: tuple[str, ...]
    ) -> list[Form]:
        """Of forms that move tokens those that some number of rows might make the fastest."""
        asked = self._asked
        ways = {self._meeting(mesh, own, asked, one).form(asked) for _, one in self._mixtures}
        timed = [self._timed(mesh, own, asked, "")] if len(ways) > 1 else []
        for form, hierarchical in ((PASSES, False), (GATHER, False), (PASSES, True)):
            if hierarchical and len(group) < 2:
                continue
            if ways == {form} and hierarchical == asked.hierarchical:
                timed.insert(0, self._timed(mesh, own, asked, ""))
                continue
            experts = dataclasses.replace(asked, dispatch=form, hierarchical=hierarchical)
            words = f"experts by {form}" + ", axis by axis" * hierarchical
            timed.append(self._timed(mesh, own, experts, words))
        return [
            one.form
            for at, one in enumerate(timed)
            if not any(_never_slower(other, one, first=to < at) for to, other in enumerate(timed))
        ]

    def _timed(
        self, mesh: Mapping[str, int], own: frozenset[str], asked: ExpertsConfig, words: str
    ) -> _Timed:
        held = 1.0 / mesh[MeshAxis.TENSOR] if MeshAxis.TENSOR in own else 1.0
        inside = self._tokens / (mesh[MeshAxis.RING] * mesh[MeshAxis.ULYSSES])
        begins = row = 0.0
        for calls, mixture in self._mixtures:
            meeting = self._meeting(mesh, own, asked, mixture)
            for one in meeting.sent(asked):
                along = link_across(self._target, mesh, one.axes, self._rates)
                link = link_for(one.kind, along, self._rates)
                begins += calls * (meeting.size(one.axes) - 1) * one.times * link.latency_s
                row += calls * held * inside * one.bytes / link.bytes_per_s
        return _Timed(Form(asked, words), begins, row)

    def _meeting(
        self, mesh: Mapping[str, int], own: frozenset[str], asked: ExpertsConfig, one: Mixture
    ) -> Meeting:
        tensor, group = MeshAxis.TENSOR.value, group_of(asked, mesh, one.experts)
        return Meeting(
            sizes=mesh,
            own=own,
            group=group,
            features=(tensor,) if mesh[tensor] > 1 and tensor not in group else (),
            choices=one.choices,
            width=one.width,
            wide=self._wide,
        )


def _never_slower(one: _Timed, other: _Timed, *, first: bool) -> bool:
    """Whether a form takes no longer than another for one row and for any more; of two that take as
    long the one that comes first stays."""
    at_one = one.begins + one.row, other.begins + other.row
    if at_one[0] > at_one[1] or one.row > other.row:
        return False
    return first or at_one[0] < at_one[1] or one.row < other.row
