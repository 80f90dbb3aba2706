"""The training step of a model whose layers are updated during backward, one after another.

Stacked parameters and their optimizer state are rows in host or device memory, which
`colossax.offload` brings to the device layer by layer; what is in no layer stack is updated as in
the ordinary step. Losses, metrics and states are those of the ordinary step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.layerwise import Key, Stacks, alternates
from colossax.optim import DimsOptimizer, is_layerwise
from colossax.sharding import batch_axes
from colossax.step.donation import PartlyDonated
from colossax.step.gradients.accumulate import LossCall
from colossax.step.gradients.method import GradientMethod, Gradients
from colossax.step.gradients.streamed import (
    HOW,
    Job,
    gathered,
    given_gradients,
    known_gradients,
    known_norm,
)
from colossax.step.microbatches import Microbatches
from colossax.step.offloaded.parameter_groups import SHARED, Part, Update
from colossax.step.updaters import Updated, rounding_of
from colossax.typing import ParamInfo, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """Updates that are left to do once a step's program has ended.

    Attributes:
        grads: Of `Streaming.later`, stacks of all layers' gradients.
        update: What every update needs.
    """

    grads: dict[Key, list[Any]]
    update: Update


jax.tree_util.register_dataclass(Pending, ["grads", "update"], [])


@dataclasses.dataclass(frozen=True)
class _Owner:
    """The parameter that a leaf of the optimizer's state mirrors, or `SHARED`."""

    number: int


def check_streamable(bound: BoundPlan, infos: Any, learning: Any, optimizer: Any) -> None:
    """Refuse what cannot be updated layer by layer.

    Args:
        bound: Plan and devices.
        infos: Of all parameters.
        learning: Of those that learn, None elsewhere.
        optimizer: As it was given.

    Raises:
        PlanError: With the reason and a remedy.
    """
    segments = {info.segment for info in jax.tree.leaves(infos)} - {None}
    if not segments:
        raise PlanError(
            "plan.offload: the model has no layer stack, and only stacked layers can be moved one"
            " by one; build its repeated layers with colossax.nn.LayerStack, or drop the offload"
        )
    for segment in sorted(segments - {info.segment for info in jax.tree.leaves(learning)}):
        raise PlanError(
            f"plan.offload: no parameter in segment {segment[1]} of the layer stack"
            f" '{segment[0]}' learns; let the filter accept some, or drop the offload"
        )
    for info in jax.tree.leaves(learning):
        away = info.placement.optimizer_on_disk or info.placement.updated_by_cpu
        if away and info.update is not None:
            raise PlanError(
                f"plan.offload: '{info.path}' has an update of its own, and neither the CPU nor a"
                " layer whose state is on disk is updated by it; drop plan.offload.disk and"
                " plan.offload.cpu_update"
            )
    if isinstance(optimizer, Mapping):
        raise PlanError(
            "plan.offload: layers are updated one by one, and models with optimizers of their own"
            " are not; give all of them one optimizer of colossax.optim, or drop the offload"
        )
    if not is_layerwise(optimizer):
        raise PlanError(
            "plan.offload: layers are updated one by one, and this optimizer does not say that it"
            " can be; give one of colossax.optim, or mark your `dims -> transformation` with"
            " colossax.optim.layerwise"
        )
    cut = bound.plan.batch
    several = cut.accumulation > 1 or cut.microbatch is not None
    if cut.reduce_once and several and batch_axes(bound):
        raise PlanError(
            "plan.batch.reduce_once: whole gradients cannot be kept while layers are updated one"
            " by one; switch it off, as preset zero2 does"
        )


class Streaming:
    """How a step visits its parameters: the layers' in backward, all others afterwards."""

    def __init__(
        self,
        call: LossCall,
        bound: BoundPlan,
        infos: Any,
        trainable: Any,
        optimizer: DimsOptimizer,
        map_moments: Callable,
        clip_norm: float | None,
        method: GradientMethod | None = None,
    ):
        """Divide the parameters.

        Args:
            call: The loss.
            bound: Plan and devices.
            infos: Of all parameters.
            trainable: Tree of booleans.
            optimizer: For dims of any of them.
            map_moments: See `StateLayout.map_moments`.
            clip_norm: Global norm that gradients are scaled down to, or None.
            method: How all gradients are made before any layer is updated; None: layer by layer.
        """
        self.call = call
        self.bound = bound
        self.clip_norm = clip_norm
        self.method = method
        leaves, self._structure = jax.tree.flatten(infos)
        learns = jax.tree.leaves(trainable)
        owners = _owners(leaves, map_moments)

        def part(key: Key | None, bound: BoundPlan = bound) -> Part:
            return Part(key, leaves, learns, owners, bound, optimizer)

        self._part = part
        keys = dict.fromkeys(info.segment for info in leaves if info.segment is not None)
        for key in keys:
            # Of unequal counts the state would be wrong; equal ones are refused in the trace.
            stacked = (info for info in leaves if info.segment == key and info.stacked)
            if len({info.shape[0] for info in stacked}) > 1:
                raise alternates(key[0])
        self.parts = {key: part(key) for key in keys}
        self.rest = part(None)
        self._shared = [j for j, owner in enumerate(owners) if owner == SHARED]
        away = {j for each in self.parts.values() if each.on_disk for j in each.slots}
        self._present = [j for j in range(len(owners)) if j not in away]
        self._scaled = bound.plan.precision.scales_loss
        self.clipping = bound.plan.offload.clipping
        if self._scaled and self.clipping == "layer":
            raise PlanError(
                "plan.offload.clipping 'layer': that a gradient overflows float16 would be known"
                " when the layers above it have moved; give stack, or compute in bfloat16"
            )
        if clip_norm is None and not self._scaled:
            self.clipping = "none"
        if method is not None:
            self.clipping = "known"
        if self.later:
            self.clipping = self._clipping_of_kept(self.clipping)

    @staticmethod
    def _clipping_of_kept(wanted: str) -> str:
        """How gradients are clipped that are kept anyway."""
        if wanted == "layer":
            raise PlanError(
                "plan.offload.clipping 'layer': layers on disk, or that the CPU updates, are"
                " updated after backward, from gradients that are kept; give clipping stack"
            )
        return "stack"

    @property
    def on_disk(self) -> dict[Key, Part]:
        """The parts whose optimizer state is in a file."""
        return {key: part for key, part in self.parts.items() if part.on_disk}

    @property
    def on_cpu(self) -> dict[Key, Part]:
        """The parts that the CPU updates."""
        return {key: part for key, part in self.parts.items() if part.on_cpu}

    @property
    def beside_cpu(self) -> dict[Key, Part]:
        """The parts that devices update meanwhile: those of the others that take long."""
        away = {**self.on_disk, **self.on_cpu}
        return {
            key: part
            for key, part in self.parts.items()
            if self.on_cpu and part.state_on_host and key not in away
        }

    @property
    def later(self) -> dict[Key, Part]:
        """The parts that are updated once a step's program has ended."""
        return {**self.on_disk, **self.on_cpu, **self.beside_cpu}

    def parts_for(self, keys: Iterable[Key], bound: BoundPlan) -> dict[Key, Part]:
        """These parts, as updated on other devices than the step's."""
        return {key: self._part(key, bound) for key in keys}

    # Between the state's trees and the parts' lists

    def stacks(self, params: Any, opt_state: Any) -> dict[Key, Stacks]:
        """Of every run: its trained parameters and their optimizer state."""
        leaves, moments = jax.tree.leaves(params), self.moments(opt_state)

        def state(part: Part) -> list[Any] | None:
            return None if part.on_disk else [moments[j] for j in part.slots]

        return {
            key: Stacks(params=[leaves[i] for i in part.trained], state=state(part))
            for key, part in self.parts.items()
        }

    def with_stacks(self, state: TrainState, changed: dict[Key, Stacks]) -> TrainState:
        """The state with parameters and optimizer state of these runs."""
        leaves, structure = jax.tree.flatten(state["params"])
        moments = self.moments(state["opt_state"])
        for key, stacks in changed.items():
            for i, stack in zip(self.parts[key].trained, stacks.params, strict=True):
                leaves[i] = stack
            moments.update(zip(self.parts[key].slots, stacks.state, strict=True))
        opt_leaves = [moments[j] for j in self._present]
        return {
            **state,
            "params": jax.tree.unflatten(structure, leaves),
            "opt_state": jax.tree.unflatten(jax.tree.structure(state["opt_state"]), opt_leaves),
        }

    def of_stacks(self, state: TrainState) -> TrainState:
        """Of each leaf of the state, whether it is trained, or optimizer state, of a layer."""
        nothing = jax.tree.map(lambda _: False, state)
        stacks = self.stacks(state["params"], state["opt_state"])
        return self.with_stacks(nothing, jax.tree.map(lambda _: True, stacks))

    def pending_shardings(self, replicated: NamedSharding) -> Pending | None:
        """Where what is left to do lies; None where nothing is.

        Args:
            replicated: Of what every device has.
        """
        if not self.later:
            return None
        shared = [replicated for _ in self._shared]
        scale = replicated if self._scaled or self.clip_norm is not None else None
        rounding = replicated if self.bound.plan.precision.rounding == "stochastic" else None
        return Pending(
            grads={key: part.gradient_shardings() for key, part in self.later.items()},
            update=Update(shared=shared, scale=scale, ok=replicated, rounding=rounding),
        )

    def moments(self, opt_state: Any) -> dict[int, Any]:
        """Leaves of the optimizer's state by number; those on disk are not there."""
        return dict(zip(self._present, jax.tree.leaves(opt_state), strict=True))

    def params(self, old: Any, stacks: dict[Key, Stacks], rest: list[Array]) -> Any:
        """The tree of all parameters with these in it."""
        leaves = jax.tree.leaves(old)
        for part, values in self._values(stacks, rest, "params"):
            for i, value in zip(part.trained, values, strict=True):
                leaves[i] = value
        return jax.tree.unflatten(self._structure, leaves)

    def opt_state(
        self, old: Any, stacks: dict[Key, Stacks], rest: list[Array], shared: list[Array]
    ) -> Any:
        """The optimizer's state with these in it."""
        moments = self.moments(old)
        for part, values in self._values(stacks, rest, "state"):
            moments.update(zip(part.slots, values or (), strict=values is not None))
        moments.update(zip(self._shared, shared, strict=True))
        return jax.tree.unflatten(jax.tree.structure(old), [moments[j] for j in self._present])

    def _values(self, stacks: dict[Key, Stacks], rest: list[Array], field: str) -> Any:
        yield self.rest, rest
        for key, part in self.parts.items():
            yield part, getattr(stacks[key], field)

    def init_state(self, params: Any, shardings: Any) -> Any:
        """Optimizer state, each array made where it lives.

        Args:
            params: Parameters, laid out by the plan.
            shardings: Of the optimizer's state.
        """
        where = self.moments(shardings)
        state: dict[int, Array] = {}
        jobs: list[tuple[list[int], Callable]] = [
            (self.rest.slots, self.rest.init),
            (self._shared, self.rest.init_shared),
        ]
        for part in self.parts.values():
            if part.on_disk:
                continue
            slot_shardings = [where[j] for j in part.slots]
            jobs.append((part.slots, functools.partial(part.init_stacks, slot_shardings)))
        for slots, make in jobs:
            leaves = jax.jit(make, out_shardings=[where[j] for j in slots])() if slots else []
            state.update(zip(slots, leaves, strict=True))
        return jax.tree.unflatten(jax.tree.structure(shardings), [state[j] for j in self._present])

    # A step

    def jitted(self, pure: Callable, shardings: TrainState, **options: Any) -> Any:
        """`pure` compiled, its old state given up."""
        if self.clipping != "speculate":
            return jax.jit(pure, donate_argnums=0, **options)
        return PartlyDonated(pure, self.of_stacks(shardings), **options)

    def update(self, state: TrainState, micro: Microbatches) -> Updated:
        """New parameters and optimizer state, and what is left to do for `later`."""
        job = Job(self, state["params"], state["variables"], micro)
        stacks = self.stacks(state["params"], state["opt_state"])
        how = HOW[self.clipping]
        known = how in (known_norm, known_gradients)
        return self._applied(state, how(job, stacks, self._update(state)), known=known)

    def updated(self, state: TrainState, gradients: Gradients) -> Updated:
        """Likewise, of gradients that are there; see `given_gradients`."""
        stacks = self.stacks(state["params"], state["opt_state"])
        return self._applied(state, given_gradients(self, stacks, gradients), known=True)

    def _update(self, state: TrainState, scale: Any = None, ok: Any = True) -> Update:
        moments = self.moments(state["opt_state"])
        shared = [moments[j] for j in self._shared]
        rounding = rounding_of(self.bound, state)
        return Update(shared=shared, scale=scale, ok=ok, rounding=rounding)

    def _applied(self, state: TrainState, found: Any, *, known: bool) -> Updated:
        """What gradients make of the state; of layers too, if theirs are known."""
        params, opt_state = state["params"], state["opt_state"]
        stacks, gradients, scale, ok = found
        moments, leaves = self.moments(opt_state), jax.tree.leaves(params)
        update = self._update(state, scale, ok)
        moved, rest_state, new_shared = self.rest.update(
            [leaves[i] for i in self.rest.trained],
            [moments[j] for j in self.rest.slots],
            gradients.grads,
            update,
        )
        if known:
            # Only then: or the others' gradients are there while layers' states come and go.
            moved, rest_state, update = jax.lax.optimization_barrier((moved, rest_state, update))
            stacks = {
                key: stacks[key] if key in self.later else part.visit_all(stacks[key], update)
                for key, part in self.parts.items()
            }
        pending = None
        if self.later:
            grads = {key: stacks[key].grads for key in self.later}
            pending = Pending(grads=grads, update=update)
        return Updated(
            params=self.params(params, stacks, moved),
            opt_state=self.opt_state(opt_state, stacks, rest_state, new_shared),
            gradients=gradients,
            finite=ok,
            pending=pending,
        )

    def gradients(self, params: Any, variables: Any, micro: Microbatches) -> Gradients:
        """Gradients of the whole batch, all of them kept; see `GradientMethod`."""
        if self.method is not None:
            return self.method(params, variables, micro)
        leaves = jax.tree.leaves(params)
        stacks = {
            key: Stacks(params=[leaves[i] for i in part.trained])
            for key, part in self.parts.items()
        }
        stacks, gradients = gathered(Job(self, params, variables, micro), stacks)
        grads: list[Any] = [None] * self._structure.num_leaves
        for part, values in self._values(stacks, gradients.grads, "grads"):
            for i, value in zip(part.trained, values, strict=True):
                grads[i] = value
        return dataclasses.replace(gradients, grads=jax.tree.unflatten(self._structure, grads))


def _owners(infos: Sequence[ParamInfo], map_moments: Callable) -> list[int]:
    """Number of the parameter that each leaf of the optimizer's state mirrors, or `SHARED`."""
    numbers = {(info.path, info.first_layer): i for i, info in enumerate(infos)}
    marks = map_moments(
        lambda leaf, info: _Owner(numbers[info.path, info.first_layer]),
        lambda leaf: _Owner(SHARED),
        on_disk=True,
    )
    leaves = jax.tree.leaves(marks, is_leaf=lambda leaf: isinstance(leaf, _Owner))
    return [mark.number for mark in leaves]
