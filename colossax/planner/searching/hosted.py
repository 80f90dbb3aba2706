"""Host memory as a second tier: which layers' arrays live there, and what that takes.

Of L equal layers, y of which have their parameters, optimizer state or activations in host memory,
bytes and traffic are linear in each y. All counts of parameters and activations are tried; of the
optimizer's state goes to the host what then has to, and of that to a file what has no room there,
so that what is found is exact for one policy.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from colossax.offload import Traffic, Way, waited_bytes
from colossax.planner.searching.bounds import divisors
from colossax.planner.searching.disk import LayersFile
from colossax.planner.searching.host_layers import at_rest, gradient, moments, moves, updated
from colossax.planner.searching.hosted_stages import StagedTier
from colossax.planner.searching.memory import STREAM, Bytes, working
from colossax.planner.searching.policies import Policy
from colossax.planner.searching.predicting import OnMesh, Policies, Prediction
from colossax.planner.searching.scored import Placed, Scored
from colossax.planner.searching.seconds import HIDING

FETCHED, IN_FLIGHT = 1.34, 1.0
"""Of a layer's parameters in host memory, what its backward pass has on the device beside what it
works with; likewise of what it kept there."""


class Tier:
    """What a layer of a mesh has that may live in host memory, bytes of a device.

    Attributes:
        layers: Of the deepest stack, by which sums over all layers are divided.
        parameters: Of a layer.
        optimizer: Likewise, moments alone.
        waits: Whether layers are updated after backward, from gradients that are kept.
        file: Where the optimizer state of some layers lies; None where it lies in none.
    """

    def __init__(self, mesh: OnMesh, *, disk: bool = False):
        """Args:
        mesh: Whose.
        disk: Whether the optimizer state of some layers lies in a file: gradients are kept then.
        """
        profile, parts = mesh.profile, mesh.parts
        self._mesh, precision = mesh, parts.bound.plan.precision
        self._stored = dataclasses.replace(
            mesh.stored,
            gathered=mesh.stored.gathered_apart,
            widest=mesh.stored.widest_apart,
        )
        self.layers = max((info.total_layers or 0 for info in profile.infos), default=0)
        self.waits = profile.clips or disk
        self.file = LayersFile(mesh, self.layers) if disk else None
        adds = float(np.dtype(precision.accumulation).itemsize)
        self._narrow = min(adds, np.dtype(precision.reduction or precision.compute).itemsize) / adds
        moved = [at for at, info in enumerate(profile.infos) if moves(info)]
        self.parameters = sum(at_rest(profile, parts, at) for at in moved) / self.layers
        self.optimizer = sum(moments(profile, parts, at) for at in moved) / self.layers
        gradients = [gradient(profile, parts, at, adds) for at in moved]
        self._summed = sum(gradients) / self.layers
        self._update = updated(profile, parts, adds * self._narrow)

    def gradients(self, microbatches: int) -> float:
        """Of a layer, that wait for the update beside the optimizer's state: sums of several
        microbatches, or until their norm is known."""
        if microbatches > 1:
            return self._summed
        return self._narrow * self._summed * self.waits

    def compute(self, names: frozenset[str]) -> float:
        """Seconds of a step's matmuls under a policy of all layers."""
        mesh, one_row = self._mesh, self._mesh.tokens(1)
        kinds = enumerate(mesh.profile.kinds)
        layers = sum(kind.calls * mesh.compute(at, names, one_row) for at, kind in kinds)
        return mesh.rows * (layers + mesh.ends(one_row))

    def placed(
        self,
        rows: int,
        policy: Policy,
        vocab_chunks: int,
        *,
        room: float,
        host: float,
        disk: float = 0.0,
    ) -> Placed | None:
        """The layers that are best in host memory; None where nothing fits.

        Args:
            rows: Of a microbatch.
            policy: Of all layers; its bytes are those of a row of all of them.
            vocab_chunks: Of the loss.
            room: Bytes of a device.
            host: Bytes of the host for each device.
            disk: Bytes of a file for each device.
        """
        layers, count = self.layers, self._mesh.rows // rows
        kept = rows * policy.bytes / layers
        own = self.optimizer + self.gradients(count)
        counts = np.arange(layers + 1)
        of_parameters, of_kept = np.meshgrid(counts, counts, indexing="ij")
        least = np.zeros_like(of_parameters, dtype=float)
        for moment in self._moments(rows, vocab_chunks, count):
            over = self._on_device(moment, of_parameters, 0, of_kept, kept) - room
            own_bytes = moment.optimizer
            most = np.where(over > 0, np.inf, 0.0)
            least = np.maximum(least, over / own_bytes if own_bytes else most)
        of_optimizer = np.minimum(np.ceil(np.maximum(least, 0) - 1e-9), layers + 1)
        used = of_parameters * self.parameters + of_optimizer * own + of_kept * kept
        in_file, fits = self._filed(of_parameters, of_optimizer, of_kept, used - host, disk)
        beside = self.compute(policy.names)
        seconds = self._bus(of_parameters, of_optimizer, of_kept, kept, count, beside, in_file)
        seconds = seconds + self._disk(of_parameters, in_file, count)
        seconds = np.where((of_optimizer <= layers) & fits, seconds, np.inf)
        at = np.unravel_index(np.lexsort((used.ravel(), seconds.ravel()))[0], seconds.shape)
        if not math.isfinite(seconds[at]):
            return None
        return Placed(
            layers=layers,
            parameters=int(of_parameters[at]),
            optimizer=int(of_optimizer[at]),
            activations=int(of_kept[at]),
            disk=int(in_file[at]),
        )

    def _filed(self, parameters, optimizer, activations, over, disk: float):
        """Layers in the file, the fewest that do, and where they fit. `over` is what host memory
        lacks without it.

        A file holds one run of layers that are alike, so all of these have their parameters in the
        same memory, and what backward keeps of them.
        """
        if self.file is None:
            return np.zeros_like(parameters), over <= 0
        lacking = over + self.file.through(1)
        count = np.maximum(np.ceil(lacking / self.optimizer - 1e-9), 1)
        fits = (count <= optimizer) & (self.file.size(count) <= disk)
        fits &= over + self.file.through(count) - count * self.optimizer <= 0
        for others in (parameters, activations):
            fits &= (others == 0) | (others >= count)
        return np.where(fits, count, 0), fits

    def _disk(self, parameters, in_file, count: int):
        """Seconds of updating the layers in the file: of it, or of the bus, whichever takes longer.

        What host memory has of these is fetched beside their state, and new parameters stored.
        """
        if self.file is None:
            return 0.0
        fetched = self.optimizer + self.gradients(count) + self.parameters * (parameters > 0)
        bus = in_file * fetched / self._mesh.target.gpu.pcie_bytes_per_s
        return np.maximum(self.file.seconds(in_file), bus)

    def _moments(self, rows: int, vocab_chunks: int, count: int) -> list["_Moment"]:
        """Of the loss, a layer's backward pass, and an update: after all of that, or in it."""
        mesh, stack = self._mesh, self.gradients(count)
        one, several = self._stored, count > 1
        layer, loss = working(one, mesh.tensor, mesh.tokens(rows), vocab_chunks)
        fixed = one.states - self.layers * (self.parameters + self.optimizer)
        fixed += several * (one.gradients - one.layer_gradients)
        fixed_late, late = fixed + one.behind, self.optimizer + stack
        moments = [
            _Moment(fixed + loss, self.optimizer + several * stack, keeps=True, fetches=False),
            _Moment(fixed_late + layer, late, keeps=True, fetches=True),
        ]
        if self.waits:
            after = fixed_late + self._update
            return [*moments, _Moment(after, late, keeps=False, fetches=False)]
        # Layers are updated as soon as the last microbatch's gradients are there.
        beside = one.gathered + STREAM * mesh.tokens(rows).inside * one.stream
        among = fixed_late + beside + self._update
        return [*moments, _Moment(among, late, keeps=True, fetches=True)]

    def _on_device(self, moment: "_Moment", parameters, optimizer, activations, kept: float):
        """Bytes with so many layers' arrays in host memory."""
        held = moment.keeps * kept * (self.layers - activations)
        held = held + self.parameters * (self.layers - parameters)
        flying = FETCHED * self.parameters * (parameters > 0) + IN_FLIGHT * kept * (activations > 0)
        own = moment.optimizer * (self.layers - optimizer)
        return moment.fixed + held + own + moment.fetches * flying

    def _bus(
        self, parameters, optimizer, activations, kept: float, count: int, beside: float, in_file=0
    ):
        """Seconds of transfers that a step waits for, with so many of compute beside them."""
        rate = self._mesh.target.gpu.pcie_bytes_per_s
        traffic = self._traffic(parameters, optimizer, activations, kept, count, in_file)
        return waited_bytes(traffic, HIDING * beside * rate) / rate

    def _traffic(
        self, parameters, optimizer, activations, kept: float, count: int, in_file=0
    ) -> Traffic:
        """Bytes of a step's program to the device, and to the host: of passes, and of updates after
        them. Layers in a file are updated once it has ended."""
        waits, several, stack = self.waits, count > 1, self.gradients(count)
        grads, keeps = stack * optimizer, count * kept * activations
        up = count * (2 * self.parameters * parameters + several * grads) + keeps
        down = (count - 1) * grads + keeps + waits * grads
        params = self.parameters * np.maximum(parameters - in_file, 0)
        left = optimizer - in_file
        end_up = waits * params + (self.optimizer + waits * stack) * left
        end_down = params + self.optimizer * left
        if waits:
            return Traffic(Way(up, end_up), Way(down, end_down))
        return Traffic(Way(up + end_up), Way(down + end_down))

    def predicted(
        self, rows: int, policies: Policies, vocab_chunks: int, placed: Placed
    ) -> Prediction:
        """Of a plan; see `OnMesh.predicted`."""
        plain = self._mesh.predicted(rows, policies, vocab_chunks)
        kept, count = plain.bytes.kept / self.layers, plain.microbatches
        there = placed.parameters, placed.optimizer, placed.activations
        moments = self._moments(rows, vocab_chunks, count)
        most = max(moments, key=lambda one: self._on_device(one, *there, kept))
        total, stack = self._on_device(most, *there, kept), self.gradients(count)
        states, summed = self._stored, count > 1
        at_rest = states.states - self.parameters * placed.parameters
        at_rest -= self.optimizer * placed.optimizer
        sums = (most.optimizer - self.optimizer) * (self.layers - placed.optimizer)
        sums += summed * (states.gradients - states.layer_gradients)
        stays = most.keeps * kept * (self.layers - placed.activations)
        bus = self._bus(*there, kept, count, plain.seconds.compute, placed.disk)
        up, down = self._traffic(*there, kept, count, placed.disk)
        host = self.parameters * placed.parameters + kept * placed.activations
        host -= self.optimizer * placed.disk
        disk = float(self._disk(placed.parameters, placed.disk, count))
        return dataclasses.replace(
            plain,
            bytes=Bytes(
                states=at_rest,
                gradients=sums,
                kept=stays,
                working=total - at_rest - sums - stays,
            ),
            host=host + (self.optimizer + stack) * placed.optimizer,
            moved=(float(sum(up)), float(sum(down))),
            seconds=dataclasses.replace(plain.seconds, bus=float(bus), disk=disk),
            file=0.0 if self.file is None else float(self.file.size(placed.disk)),
            through=0.0 if self.file is None else float(self.file.through(placed.disk)),
        )


class _Moment(NamedTuple):
    """When a device may be fullest.

    Attributes:
        fixed: Bytes that are there in any case.
        optimizer: Of each layer whose optimizer state is on the device, that and gradients.
        keeps: Whether what layers keep is still there.
        fetches: Whether what is in host memory is on its way.
    """

    fixed: float
    optimizer: float
    keeps: bool
    fetches: bool


def tier_of(mesh: OnMesh, placed: Placed) -> Tier | StagedTier:
    """What says what a placement takes."""
    return StagedTier(mesh) if placed.staged else Tier(mesh, disk=placed.disk > 0)


def best_placed(
    mesh: OnMesh,
    policies: Sequence[Policy],
    chunks: Sequence[int],
    room: float,
    host: float,
    disk: float | None = None,
    *,
    below: float = math.inf,
) -> tuple[Scored | None, int]:
    """The fastest that fits on a mesh with host memory, one policy for all layers, and how many
    were scored; None where nothing is faster than `below`.

    Args:
        mesh: Without stages.
        policies: Of all layers, for a row.
        chunks: Of the vocabulary, that are tried.
        room: Bytes of a device.
        host: Bytes of the host for each device.
        disk: Bytes of a file for each device, where there may be one: taken where nothing without
            is as fast.
        below: Seconds.

    Cost: for each microbatch, policy and number of chunks the layers squared, in NumPy.
    """
    tiers, profile = [(Tier(mesh), 0.0)], mesh.profile
    if disk is not None:
        tiers.append((Tier(mesh, disk=True), disk))
    best, scored = None, 0
    for (tier, size), rows in itertools.product(tiers, divisors(mesh.rows)[-profile.whole :]):
        least = 0.0 if tier.file is None else tier.file.seconds(1)
        for pieces, policy in itertools.product(chunks, policies):
            scored += 1
            if tier.compute(policy.names) + least >= below:
                continue
            placed = tier.placed(rows, policy, pieces, room=room, host=host, disk=size)
            if placed is None:
                continue
            mix = [[(kind.calls, policy.names)] for kind in profile.kinds]
            predicted = tier.predicted(rows, mix, pieces, placed)
            if predicted.seconds.total < below:
                below = predicted.seconds.total
                best = Scored(
                    seconds=below,
                    bytes=predicted.bytes.total,
                    rows=rows,
                    chunks=pieces,
                    mix=mix,
                    fastest=False,
                    placed=placed,
                )
    return best, scored
