"""What a plan needs and takes, by formula alone."""

import dataclasses
from collections.abc import Sequence

from colossax.aot import Target
from colossax.config import SAVEABLE, MeshAxis, Plan
from colossax.errors import PlanError
from colossax.planner.counting.flops import peak_flops
from colossax.planner.profiling import LayerKind, ModelProfile
from colossax.planner.searching.memory import Bytes, Stored, bytes_of, kept_bytes, stored
from colossax.planner.searching.parts import Choices, Parts, abstract
from colossax.planner.searching.seconds import MATMULS, PAIRS, Seconds, collectives_seconds
from colossax.planner.searching.sends import (
    Sent,
    Tokens,
    layer_sent,
    states_sent,
    tokens_sent,
    weights_sent,
    widths,
)
from colossax.sharding import activation_axes, batch_axes, seq_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one plan on one target.

    Attributes:
        bytes: Of a device.
        seconds: Of a step.
        sent: In a microbatch.
        sent_once: In a step, beside.
        microbatches: A step.
    """

    bytes: Bytes
    seconds: Seconds
    sent: tuple[Sent, ...]
    sent_once: tuple[Sent, ...]
    microbatches: int


Policies = Sequence[Sequence[tuple[int, frozenset[str]]]]
"""Of each kind of layer, how many keep which names."""


class OnMesh:
    """A model on a mesh: what all batches and policies share.

    Attributes:
        parts: Plan and mesh.
        rows: Of a global batch, on each group of devices that share rows.
    """

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        target: Target,
        choices: Choices | None = None,
    ):
        """Raises:
        PlanError: The mesh does not divide the model or its batch.
        """
        self.profile, self.target = profile, target
        self.parts = Parts(abstract(plan, target.size), choices)
        bound = self.parts.bound
        ways, along = self.parts.size(tuple(batch_axes(bound))), self.parts.size(seq_axes(bound))
        self.rows, rest = divmod(profile.rows, ways)
        if rest or not self.rows:
            raise PlanError(f"{profile.rows} rows cannot be shared by {ways} groups of devices")
        if profile.tokens % along:
            raise PlanError(f"{profile.tokens} tokens cannot be shared by {along} devices")
        self.stored: Stored = stored(profile, self.parts)
        self._along = along
        self._tensor = self.parts.size((MeshAxis.TENSOR.value,))
        self._splits = MeshAxis.TENSOR.value in activation_axes(bound, "seq:residual")
        self._by_microbatch = weights_sent(profile, self.parts)
        self._by_step = states_sent(profile, self.parts)
        self._peak = peak_of(target, bound.plan)
        self._widths = [widths(profile, self.parts, kind) for kind in profile.kinds]
        self._flops = [self._of_maps(kind) for kind in profile.kinds]
        self._compute: dict[tuple[int, frozenset[str]], float] = {}
        self._waited: dict[tuple[int, frozenset[str]], float] = {}

    def tokens(self, rows: int) -> Tokens:
        """Of a microbatch of so many rows of each device."""
        inside = rows * self.profile.tokens / self._along
        held = inside / (self._tensor if self._splits else 1)
        return Tokens(inside=inside, held=held)

    def kept(self, number: int, names: frozenset[str], tokens: Tokens) -> float:
        """Bytes that one call of a kind of layer keeps under a policy."""
        kind = self.profile.kinds[number]
        return kept_bytes(kind, names, self._tensor, tokens, self.profile.tokens)

    def compute(self, number: int, names: frozenset[str], tokens: Tokens) -> float:
        """Seconds of one call of a kind of layer, forward and backward."""
        key = (number, names)
        if key not in self._compute:
            self._compute[key] = self._of_a_row(number, names)
        return self._compute[key] * tokens.inside / self.profile.tokens

    def _of_a_row(self, number: int, names: frozenset[str]) -> float:
        """Seconds of one call for the tokens that were traced."""
        kind = self.profile.kinds[number]
        again, share = kind.traced.again[names]
        once, flops = self._flops[number]
        maps = once + sum(flops[at] for at in again)
        pairs = self.profile.pair_flops / sum(one.calls for one in self.profile.kinds)
        # Backward of attention computes scores anew: five products where forward has two.
        passes = 3.5 + (names in kind.traced.opaque or share > 0)
        return maps / (MATMULS * self._peak) + passes * pairs / self._tensor / (PAIRS * self._peak)

    def layer_seconds(self, number: int, names: frozenset[str], tokens: Tokens) -> float:
        """Of one call of a kind of layer, with what its matmuls wait for."""
        key = (number, names)
        if key not in self._waited:
            kind, one_row = self.profile.kinds[number], self.tokens(1)
            given = self.profile, self.parts, kind, self._widths[number], one_row, names
            waited, _ = collectives_seconds(self.target, self.parts, layer_sent(*given))
            self._waited[key] = waited / one_row.inside
        return self.compute(number, names, tokens) + self._waited[key] * tokens.inside

    def ends(self, tokens: Tokens) -> float:
        """Seconds of what stands beside the layers."""
        flops = (
            self.profile.ends_passes
            * self.profile.ends_flops
            / self._tensor
            * tokens.inside
            / self.profile.tokens
        )
        return flops / (MATMULS * self._peak)

    def bytes(self, rows: int, kept: float, vocab_chunks: int) -> Bytes:
        """Of a device, with what layers keep."""
        tokens, several = self.tokens(rows), rows < self.rows
        return bytes_of(self.stored, self._tensor, tokens, kept, vocab_chunks, several=several)

    def predicted(self, rows: int, policies: Policies, vocab_chunks: int) -> Prediction:
        """Of microbatches of so many rows, with layers of each kind under these policies."""
        tokens, microbatches = self.tokens(rows), self.rows // rows
        kept, compute = self.profile.kept * tokens.inside / self.profile.tokens, 0.0
        for number, runs in enumerate(policies):
            for count, names in runs:
                kept += count * self.kept(number, names, tokens)
                compute += count * self.compute(number, names, tokens)
        sent = (
            *self._by_microbatch,
            *tokens_sent(self.profile, self.parts, self._widths, tokens, policies),
        )
        found = collectives_seconds(self.target, self.parts, sent)
        once = collectives_seconds(self.target, self.parts, self._by_step)
        waited, beside = (microbatches * each + one for each, one in zip(found, once, strict=True))
        return Prediction(
            bytes=self.bytes(rows, kept, vocab_chunks),
            seconds=Seconds(
                compute=microbatches * (compute + self.ends(tokens)), waited=waited, beside=beside
            ),
            sent=sent,
            sent_once=self._by_step,
            microbatches=microbatches,
        )

    def _of_maps(self, kind: LayerKind) -> tuple[float, list[float]]:
        """A device's FLOPs of a call's maps, forward and backward, and forward alone of each."""
        flops, total = [], 0.0
        for one in kind.traced.maps:
            info = self.profile.infos[kind.leaves[one.leaf]]
            axes = self.parts.axes("weights", info.dims, info.shape)
            # Devices that hold the same tokens share it.
            part = self.parts.size([axis for axis in axes if axis not in self.parts.split])
            flops.append(one.flops / part)
            total += (2 + self.profile.learns[kind.leaves[one.leaf]]) * flops[-1]
        return total, flops


def peak_of(target: Target, plan: Plan) -> float:
    """FLOP/s of a device.

    Raises:
        PlanError: It is not known, or the plan is in float8.
    """
    if plan.precision.multiplies_in == "float8":
        raise PlanError(
            "plan.precision: what float8 makes of a step's time the formulas do not know yet; leave"
            " it out here, and count the plan with colossax inspect"
        )
    peak = peak_flops(target.gpu.name, plan.precision.compute)
    if peak is None:
        raise PlanError(
            f"target '{target.name}': how fast a {target.gpu.name} is, is not known; give another"
        )
    return peak


def predict(profile: ModelProfile, plan: Plan, target: Target) -> Prediction:
    """Of a plan as it is.

    Raises:
        PlanError: Its mesh does not divide the model or its batch.
    """
    mesh = OnMesh(profile, plan, target)
    batch = plan.batch
    rows = batch.microbatch or mesh.rows // batch.accumulation
    calls = [kind.calls for kind in profile.kinds]
    policies = [[(count, names_of(plan))] for count in calls]
    if len(calls) == 1 and len(plan.segments) > 1:
        given = [(one.count, names_of(plan, at)) for at, one in enumerate(plan.segments)]
        left = calls[0] - sum(count for count, _ in given if count > 0)
        policies = [[(left if count == -1 else count, names) for count, names in given]]
    return mesh.predicted(rows, policies, plan.loss.vocab_chunks)


def names_of(plan: Plan, segment: int = 0) -> frozenset[str]:
    """What a segment keeps on the device; `none` counts as all that has a name."""
    remat = plan.segments[segment].remat
    return frozenset(SAVEABLE if remat in ("none", "dots") else remat.split("+")) - {"full"}
