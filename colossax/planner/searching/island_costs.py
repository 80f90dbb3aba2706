"""What a stage's devices in one island take of a model's layers, and hold of them."""

import dataclasses
import functools
import math

from colossax.planner.searching.memory import working
from colossax.planner.searching.predicting import OnMesh
from colossax.planner.searching.seconds import Seconds
from colossax.planner.searching.sends import Tokens, tokens_sent


class OnIsland(OnMesh):
    """A stage's devices in one island: what it takes of a layer, and of what stands beside them."""

    def of_layer(self, names: frozenset[str], tokens: Tokens) -> Seconds:
        """One layer of a microbatch, weights gathered and gradients summed."""
        compute = self.compute(0, names, tokens)
        calls, weights = self.profile.kinds[0].calls, self._weights
        waited, beside = self._seconds((*weights.gathered, *weights.summed))
        return Seconds(
            compute=compute,
            waited=self.layer_seconds(0, names, tokens) - compute + waited / calls,
            beside=beside / calls,
            hiding=self.rates.hiding,
            slowing=self.rates.slowing,
        )

    def of_ends(self, tokens: Tokens) -> Seconds:
        """What stands before and behind the layers."""
        _, sent = tokens_sent(self.profile, self.parts, self._widths, tokens, [[]])
        weights = self._weights
        waited, beside = self._seconds((*sent, *weights.outside, *weights.outside_summed))
        return Seconds(
            compute=self.ends(tokens),
            waited=waited,
            beside=beside,
            hiding=self.rates.hiding,
            slowing=self.rates.slowing,
        )

    def update_s(self, share: float, microbatches: int) -> float:
        """Of a step: updates, and sums of gradients, of so large a share of all layers."""
        return share * self._memory(microbatches)

    @functools.cached_property
    def held(self) -> "Held":
        """Bytes of states and gradients."""
        return _held(self)

    def working(self, tokens: Tokens, chunks: int, *, last: bool) -> float:
        """Bytes that a layer is computed with; of the last stage, or the loss."""
        layer, loss = working(self.stored, self.tensor, tokens, chunks)
        return max(layer, loss) if last else layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of a device, by what they are of: `states` parameters and moments, `sums` gradients.

    Attributes:
        layer: Of each layer.
        ends: Before the first layer, and behind the last.
    """

    layer: tuple[float, float]
    ends: tuple[tuple[float, float], tuple[float, float]]


def _held(mesh: OnMesh) -> Held:
    profile, parts = mesh.profile, mesh.parts
    precision = parts.bound.plan.precision
    found = {"layer": [0.0, 0.0], "first": [0.0, 0.0], "last": [0.0, 0.0]}
    tables = [info for info in profile.infos if "vocab" in info.dims]
    for info, moment, learns in zip(profile.infos, profile.moments, profile.learns, strict=True):
        numbers = math.prod(info.shape)
        of = {role: parts.size(parts.axes(role, info.dims, info.shape)) for role in _ROLES}
        at_rest = numbers * info.at_rest(precision.params).itemsize / of["params"]
        summed = learns * numbers * _itemsize(precision.accumulation) / of["gradients"]
        states = at_rest + numbers * moment / of["optimizer"]
        place = "last" if info.behind else "first"
        place = "layer" if info.total_layers is not None else place
        found[place][0] += states
        found[place][1] += summed
        if len(tables) == 1 and info is tables[0]:  # the head is sent what the first stage has
            found["last"][0] += at_rest
            found["last"][1] += summed
    layers = profile.kinds[0].calls
    layer = (found["layer"][0] / layers, found["layer"][1] / layers)
    first, last = ((found[at][0], found[at][1]) for at in ("first", "last"))
    return Held(layer=layer, ends=(first, last))


_ROLES = ("params", "optimizer", "gradients")


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2}[dtype]
