"""Where tokens and experts of a mixture lie, and what each device does with which, by a plan."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.sharding.expert_group import expert_group
from colossax.sharding.experts.overlap import best_chunks
from colossax.sharding.experts.placement import Placement, placement_of
from colossax.sharding.matmul.splits import Axes, Split, axes_of, check_nested, split_of
from colossax.sharding.ops import reduction_dtype
from colossax.sharding.rules import resolve
from colossax.typing import Dims

_SPARED = 16
"""As many as blocks of an exchange within a node commonly take; not measured."""

SENDING = ("passes", "capacity", "ragged")
"""Dispatches that send rows in buffers."""

_ROUNDED_TO = 8
"""Slots are a multiple of it: rows of whole tiles of a copy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSplits:
    """Of one array of all experts.

    Attributes:
        rest: As it is kept.
        held: As it is multiplied: experts over the group, hidden features over `tensor`.
        grad: Where its gradient is wanted.
    """

    rest: Split
    held: Split
    grad: Split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What is known of a mixture's layer before it is traced.

    Attributes:
        bound: The plan and its devices; None: one device.
        way: A dispatch of `ExpertsConfig`, decided.
        group: Mesh axes over which the experts are split.
        tokens: Mesh axes that split the batch and the sequence of the input.
        sliced: Axes along which tokens lie whole, and of which each device sends its part.
        features: Axes that split the experts' hidden features.
        weights: Splits of each array of the experts, by name.
        experts: How many are computed: with a placement, replicas too.
        choices: Of a token, at most.
        here: Tokens that a device sends, or of which it does the part of its experts.
        slots: Of a buffer, for each device.
        passes: Most passes that any routing takes.
        summed: Dtype in which devices sum the gradients of the experts.
        chunks: In how many passes a balanced load is sent, at most.
        hierarchical: Whether rows travel along the inner axes of the group first.
        placement: Which device computes which experts, where not those that rest there.
    """

    bound: BoundPlan | None
    way: str
    group: Axes
    tokens: tuple[Axes, Axes]
    sliced: Axes
    features: Axes
    weights: Mapping[str, WeightSplits]
    experts: int
    choices: int
    here: int
    slots: int
    passes: int
    summed: jnp.dtype
    chunks: int = 1
    hierarchical: bool = False
    placement: Placement | None = None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash(
            tuple(tuple(f.items()) if isinstance(f, Mapping) else f for f in fields)  # asked often
        )

    @property
    def sends(self) -> bool:
        """Whether rows go from device to device in buffers."""
        return self.way in SENDING

    @property
    def pipelined(self) -> bool:
        """Whether a pass is sent while another is computed."""
        return self.chunks > 1 and self.passes > 1

    @property
    def spared(self) -> int:
        """Multiprocessors that matmuls leave to exchanges, where these run beside them.

        The kernels' blocks stay until all is done: a pass could not be sent before.
        """
        return _SPARED if self.pipelined else 0

    @property
    def destinations(self) -> int:
        """Devices for which a buffer has slots."""
        return self.size(self.group) if self.sends else 1

    @property
    def experts_here(self) -> int:
        """Experts of a device."""
        return self.experts // self.size(self.group)

    @property
    def gathered(self) -> Axes:
        """Axes whose tokens are brought together before anything is computed."""
        own = axes_of(self.tokens)
        return () if self.sends else tuple(axis for axis in self._apart if axis in own)

    @property
    def partial(self) -> Axes:
        """Axes over which what a device returns for the tokens it has is one part of a sum."""
        if self.sends:
            return ()
        own = axes_of(self.tokens)
        return tuple(axis for axis in self._apart if axis not in own)

    @property
    def gradient_axes(self) -> Axes:
        """Axes whose devices hold the same experts and have seen different tokens."""
        seen = tuple(dict.fromkeys((*axes_of(self.tokens), *self.sliced)))
        return tuple(axis for axis in seen if axis not in self._apart)

    @property
    def _apart(self) -> Axes:
        """Axes whose devices hold other parts of the experts."""
        return (*self.group, *self.features)

    def size(self, axes: Axes) -> int:
        """Devices along these axes."""
        return 1 if self.bound is None else self.bound.size(axes)


@functools.lru_cache(maxsize=256)
def layout_of(
    bound: BoundPlan | None,
    tokens: tuple[int, int, int],
    choices: int,
    expected: float,
    shapes: tuple[tuple[str, tuple[int, ...], Dims], ...],
    compute: jnp.dtype,
    *,
    sends: bool = True,
) -> Layout:
    """The layout of a layer.

    Args:
        bound: The plan in force.
        tokens: `[b, s, d]` of the input.
        choices: Of a token, at most.
        expected: Of a token, on average.
        shapes: Name, shape and dims of each array of the experts.
        compute: Dtype of the input.
        sends: Whether rows may go from device to device in buffers, as the plan asks.

    Raises:
        PlanError: A tensor layout other than 1d, or sizes that its devices do not divide.
    """
    experts = shapes[0][1][0]
    if bound is None or bound.single:
        here = tokens[0] * tokens[1]
        return Layout(
            bound=None,
            way="weights",
            group=(),
            tokens=((), ()),
            sliced=(),
            features=(),
            weights={
                name: WeightSplits(rest=empty, held=empty, grad=empty)
                for name, shape, _ in shapes
                for empty in (((),) * len(shape),)
            },
            experts=experts,
            choices=choices,
            here=here,
            slots=here * min(choices, experts),
            passes=1,
            summed=reduction_dtype(bound, compute),
        )
    if bound.plan.tensor_layout != "1d":
        raise PlanError(
            f"plan.tensor_layout '{bound.plan.tensor_layout}': experts are not split by rows and"
            " columns; give tensor_layout 1d, and the devices to mesh axes expert and tensor"
        )
    return _on_devices(bound, tokens, choices, expected, shapes, compute, sends)


def _on_devices(bound, tokens, choices, expected, shapes, compute, sends) -> Layout:
    experts = shapes[0][1][0]
    dims: Dims = ("batch", "seq:residual", "embed")
    spec = split_of(resolve(bound, "activations", dims, tokens, name="input of experts"))
    own = (spec[0], spec[1])
    group = expert_group(bound, experts)
    weights = {name: _splits(bound, group, name, shape, dims) for name, shape, dims in shapes}
    features = tuple(
        dict.fromkeys(
            axis
            for name, _, dims in shapes
            for dim, axes in zip(dims, weights[name].held, strict=True)
            if dim == "expert_mlp"
            for axis in axes
        )
    )
    way, asked = _way(bound, group, axes_of(own), choices), bound.plan.experts.placement
    if not sends:
        way, asked = "gather" if group else "weights", None
    if way == "ragged":
        _check_ragged(bound, features)
    sends = way in SENDING
    apart = (*group, *features)
    sliced = tuple(axis for axis in apart if sends and axis not in axes_of(own))
    here = tokens[0] * tokens[1] // bound.size(axes_of(own))
    if sends:
        here = math.ceil(here / bound.size(sliced))
    else:
        here *= bound.size(tuple(axis for axis in apart if axis in axes_of(own)))
    placement = placement_of(asked, experts, group, bound.size(group))
    computed = experts if placement is None else placement.slots
    each = computed // bound.size(group)
    worst, balanced = here * min(choices, each), here * expected / bound.size(group)
    chunks = _chunks(bound, way, group, here * expected, shapes, compute)
    slots, passes = _slots(bound, way, worst, balanced, chunks)
    return Layout(
        bound=bound,
        way=way,
        group=group,
        tokens=own,
        sliced=sliced,
        features=features,
        weights=weights,
        experts=computed,
        choices=choices,
        here=here,
        slots=slots,
        passes=passes,
        summed=reduction_dtype(bound, compute),
        chunks=chunks,
        hierarchical=sends and _hierarchical(bound, group),
        placement=placement,
    )


def _way(bound: BoundPlan, group: Axes, own: Axes, choices: int) -> str:
    asked = bound.plan.experts.dispatch
    if not group:
        return "weights"
    if asked != "auto":
        return asked
    together = not any(axis in own for axis in group)
    return "gather" if together or bound.size(group) <= choices else "passes"


def _check_ragged(bound: BoundPlan, features: Axes) -> None:
    if bound.mesh.devices.flat[0].platform == "cpu":
        raise PlanError(
            "plan.experts.dispatch 'ragged': CPUs have no exchange of unequal parts; give 'passes',"
            " which sends the same rows in buffers"
        )
    if features:
        raise PlanError(
            f"plan.experts.dispatch 'ragged': hidden features of experts are split over"
            f" {','.join(features)}; give experts.group that axis too, or dispatch 'passes'"
        )


def _slots(bound: BoundPlan, way: str, worst: int, balanced: float, chunks: int) -> tuple[int, int]:
    """Slots for a device, and the most passes that takes."""
    if way == "weights":
        return worst, 1

    def rounded(rows: float) -> int:
        return min(max(math.ceil(rows / _ROUNDED_TO) * _ROUNDED_TO, 1), worst)

    whole = rounded(balanced * bound.plan.experts.capacity)
    slots = rounded(whole / chunks)
    return slots, math.ceil((whole if way == "capacity" else worst) / slots)


def _chunks(
    bound: BoundPlan, way: str, group: Axes, rows: float, shapes: tuple, compute: jnp.dtype
) -> int:
    """In how many parts a buffer is sent.

    Args:
        bound: The plan in force.
        way: A dispatch, decided.
        group: Axes of the experts.
        rows: That a device sends and gets where loads are balanced.
        shapes: Name, shape and dims of each array of the experts.
        compute: Dtype of the rows.
    """
    asked = bound.plan.experts
    if way not in SENDING:
        return 1
    if asked.chunks != "auto":
        return int(asked.chunks)
    if asked.rates is None:
        raise PlanError(
            "plan.experts.chunks 'auto': is decided by experts.rates, which are not known; give"
            " them, settle the plan with colossax.planner.settle, or give a number of chunks"
        )
    matrices = [(shape, dims) for _, shape, dims in shapes if len(shape) == 3]
    shape, dims = matrices[0]
    devices = bound.size(group)
    sent = rows * shape[dims.index("expert_embed")] * compute.itemsize * (devices - 1) / devices
    flops = 2 * rows * sum(math.prod(shape[1:]) for shape, _ in matrices)
    return best_chunks(asked.rates, sent, flops)


def _hierarchical(bound: BoundPlan, group: Axes) -> bool:
    """Whether rows travel axis by axis, which takes several."""
    if not bound.plan.experts.hierarchical:
        return False
    if len(group) < 2:
        raise PlanError(
            f"plan.experts.hierarchical: experts are split over {','.join(group)} alone, and rows"
            " travel along inner axes and an outer one; give experts.group two axes or more, or"
            " leave hierarchical out"
        )
    return True


def _splits(
    bound: BoundPlan, group: Axes, name: str, shape: tuple[int, ...], dims: Dims
) -> WeightSplits:
    rest, grad = (
        split_of(resolve(bound, role, dims, shape, name=f"experts {name}"))
        for role in ("params", "gradients")
    )
    held = tuple(
        group
        if dim == "experts"
        else tuple(axis for axis in axes if axis == "tensor")
        if dim == "expert_mlp"
        else ()
        for dim, axes in zip(dims, rest, strict=True)
    )
    for other in (rest, grad):
        check_nested(other, held, name=f"experts {name}")
    return WeightSplits(rest=rest, held=held, grad=grad)
