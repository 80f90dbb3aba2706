"""An engine's steps through stages, each of which has a program of its own on its own devices."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from colossax.compat import Equations
from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.inference.cache import CacheLayout, Specs
from colossax.inference.decode import decoding_model, resolved_slots
from colossax.inference.engine.drafting import Drafter
from colossax.inference.engine.pages import engine_plan, pages_of
from colossax.inference.engine.parts import array_on
from colossax.inference.engine.program import EngineProgram, Sizes, all_allowed, stretched_from
from colossax.inference.engine.sampling import Chosen, Draws
from colossax.inference.engine.stage_parts import (
    StageLayout,
    StageState,
    check_staged,
    layouts_of,
    part,
)
from colossax.nn import ModelSpec
from colossax.scheduling.reading import NOTHING, Reads
from colossax.sharding import activation_sharding, param_sharding, replicated
from colossax.typing import Params

KINDS = ("mixed", "decode")

STAGES = "stages"
"""Under which name parameters are, in the order of the stages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """What a step gives up and gives back.

    Attributes:
        stages: Of each its state.
        token: What the seats were given last, `[seats]`, on the first stage.
    """

    stages: tuple[StageState, ...]
    token: Any


@dataclasses.dataclass(frozen=True)
class _NoReading:
    """Nothing is read beside prompts."""

    reads: Reads = NOTHING
    compiled: int = 0


class Stage:
    """The programs of one stage.

    Attributes:
        bound: Its devices.
        layout: Which layers it has.
        cache: Of those.
        places: Which leaves of the model's parameters it reads.
        leaves: By kind of step, shape and sharding of what goes on to the next stage.
        jitted: By kind of step, its program.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        sizes: Sizes,
        layout: StageLayout,
        specs: Specs,
        enters: Mapping[str, Any],
    ):
        """Trace its steps.

        Args:
            spec: The model.
            bound: Devices of the stage.
            sizes: Of the engine.
            layout: Of the stage.
            specs: The whole model's cache.
            enters: By kind of step, shape and sharding of what enters.
        """
        self.bound, self.layout, self.sizes = bound, layout, sizes
        self._vocab = decoding_model(spec).config.vocab
        self.cache = CacheLayout(bound, layout.cache(specs))
        self._infos, self._enters = jax.tree.leaves(spec.infos), enters
        one = functools.partial(part, spec, bound)
        steps = {
            kind: functools.partial(one, sizes.step(kind), sizes.slots, layout) for kind in KINDS
        }
        self.places = self._read(steps["decode"])
        self.leaves, self.jitted = {}, {}
        for kind, fn in steps.items():
            fn = functools.partial(fn, self.places)
            params = [self._shape(at) for at in self.places]
            out, _ = jax.eval_shape(fn, params, *self._given(kind))
            sharding = jax.tree.map(self._leaving, out)
            self.leaves[kind] = jax.tree.map(_shape, out, sharding)
            state = jax.tree.map(lambda x: x.sharding, self._state())
            how: dict[str, Any] = {"donate_argnums": 1, "out_shardings": (sharding, state)}
            self.jitted[kind] = jax.jit(fn, **how)

    def params(self, params: Params) -> list[Any]:
        """What it reads of a model's, on its devices: the same memory where that is there.

        Args:
            params: Arrays, or shapes with shardings.
        """
        leaves = jax.tree.leaves(params)
        return [
            array_on(leaves[at], param_sharding(self.bound, "params", self._infos[at]))
            for at in self.places
        ]

    def begin(self) -> StageState:
        """With empty pages."""
        asked, nowhere = self._state(), self.sizes.slots

        def filled(one: Any, value: int) -> Any:
            made = None if one is None else np.full(one.shape, value, one.dtype)
            return None if one is None else jax.device_put(made, one.sharding)

        return StageState(
            cache=self.cache.empty(),
            said=filled(asked.said, 0),
            after=filled(asked.after, nowhere),
        )

    def arguments(self, kind: str, params: Sequence[Any]) -> tuple[Any, ...]:
        """Shapes and shardings of what its program gets.

        Args:
            kind: `mixed` or `decode`.
            params: As `params` gives them.
        """
        return [_shape(x, x.sharding) for x in params], *self._given(kind)

    def _given(self, kind: str) -> tuple[Any, ...]:
        here, sizes = replicated(self.bound), self.sizes
        given = (
            sizes.step(kind).empty().packed(),
            np.zeros((sizes.seats, sizes.pages_a_seat), np.int32),
            Draws.empty(sizes.seats),
            all_allowed(sizes.seats, self._vocab),
            np.zeros((), bool),
        )
        shapes = jax.tree.map(lambda x: _shape(x, here), given)
        return self._state(), self._enters[kind], *shapes

    def _state(self) -> StageState:
        """Shapes and shardings."""
        here, seats = replicated(self.bound), self.sizes.seats
        says = self.layout.is_first or self.layout.is_last
        number = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32, sharding=here)
        return StageState(
            cache=self.cache.abstract,
            said=number((seats, self.sizes.slots + 1)) if says else None,
            after=number((seats,)) if self.layout.is_first else None,
        )

    def _shape(self, at: int) -> Any:
        info = self._infos[at]
        dtype = info.at_rest(self.bound.plan.precision.params)
        return jax.ShapeDtypeStruct(info.shape, dtype)

    def _read(self, fn: Any) -> tuple[int, ...]:
        """Which parameters a step depends on."""
        everything = [self._shape(at) for at in range(len(self._infos))]
        places = range(len(everything))
        traced = jax.make_jaxpr(functools.partial(fn, places))(everything, *self._given("decode"))
        equations = Equations(traced)
        own = equations.needed(equations.outputs)
        read = set(equations.crossing(own, equations.outputs))
        return tuple(at for at in places if equations.inputs[at] in read)

    def _leaving(self, x: Any) -> NamedSharding:
        """Of what goes on: as the residual stream, else whole."""
        if self.layout.is_last:
            return replicated(self.bound)
        dims = ("batch", "seq:residual", "embed")
        try:
            return activation_sharding(self.bound, (*dims, *[None] * x.ndim)[: x.ndim], x.shape)
        except PlanError:
            return replicated(self.bound)


class StagedSteps(EngineProgram):
    """`EngineProgram` through stages: a step is as many calls as there are stages.

    The host sends all calls of a step and waits for none: hidden states go from stage to stage, and
    the tokens chosen by the last stage to the first, between the devices. A stage always has work
    where as many engines as stages run their steps through one program by turns.

    Cost: two compilations of each stage, of its own layers. A step sends hidden states of its
    tokens between neighbours. Each stage holds its layers and their cache; what the head shares
    with the table of tokens is on the first stage and the last.
    """

    def __init__(self, spec: ModelSpec, bound: BoundPlan, sizes: Sizes):
        """Compile nothing yet.

        Args:
            spec, bound, sizes: As of `EngineProgram`; of stages that have programs of their own.

        Raises:
            InputError: As `EngineProgram`.
            PlanError: See `check_staged`.

        Cost: each stage's steps are traced.
        """
        check_staged(spec, bound)
        model = decoding_model(spec)
        self.spec, self.sizes, self.config = spec, sizes, model.config
        resolved_slots(self.config, sizes.slots)
        self.bound = BoundPlan(engine_plan(bound.plan), bound.mesh)
        asked = pages_of(model, sizes, bound, form=sizes.cache)
        self.shares = not asked.whole and stretched_from(self.config) >= sizes.slots
        self.drafter: Drafter | None = None
        self.adapters = 0
        self.reading: Any = _NoReading()
        self.stages: list[Stage] = []
        for layout in layouts_of(spec, self.bound):
            here = self.bound.stage(layout.number)
            enters = self._entering(here)
            self.stages.append(Stage(spec, here, sizes, layout, asked.specs, enters))

    def _entering(self, here: BoundPlan) -> dict[str, Any]:
        """By kind, what the next stage gets: from the last step, or from the stage before."""
        if not self.stages:
            token = jax.ShapeDtypeStruct((self.sizes.seats,), np.int32, sharding=replicated(here))
            return dict.fromkeys(KINDS, token)
        return jax.tree.map(lambda x: _shape(x, _moved(x, here)), self.stages[-1].leaves)

    @property
    def compiled(self) -> dict[str, int]:
        """How many programs there are by now, by kind, of all stages."""
        return {kind: sum(one.jitted[kind]._cache_size() for one in self.stages) for kind in KINDS}

    def placed(self, tree: Any) -> tuple[Any, ...]:
        """Arrays of the host on all stages."""
        return tuple(jax.device_put(tree, replicated(one.bound)) for one in self.stages)

    def params(self, params: Params) -> Params:
        """A model's as steps get them, by stage; see `Stage.params`."""
        return {STAGES: [one.params(params) for one in self.stages]}

    def begin(self) -> Any:
        """With empty pages."""
        first = replicated(self.stages[0].bound)
        token = jax.device_put(np.zeros(self.sizes.seats, np.int32), first)
        return Flow(stages=tuple(one.begin() for one in self.stages), token=token)

    def __call__(
        self, kind: str, params: Params, state: Any, packed: Any, *given: Any
    ) -> tuple[Chosen, Any]:
        """Run a step; see `EngineProgram`.

        Args:
            kind: `mixed` or `decode`.
            params: As `params` gives them.
            state: Given up.
            packed, given: See `step`; `given` as `placed` put them.
        """
        goes, states = state.token, []
        for one, own, before, *here in zip(
            self.stages, params[STAGES], state.stages, *given, strict=True
        ):
            if not one.layout.is_first:
                goes = jax.tree.map(lambda x, to=one: jax.device_put(x, _moved(x, to.bound)), goes)
            goes, after = one.jitted[kind](own, before, goes, packed, *here)
            states.append(after)
        token = jax.device_put(goes.token, replicated(self.stages[0].bound))
        return goes, Flow(stages=tuple(states), token=token)

    def read_nothing(self, params: Params, state: Any) -> Any:
        """The state: there is nothing to read."""
        return state

    def arguments(self, kind: str, params: Params) -> tuple[Any, ...]:
        """Shapes and shardings of what each stage gets."""
        given = zip(self.stages, self.params(params)[STAGES], strict=True)
        return tuple(one.arguments(kind, own) for one, own in given)

    def lowered(self, kind: str, params: Params) -> list[Any]:
        """A step of each stage, traced and not compiled.

        Args:
            kind: `mixed` or `decode`.
            params: Of the model: arrays, or shapes with shardings.
        """
        given = zip(self.stages, self.arguments(kind, params), strict=True)
        return [one.jitted[kind].lower(*arguments) for one, arguments in given]


def _moved(x: Any, there: BoundPlan) -> NamedSharding:
    """Split as it is, on another stage."""
    return NamedSharding(there.mesh, x.sharding.spec)


def _shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
