"""The part of a step that one stage runs: its own layers, and what stands before or behind them."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.inference.cache import Cache, Specs
from colossax.inference.decode import decoding_model
from colossax.inference.engine.batch import EngineState, StepShape
from colossax.inference.engine.step import step
from colossax.inference.reading import reads_of
from colossax.layerwise import LayerRun, Scanned, running
from colossax.nn import CacheSpec, ModelSpec

ONLY = ""
"""The kind of layers that are all alike, as stacks name it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Which runs of a layer stack a stage has.

    Attributes:
        number: Of the stage.
        stages: How many there are.
        homes: Of each run of the stack, the stage that has it.
        first_rows: Of each run of this stage, how many layers of its kind the stages before have.
        layers: By kind, how many this stage has.
    """

    number: int
    stages: int
    homes: tuple[int, ...]
    first_rows: Mapping[int, int]
    layers: Mapping[str, int]

    @property
    def is_first(self) -> bool:
        """Whether tokens are looked up here."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether tokens are chosen here."""
        return self.number == self.stages - 1

    def cache(self, specs: Specs) -> Specs:
        """What of a model's cache is kept here."""
        if isinstance(specs, Mapping):
            return {kind: _cut(specs[kind], count) for kind, count in self.layers.items()}
        return _cut(specs, self.layers[ONLY])


def check_staged(spec: ModelSpec, bound: BoundPlan) -> None:
    """Refuse models and plans of which no stage of an engine can have a part; one stage is none.

    Raises:
        PlanError: Naming what stands against it.
    """
    model = decoding_model(spec)
    problem = _problem(model, bound) if bound.mesh.shape[MeshAxis.STAGE] > 1 else None
    if problem is not None:
        raise PlanError(
            f"mesh axis 'stage': {problem}, so the stages of an engine cannot each have layers of"
            " their own; give those devices to 'tensor' or 'fsdp'"
        )


def _problem(model: Any, bound: BoundPlan) -> str | None:
    if not bound.stage_programs:
        return (
            "the plan has one program for all stages (load the model with unroll=True, or give"
            " plan.pipeline.cuts)"
        )
    if reads_of(model).anything:
        return "the model reads a source, sound or images before its tokens"
    if len(getattr(model, "stacks", {})) != 1:
        return "the model's layers are not one layer stack"
    mixture = getattr(model.config, "mixture", None)
    if mixture is not None and mixture.gate == "hash":
        return "experts are chosen by token ids, which the first stage alone has"
    (stack,) = model.stacks.values()
    if any(len(stretch.group) > 1 for stretch in stack.stretches):
        return "layers of several kinds take turns in one run (load the model with unroll=True)"
    asked = model.cache_spec(seats=1, slots=2)
    for one in asked.values() if isinstance(asked, Mapping) else (asked,):
        if any(array.dims[0] != "layers" for array in one.arrays.values()):
            return "the cache has no dim of layers in front"
    return None


def layouts_of(spec: ModelSpec, bound: BoundPlan) -> list[StageLayout]:
    """What each stage has of a model that `check_staged` lets pass."""
    (stack,) = decoding_model(spec).stacks.values()
    ends = list(itertools.accumulate(bound.plan.pipeline.cuts or ()))
    stages = bound.mesh.shape[MeshAxis.STAGE]
    homes = tuple(
        next(at for at, end in enumerate(ends) if stretch.first < end)
        for stretch in stack.stretches
    )
    found = []
    for number in range(stages):
        first_rows: dict[int, int] = {}
        layers: dict[str, int] = {}
        begun: dict[str, int] = {}
        for at, stretch in enumerate(stack.stretches):
            if homes[at] == number:
                kind = stretch.group[0][0]
                first_rows[at] = begun.setdefault(kind, stretch.first_row(kind))
                layers[kind] = layers.get(kind, 0) + stretch.count
        found.append(
            StageLayout(
                number=number, stages=stages, homes=homes, first_rows=first_rows, layers=layers
            )
        )
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StageState:
    """What a stage gives up and gives back.

    Attributes:
        cache: Of its layers, in pages.
        said: As of `EngineState`; None but for the first stage and the last.
        after: On the first stage, the place in `said` of the token that each seat is given by the
            step before, `[seats]` int32; behind all others where it is given none.
    """

    cache: Cache
    said: Any = None
    after: Any = None


class _Part:
    """Runs the layers of one stage, and hands what comes on past all others."""

    def __init__(self, layout: StageLayout, entering: Any):
        self._layout, self._entering = layout, entering
        self.carry: Any = None

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`."""
        at = layers.key[1]
        if self._layout.homes[at] != self._layout.number:
            return carry, scanned, carried, {}
        if self.carry is None and not self._layout.is_first:
            carry = self._entering
        here = dataclasses.replace(layers, first_row=layers.first_row - self._layout.first_rows[at])
        carry, scanned, carried, _ = Scanned().run(here, params, carry, side, scanned, carried)
        self.carry = carry
        return carry, scanned, carried, {}


def part(
    spec: ModelSpec,
    bound: BoundPlan,
    shape: StepShape,
    slots: int,
    layout: StageLayout,
    places: Sequence[int],
    params: Sequence[Any],
    state: StageState,
    entering: Any,
    packed: Int[Array, " n"],
    *given: Any,
) -> tuple[Any, StageState]:
    """What one stage does of a step; pure.

    It is the whole step, of which all is left out that other stages do: their layers are not run,
    and nobody reads what else has no meaning here.

    Args:
        spec: The model.
        bound: Devices of the stage.
        shape: Of the step.
        slots: Longest sequence.
        layout: Of the stage.
        places: Which leaves of the model's parameters are given.
        params: Those.
        state: Given up.
        entering: Input of the first layer here; on the first stage the tokens that the step before
            gave, `[seats]`.
        packed, given: As of `step`.

    Returns:
        The last layer's output, or what was chosen on the last stage; and the state.
    """
    seats = jnp.arange(shape.seats, dtype=jnp.int32)
    said, after = state.said, None
    if layout.is_first:
        said = said.at[seats, state.after].set(entering, mode="drop")
        after = _after(shape, packed, slots)
    elif said is None:
        said = jnp.zeros((shape.seats, slots + 1), jnp.int32)
    running_here = _Part(layout, entering)
    full = _filled(spec, places, params)
    with running(running_here):
        whole = EngineState(cache=state.cache, said=said)
        chosen, ended = step(spec, bound, shape, (), full, whole, packed, *given)
    kept = StageState(cache=ended.cache)
    if layout.is_first:
        kept = dataclasses.replace(kept, said=said, after=after)
    if layout.is_last:
        return chosen, dataclasses.replace(kept, said=ended.said)
    return running_here.carry, kept


def _after(shape: StepShape, packed: Any, most: int) -> Array:
    """The place of the token that each seat is given by a step."""
    batch = shape.unpacked(packed)
    last = batch.emit[:, 0]
    return jnp.where(last >= 0, batch.position[jnp.clip(last, 0)] + 1, most)


def _filled(spec: ModelSpec, places: Sequence[int], params: Sequence[Any]) -> Any:
    """The model's parameters: those given, and in place of others what nobody reads."""
    infos, structure = jax.tree.flatten(spec.infos)
    leaves: list[Any] = [jnp.zeros(info.shape, info.dtype) for info in infos]
    for at, value in zip(places, params, strict=True):
        leaves[at] = value
    return jax.tree.unflatten(structure, leaves)


def _cut(spec: CacheSpec, layers: int) -> CacheSpec:
    """The cache of so many layers."""
    arrays = {
        name: dataclasses.replace(one, shape=(layers, *one.shape[1:]))
        for name, one in spec.arrays.items()
    }
    return dataclasses.replace(spec, arrays=arrays)
