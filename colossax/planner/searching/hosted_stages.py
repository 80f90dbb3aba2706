"""Host memory under stages: what of the stages' layers lives there, and what that takes.

Every stage does the same with all of its layers, so parameters, optimizer state and what backward
keeps are each there or on the devices. Gradients are whole, on the devices, before anything is
updated; the rings of what is kept are in host memory whole, of which a device has what one pass
keeps; layers' parameters are fetched in every run, the empty ones too.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from colossax.config import HOST_KINDS
from colossax.offload import Traffic, Way, waited_bytes
from colossax.planner.searching.bounds import divisors
from colossax.planner.searching.host_layers import at_rest, moments, moves, updated
from colossax.planner.searching.memory import Bytes
from colossax.planner.searching.policies import Policy
from colossax.planner.searching.predicting import OnMesh, Policies, Prediction
from colossax.planner.searching.scored import Placed, Scored
from colossax.planner.searching.seconds import HIDING

BESIDE = (1.0, 0.0)
"""Of what runs fetch, and of what they store, what has a matmul beside it in compiled programs: a
pass stores what it keeps when it is done. Updates count as having none."""

IN_FLIGHT = 1.0
"""Of what a pass keeps, what a device has of it where its rings are in host memory."""

Mix = Callable[[float, int], Policies]
"""What a chunk's layers keep with so many bytes for a row, in so many slots."""


class StagedTier:
    """What a device's layers have that may live in host memory, bytes of a device.

    Attributes:
        layers: Of the model.
        parameters: Of all layers of a device.
        optimizer: Likewise, moments alone.
    """

    def __init__(self, mesh: OnMesh):
        """Args:
        mesh: With stages.
        """
        profile, parts = mesh.profile, mesh.parts
        self._mesh = mesh
        self.layers = sum(kind.calls for kind in profile.kinds)
        moved = [at for at, info in enumerate(profile.infos) if moves(info)]
        self.parameters = sum(at_rest(profile, parts, at) for at in moved)
        self.optimizer = sum(moments(profile, parts, at) for at in moved)
        adds = float(np.dtype(parts.bound.plan.precision.accumulation).itemsize)
        # A layer of each stage at a time, on each device one.
        self._updated = mesh.stages.count * updated(profile, parts, adds)

    def placements(self) -> Iterator[Placed]:
        """All that the step permits and formulas know.

        Parameters leave the devices only beside what is kept: with rings that stay there, programs
        had up to a fifth more than any formula here says. Where `tensor` splits heads, programs
        keep what has names whole in host memory, and all but optimizer state stays.
        """
        mesh, stages = self._mesh, self._mesh.stages
        known = mesh.parts.bound.plan.offload.clipping == "stack" and not stages.once
        keeps = known and mesh.tensor == 1
        fetches = keeps and stages.chunks == 1 and not stages.whole
        for optimizer, activations in itertools.product({False, known}, {False, keeps}):
            for parameters in {False, fetches and activations}:
                chosen = parameters, optimizer, activations
                yield Placed(
                    layers=self.layers,
                    **{k: self.layers * away for k, away in zip(HOST_KINDS, chosen, strict=True)},
                    staged=True,
                )

    def compute(self, rows: int, policies: Policies) -> float:
        """Seconds of a step's matmuls."""
        mesh, tokens, count = self._mesh, self._mesh.tokens(rows), self._mesh.rows // rows
        own = (calls * mesh.compute(0, names, tokens) for calls, names in policies[0])
        return mesh.stages.runs(count) * sum(own, 0.0) + count * mesh.ends(tokens)

    def kept(self, rows: int, policies: Policies) -> tuple[float, float]:
        """Bytes that a pass of a chunk keeps, and what of that are no layers' inputs."""
        mesh, tokens = self._mesh, self._mesh.tokens(rows)
        inputs = mesh.kept(0, frozenset(), tokens)
        every = [(count, mesh.kept(0, names, tokens)) for count, names in policies[0]]
        kept = sum((count * own for count, own in every), 0.0)
        return kept, kept - sum(count for count, _ in every) * inputs

    def bytes(
        self, rows: int, kept: tuple[float, float], vocab_chunks: int, placed: Placed
    ) -> Bytes:
        """Of a device, in a run or while layers are updated, whichever needs more.

        Args:
            rows: Of a microbatch.
            kept: See `kept`.
            vocab_chunks: Of the loss.
            placed: What lives in host memory.
        """
        held, named = kept
        return self._placed(self._mesh.bytes(rows, held, vocab_chunks, named), rows, kept, placed)

    def _placed(self, plain: Bytes, rows: int, kept: tuple[float, float], placed: Placed) -> Bytes:
        states, saved, (held, named) = plain.states, plain.kept, kept
        if placed.optimizer:
            states -= self.optimizer
        if placed.parameters:
            states -= self.parameters
        if placed.activations:
            saved += IN_FLIGHT * held - self._mesh.stages.slots(self._mesh.rows // rows) * held
            saved -= named
        run = Bytes(states=states, gradients=plain.gradients, kept=saved, working=plain.working)
        if not placed.parameters and not placed.optimizer:
            return run
        after = dataclasses.replace(run, kept=0.0, working=self._updated)
        return max(run, after, key=lambda one: one.total)

    def host(self, rows: int, kept: float, placed: Placed) -> float:
        """Bytes of the host for each device: rings have all their slots there."""
        slots = self._mesh.stages.slots(self._mesh.rows // rows)
        found = self.parameters * bool(placed.parameters) + self.optimizer * bool(placed.optimizer)
        return found + slots * kept * bool(placed.activations)

    def traffic(self, rows: int, kept: float, placed: Placed) -> Traffic:
        """Bytes of a step to the device, and to the host: of runs, and of updates after them."""
        runs = self._mesh.stages.runs(self._mesh.rows // rows)
        params = self.parameters * bool(placed.parameters)
        keeps = runs * kept * bool(placed.activations)
        end = params + self.optimizer * bool(placed.optimizer)
        return Traffic(Way(2 * runs * params + keeps, end), Way(keeps, end))

    def bus(self, rows: int, kept: float, placed: Placed, compute: float) -> float:
        """Seconds of transfers that a step waits for, with so many of compute beside them."""
        rate = self._mesh.target.gpu.pcie_bytes_per_s
        traffic = self.traffic(rows, kept, placed)
        return float(waited_bytes(traffic, HIDING * compute * rate, BESIDE)) / rate

    def predicted(
        self, rows: int, policies: Policies, vocab_chunks: int, placed: Placed
    ) -> Prediction:
        """Of a plan; see `OnMesh.predicted`."""
        plain, kept = self._mesh.predicted(rows, policies, vocab_chunks), self.kept(rows, policies)
        up, down = self.traffic(rows, kept[0], placed)
        bus = self.bus(rows, kept[0], placed, plain.seconds.compute)
        return dataclasses.replace(
            plain,
            bytes=self._placed(plain.bytes, rows, kept, placed),
            host=self.host(rows, kept[0], placed),
            moved=(float(sum(up)), float(sum(down))),
            seconds=dataclasses.replace(plain.seconds, bus=float(bus)),
        )


class _Best:
    """The fastest that fits, of what it is shown."""

    def __init__(self, tier: StagedTier, mesh: OnMesh, room: float, host: float, below: float):
        self._tier, self._mesh = tier, mesh
        self._room, self._host, self._below = room, host, below
        self.found: Scored | None = None
        self.scored = 0

    def look(
        self, rows: int, policies: Policies, chunks: Sequence[int], placements: Sequence[Placed]
    ) -> None:
        """These layers, with each number of pieces of the vocabulary in each placement."""
        tier, mesh = self._tier, self._mesh
        self.scored += len(chunks) * len(placements)
        if tier.compute(rows, policies) >= self._below:
            return
        kept, fitting = tier.kept(rows, policies), []
        for placed in placements:
            if tier.host(rows, kept[0], placed) <= self._host:
                sizes = ((tier.bytes(rows, kept, one, placed).total, one) for one in chunks)
                fitting += [(placed, *one) for one in sizes if one[0] <= self._room][:1]
        if not fitting:
            return
        plain = mesh.predicted(rows, policies, chunks[0]).seconds
        for placed, size, pieces in fitting:
            bus = tier.bus(rows, kept[0], placed, plain.compute)
            seconds = dataclasses.replace(plain, bus=float(bus)).total
            if seconds < self._below:
                self._below = seconds
                self.found = Scored(
                    seconds=seconds,
                    bytes=size,
                    rows=rows,
                    chunks=pieces,
                    mix=policies,
                    fastest=False,
                    placed=placed,
                )


def best_staged(
    mesh: OnMesh,
    policies: Sequence[Policy],
    chunks: Sequence[int],
    room: float,
    host: float,
    mix: Mix,
    *,
    below: float = math.inf,
) -> tuple[Scored | None, int]:
    """The fastest that fits on a mesh with stages and host memory, and how many were scored; None
    where nothing is faster than `below`.

    What layers keep is a mix of two policies where it stays on the devices, and one policy for all
    of them where it leaves them.

    Args:
        mesh: With stages.
        policies: Of a chunk's layers, for a row.
        chunks: Of the vocabulary, that are tried, the fewest first.
        room: Bytes of a device.
        host: Bytes of the host for each device.
        mix: The fastest that layers may keep.
        below: Seconds.

    Cost: a prediction for each microbatch and policy that fits, and sums of a few terms for each
    placement and number of chunks.
    """
    tier, stages = StagedTier(mesh), mesh.stages
    best = _Best(tier, mesh, room, host, below)
    placements = list(tier.placements())
    stay = [one for one in placements if not one.activations]
    leave = [one for one in placements if one.activations]
    layers = tier.layers // stages.share
    for rows in divisors(mesh.rows)[-mesh.profile.whole :] if placements else ():
        slots = stages.slots(mesh.rows // rows)
        for placed, pieces in itertools.product(stay, chunks):
            left = room - tier.bytes(rows, (0.0, 0.0), pieces, placed).total
            own = mix(left / rows, slots) if left > 0 else None
            if own is not None:
                best.look(rows, own, [pieces], [placed])
        for policy in policies if leave else ():
            best.look(rows, [[(layers, policy.names)]], chunks, leave)
    return best.found, best.scored
