"""Host memory as a second tier: which layers' arrays live there, and what that takes.

Of L equal layers, y of which have their parameters, optimizer state or activations in host memory,
bytes and traffic are linear in each y. All counts of parameters and activations are tried; of the
optimizer's state goes to the host what then has to, so that what is found is exact for one policy.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from colossax.config import Plan
from colossax.errors import PlanError
from colossax.optim import decays
from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.bounds import divisors
from colossax.planner.searching.memory import STREAM, Bytes, working
from colossax.planner.searching.parts import Parts
from colossax.planner.searching.policies import Policy
from colossax.planner.searching.predicting import OnMesh, Policies, Prediction
from colossax.planner.searching.scored import Placed, Scored
from colossax.planner.searching.seconds import HIDING
from colossax.typing import ParamInfo

BESIDE = 0.5
"""Of what forward and backward passes fetch and store, what has a matmul beside it in compiled
programs; updates have none."""

FETCHED, IN_FLIGHT = 1.34, 1.0
"""Of a layer's parameters in host memory, what its backward pass has on the device beside what it
works with; likewise of what it kept there."""


class Tier:
    """What a layer of a mesh has that may live in host memory, bytes of a device.

    Attributes:
        layers: Of the deepest stack, by which sums over all layers are divided.
        parameters: Of a layer.
        optimizer: Likewise, moments alone.
    """

    def __init__(self, mesh: OnMesh):
        """Args:
        mesh: Whose.
        """
        profile, parts = mesh.profile, mesh.parts
        self._mesh, precision = mesh, parts.bound.plan.precision
        self._stored = dataclasses.replace(
            mesh.stored,
            gathered=mesh.stored.gathered_apart,
            widest=mesh.stored.widest_apart,
        )
        self.layers = max((info.total_layers or 0 for info in profile.infos), default=0)
        adds = float(np.dtype(precision.accumulation).itemsize)
        self._narrow = min(adds, np.dtype(precision.reduction or precision.compute).itemsize) / adds
        moved = [at for at, info in enumerate(profile.infos) if _moves(info)]
        self.parameters = sum(_at_rest(profile, parts, at) for at in moved) / self.layers
        self.optimizer = sum(_moments(profile, parts, at) for at in moved) / self.layers
        gradients = [_gradient(profile, parts, at, adds) for at in moved]
        self._summed = sum(gradients) / self.layers
        self._update = _update(profile, parts, adds * self._narrow)

    def gradients(self, microbatches: int) -> float:
        """Of a layer, that wait for the update beside the optimizer's state: sums of several
        microbatches, or until their norm is known."""
        if microbatches > 1:
            return self._summed
        return self._narrow * self._summed * self._mesh.profile.clips

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
    ) -> Placed | None:
        """The layers that are best in host memory; None where nothing fits.

        Args:
            rows: Of a microbatch.
            policy: Of all layers; its bytes are those of a row of all of them.
            vocab_chunks: Of the loss.
            room: Bytes of a device.
            host: Bytes of the host for each device.
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
        beside = self.compute(policy.names)
        seconds = self._bus(of_parameters, of_optimizer, of_kept, kept, count, beside)
        seconds = np.where((of_optimizer <= layers) & (used <= host), seconds, np.inf)
        at = np.unravel_index(np.lexsort((used.ravel(), seconds.ravel()))[0], seconds.shape)
        if not math.isfinite(seconds[at]):
            return None
        return Placed(
            layers=layers,
            parameters=int(of_parameters[at]),
            optimizer=int(of_optimizer[at]),
            activations=int(of_kept[at]),
        )

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
        if mesh.profile.clips:
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

    def _bus(self, parameters, optimizer, activations, kept: float, count: int, beside: float):
        """Seconds of transfers that a step waits for, with so many of compute beside them."""
        rate = self._mesh.target.gpu.pcie_bytes_per_s
        seconds = 0.0
        for passes, end in self._traffic(parameters, optimizer, activations, kept, count):
            hidden = np.minimum(BESIDE * passes / rate, HIDING * beside)
            seconds = np.maximum(seconds, (passes + end) / rate - hidden)
        return seconds

    def _traffic(self, parameters, optimizer, activations, kept: float, count: int):
        """Bytes of a step to the device, and to the host: of passes, and of updates after them."""
        waits, several = self._mesh.profile.clips, count > 1
        params, moments = self.parameters * parameters, self.optimizer * optimizer
        grads, keeps = self.gradients(count) * optimizer, count * kept * activations
        up = count * (2 * params + several * grads) + keeps
        down = (count - 1) * grads + keeps
        end_up, end_down = waits * params + moments + waits * grads, params + moments
        down = down + waits * grads
        if waits:
            return (up, end_up), (down, end_down)
        return (up + end_up, 0.0), (down + end_down, 0.0)

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
        bus = self._bus(*there, kept, count, plain.seconds.compute)
        up, down = self._traffic(*there, kept, count)
        host = self.parameters * placed.parameters + kept * placed.activations
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
            seconds=dataclasses.replace(plain.seconds, bus=float(bus)),
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


def best_placed(
    mesh: OnMesh, policies: Sequence[Policy], chunks: Sequence[int], room: float, host: float
) -> tuple[Scored | None, int]:
    """The fastest that fits on a mesh with host memory, one policy for all layers, and how many
    were scored.

    Args:
        mesh: Without stages.
        policies: Of all layers, for a row.
        chunks: Of the vocabulary, that are tried.
        room: Bytes of a device.
        host: Bytes of the host for each device.

    Cost: for each microbatch, policy and number of chunks the layers squared, in NumPy.
    """
    tier, profile = Tier(mesh), mesh.profile
    best, scored = None, 0
    for rows in divisors(mesh.rows)[-profile.whole :]:
        for pieces, policy in itertools.product(chunks, policies):
            scored += 1
            if best is not None and tier.compute(policy.names) >= best.seconds:
                continue
            placed = tier.placed(rows, policy, pieces, room=room, host=host)
            if placed is None:
                continue
            mix = [[(kind.calls, policy.names)] for kind in profile.kinds]
            predicted = tier.predicted(rows, mix, pieces, placed)
            if best is None or predicted.seconds.total < best.seconds:
                best = Scored(
                    seconds=predicted.seconds.total,
                    bytes=predicted.bytes.total,
                    rows=rows,
                    chunks=pieces,
                    mix=mix,
                    fastest=False,
                    placed=placed,
                )
    return best, scored


def _moves(info: ParamInfo) -> bool:
    """Whether it may live in host memory: a layer's matrices may, its vectors do not."""
    return info.total_layers is not None and decays(info.named_dims)


def _numbers(info: ParamInfo) -> int:
    return math.prod(info.shape)


def _at_rest(profile: ModelProfile, parts: Parts, at: int) -> float:
    info = profile.infos[at]
    wide = info.at_rest(parts.bound.plan.precision.params).itemsize
    return wide * _numbers(info) / parts.size(parts.axes("params", info.dims, info.shape))


def _moments(profile: ModelProfile, parts: Parts, at: int) -> float:
    info = profile.infos[at]
    split = parts.axes("optimizer", info.dims, info.shape)
    return profile.moments[at] * _numbers(info) / parts.size(split)


def _gradient(profile: ModelProfile, parts: Parts, at: int, wide: float) -> float:
    info = profile.infos[at]
    own = parts.size(parts.axes("gradients", info.dims, info.shape))
    return profile.learns[at] * wide * _numbers(info) / own


def _update(profile: ModelProfile, parts: Parts, wide: float) -> float:
    """Of the largest layer all that is updated, with its gradients."""

    def of(at: int) -> float:
        own = _at_rest(profile, parts, at) + _moments(profile, parts, at)
        return (own + _gradient(profile, parts, at, wide)) / profile.infos[at].shape[0]

    return max((sum(map(of, kind.leaves)) for kind in profile.kinds), default=0.0)


def check_host(plan: Plan, host_gb: float | None) -> None:
    """Refuse what a search would lose, or knows nothing of.

    Args:
        plan: As it was given.
        host_gb: See `plan_run`.

    Raises:
        PlanError: Something is placed in host memory, and none may be used; the plan updates layers
            in a way that formulas do not know.
    """
    offload, segments = plan.offload, plan.segments
    placed = offload.wanted or any(one.offload != "none" for one in segments)
    if host_gb is None and placed:
        raise PlanError(
            "plan.offload: the plan has layers in host memory or updates them one by one, and what"
            " lives there is found where it may be used; give --host-gb (--plan.offload auto beside"
            " --plan auto), or --plan.offload none"
        )
    if host_gb is None:
        return
    if offload.cpu_update != "off":
        raise PlanError(
            f"plan.offload.cpu_update: found {offload.cpu_update}, and what the CPU updates is not"
            " searched; leave it off, and put it over the plan that is found"
        )
    if offload.clipping not in ("stack", "layer"):
        raise PlanError(
            f"plan.offload.clipping: found {offload.clipping}, of which it is not known what it"
            " takes; give stack or layer, and put another over the plan that is found"
        )
    if placed and not offload.auto:
        raise PlanError(
            "plan.offload: layers are in host memory or updated one by one, and --host-gb finds"
            " which of them are to be; leave one of the two out (--plan.offload none)"
        )


def host_of(profile: ModelProfile, host_gb: float | None) -> float | None:
    """Bytes of the host for each device, where layers' arrays may live there.

    Raises:
        PlanError: They cannot.
    """
    if host_gb is None:
        return None
    if profile.moves:
        raise PlanError(f"plan: host memory is to be used, and cannot be: {profile.moves}")
    return host_gb * 1e9
