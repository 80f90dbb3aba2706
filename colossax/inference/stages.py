"""Decoding through stages: each works on a group of sequences of its own, weights stay there."""

import dataclasses
import functools
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import InputError, PlanError
from colossax.inference.cache import Cache, CacheLayout, Specs
from colossax.inference.decode import (
    TOKENS_PER_STEP,
    check_width,
    decoding_model,
    resolved_slots,
    sample,
)
from colossax.inference.plan import inference_plan, shapes_of
from colossax.layerwise import LayerRun, StackCall, over_stages, running, stack_call
from colossax.nn import CacheArray, CacheSpec, DecoderConfig, FlatTokens, ModelSpec
from colossax.sharding import activation_sharding, replicated, use
from colossax.typing import Params

STAGE = MeshAxis.STAGE.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tick:
    """What enters the first stage, which groups the stages work on, and what leaves the last.

    Attributes:
        ids: Tokens that enter, of sequences of one group, `[t]` int32.
        seat: Of each its sequence's row in the group, `[t]` int32; negative is padding.
        position: Of each, `[t]` int32.
        group: Of each stage, `[stages]` int32.
        last: Of each call that leaves, which of the leaving tokens is its last, `[rows]` int32.
        next: Position of the token to choose, `[rows]` int32.
        temperature: As of `Sampling`, `[rows]` float32.
        seed: As of `Sampling`, `[rows]` uint32.
    """

    ids: Any
    seat: Any
    position: Any
    group: Any
    last: Any
    next: Any
    temperature: Any
    seed: Any

    @classmethod
    def empty(cls, *, width: int, stages: int, rows: int) -> "Tick":
        """Nothing enters and nothing leaves."""
        return cls(
            ids=np.zeros(width, np.int32),
            seat=np.full(width, -1, np.int32),
            position=np.zeros(width, np.int32),
            group=np.zeros(stages, np.int32),
            last=np.zeros(rows, np.int32),
            next=np.zeros(rows, np.int32),
            temperature=np.zeros(rows, np.float32),
            seed=np.zeros(rows, np.uint32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Flight:
    """What is on its way between two ticks.

    Attributes:
        cache: Of each stage's layers and of all groups, `[stages, layers * groups, rows, ...]`:
            row `layer * groups + group`.
        carry: What each stage gets next, `[stages, ...]`; the first one's is not looked at.
        side: Leaves of the side inputs that each stage has just had, `[stages, ...]`, on all
            devices.
    """

    cache: Cache
    carry: Any
    side: list[Any]


class StagedProgram:
    """`tick(params, flight, now) -> (tokens, flight)`, compiled once.

    In a tick each stage runs its layers on the tokens of one group of sequences, the first on those
    that enter; then all go on to the next stage, and for those that leave the last one the next
    token is chosen. It keeps neither parameters nor caches.

    Cost: one compilation, at first use. A tick computes `width` tokens in the layers of a stage and
    the head for `rows` of them. No weights go over `stage`: of `width` tokens, hidden states to the
    next stage, embeddings and hidden states from where they are made to all stages. The flight is
    donated.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        *,
        slots: int | None = None,
        width: int = TOKENS_PER_STEP,
        sequences: int | None = None,
    ):
        """Compile nothing yet.

        Args:
            spec: The model, of which `why_gathered` says nothing.
            bound: Where the parameters live; several stages.
            slots: Longest prompt and continuation together; default the model's `max_seq`.
            width: Tokens of a tick; raised to the sequences of a group.
            sequences: How many caches there shall be, rounded up to groups of one size; default one
                for each stage. There are no more groups than stages.

        Raises:
            InputError: The model cannot decode, or `slots` is above its `max_seq`; no sequences.
        """
        check_width(width)
        model = decoding_model(spec)
        self.spec = spec
        self.config: DecoderConfig = model.config
        self.slots = resolved_slots(self.config, slots)
        self.stages = bound.mesh.shape[STAGE]
        sequences = self.stages if sequences is None else sequences
        _check_sequences(sequences)
        self.groups = min(self.stages, sequences)
        self.rows = -(-sequences // self.groups)
        self.width = max(width, self.rows)
        self.bound = _staged(bound)
        asked = model.cache_spec(seats=self.rows, slots=self.slots, chunk=self.width)
        self.cache = CacheLayout(self.bound, _by_stage(asked, self.stages, self.groups))
        self._shapes = jax.eval_shape(self._begun, shapes_of(spec))
        out = (replicated(self.bound), self._shardings(self._shapes))
        one = functools.partial(tick, spec, self.bound, self.groups)
        self.jitted = jax.jit(one, donate_argnums=1, out_shardings=out)
        self._start = jax.jit(self._begun, out_shardings=out[1])

    @property
    def sequences(self) -> int:
        """Caches that there are."""
        return self.groups * self.rows

    def __call__(
        self, params: Params, flight: Flight, now: Tick
    ) -> tuple[Int[Array, " rows"], Flight]:
        """The tokens after those that leave, and what is on its way then; `flight` is given up."""
        return self.jitted(params, flight, now)

    def start(self, params: Params) -> Flight:
        """Empty caches, and nothing but padding on its way."""
        return self._start(params)

    def arguments(self, params: Params) -> tuple[Any, ...]:
        """Shapes and shardings of what a call gets.

        Args:
            params: Arrays, or shapes with shardings.
        """
        here = replicated(self.bound)
        now = Tick.empty(width=self.width, stages=self.stages, rows=self.rows)
        return (
            jax.tree.map(lambda x: _shape(x, x.sharding), params),
            jax.tree.map(_shape, self._shapes, self._shardings(self._shapes)),
            jax.tree.map(lambda x: _shape(x, here), now),
        )

    def lowered(self, params: Params) -> Any:
        """A tick, traced and not compiled; `params` as for `arguments`."""
        return self.jitted.lower(*self.arguments(params))

    def _begun(self, params: Params) -> Flight:
        taken = _Taken()
        ids, flat = _padding(self.width)
        cache = self.cache.zeros()
        with use(self.bound), running(taken):
            self.spec.merge(params).decode(ids, cache, flat)

        def on_all(x: Any) -> Array:
            x = jnp.asarray(x)
            return jnp.broadcast_to(x, (self.stages, *x.shape))

        carry = jax.tree.map(lambda x: jnp.zeros_like(on_all(x)), taken.carry)
        return Flight(cache=cache, carry=carry, side=[on_all(x) for x in taken.side])

    def _shardings(self, flight: Any) -> Any:
        here = replicated(self.bound)
        return Flight(
            cache=self.cache.shardings,
            carry=jax.tree.map(functools.partial(_carry_sharding, self.bound), flight.carry),
            side=[here for _ in flight.side],
        )


def tick(
    spec: ModelSpec, bound: BoundPlan, groups: int, params: Params, flight: Flight, now: Tick
) -> tuple[Int[Array, " rows"], Flight]:
    """All stages' layers, each on the tokens that it has; pure.

    Returns:
        The tokens after those that leave, and what is on its way then.
    """
    crossing = _Crossing(bound, groups, flight, now.group)
    flat = FlatTokens(seat=now.seat, position=now.position, slot=now.position)
    with use(bound), running(crossing):
        model = spec.merge(params)
        # What enters goes in, and what leaves comes out: of the stack, hence of the model.
        hidden, cache = model.decode(now.ids, flight.cache, flat)
        logits = model.logits(hidden[now.last]).astype(jnp.float32)
    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))
    tokens = jax.vmap(sample)(logits, now.temperature, keys(now.seed, now.next))
    return tokens, Flight(cache=cache, carry=crossing.carry, side=crossing.side)


class _Crossing:
    """Runs the stack for one tick; afterwards it has what goes on."""

    def __init__(self, bound: BoundPlan, groups: int, flight: Flight, group: Array):
        self._bound, self._groups, self._group = bound, groups, group
        self.carry, self.side = flight.carry, flight.side

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`; the carry that comes out is the last stage's."""
        stages = self._bound.mesh.shape[STAGE]
        count, numbers = layers.count // stages, jnp.arange(stages, dtype=jnp.int32)

        leaves, structure = jax.tree.flatten(side)

        def one(rows: Any, carry: Any, held: Any, carried: Any, group: Array, stage: Array) -> Any:
            side = jax.tree.unflatten(structure, held)

            def body(loop: Any, xs: Any) -> Any:
                carry, carried = loop
                i, row = xs
                state = layers.state(layers.origin + stage * count + i, None, carried)
                state = dataclasses.replace(state, row=i * self._groups + group)
                carry, state, _ = layers.apply(row, carry, side, state)
                return (carry, state.carried), None

            order = jnp.arange(count, dtype=jnp.int32)
            return jax.lax.scan(body, (carry, carried), (order, rows))[0]

        rows = jax.tree.map(lambda x: x.reshape(stages, count, *x.shape[1:]), params)
        before = jax.tree.map(_entered, self.carry, carry)
        # Small, and on all devices: nothing of it need be sent.
        here = replicated(self._bound)
        self.side = jax.lax.with_sharding_constraint(jax.tree.map(_pushed, self.side, leaves), here)
        inputs = (self._laid_out(before), self.side, carried, self._group, numbers)
        after, carried = over_stages(one)(rows, *inputs)
        after = self._laid_out(after)
        self.carry = self._laid_out(jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), after))
        return jax.tree.map(_of_last, after), scanned, carried, {}

    def _laid_out(self, tree: Any) -> Any:
        def one(x: Array) -> Array:
            return jax.lax.with_sharding_constraint(x, _carry_sharding(self._bound, x))

        return jax.tree.map(one, tree)


class _Taken:
    """Runs nothing; afterwards it has what the stack was called with."""

    carry: Any = None
    side: Any = ()

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`."""
        self.carry, self.side = carry, jax.tree.leaves(side)
        return carry, scanned, carried, {}


def _check_sequences(count: Any) -> None:
    """Refuse what is no number of caches."""
    if not isinstance(count, numbers.Integral) or count < 1:
        raise InputError(f"sequences: found {count}; give 1 or more, or None for one a stage")


def why_gathered(spec: ModelSpec, bound: BoundPlan) -> str | None:
    """Why stages cannot each run their own layers, for people; None where they can, or are one."""
    stages = bound.mesh.shape[STAGE]
    if stages == 1:
        return None
    model, staged = decoding_model(spec), _staged(bound)
    asked = model.cache_spec(seats=1, slots=resolved_slots(model.config, None), chunk=1)
    shapes, (ids, flat) = shapes_of(spec), _padding(1)
    cache = jax.eval_shape(CacheLayout(staged, asked).zeros)

    def decode(params: Params, *tokens: Any) -> Any:
        return spec.merge(params).decode(*tokens)

    if getattr(model.config, "longest_source", None) is not None:
        problem = "the model's encoder reads a source first"
    else:
        with use(staged):
            call = stack_call(decode, shapes, ids, cache, flat)
        problem = _problem(call, asked, len(jax.tree.leaves(shapes)), stages)
    return problem and (
        f"mesh axis 'stage': {problem}, so every device gathers the layers of all {stages} stages"
        " for every token"
    )


def _problem(call: StackCall | None, asked: Specs, params: int, stages: int) -> str | None:
    """What speaks against stages, of a model with so many parameters."""
    if call is None or call.scanned:
        return "the model's layers are not one run of one layer stack"
    layers = call.layers
    if layers.group != 1:
        return "layers of several kinds take turns"
    if not layers.stacked or layers.count % stages:
        return f"{layers.count} layers cannot be shared evenly"
    if not layers.policy.placement.all_on_device:
        return "layers live in host memory"
    if any(at >= params for at in call.read_past):
        return "the model reads its tokens behind the layers once more"
    if jax.tree.map(_form, call.carry) != jax.tree.map(_form, call.out):
        return "layers give something else than they get"
    for one in asked.values() if isinstance(asked, Mapping) else (asked,):
        for array in one.arrays.values():
            if array.dims[0] != "layers" or array.shape[0] != layers.count:
                return "the cache has no dim of layers in front"
    return None


def _staged(bound: BoundPlan) -> BoundPlan:
    """With what inference asks for, and dim `stages` over the axis."""
    plan = inference_plan(bound.plan)
    rules = plan.rules.updated(cache={"stages": STAGE}, activations={"stages": STAGE})
    return BoundPlan(plan.replace(rules=rules), bound.mesh)


def _by_stage(asked: Specs, stages: int, groups: int) -> Specs:
    """A cache of several groups, cut by stages."""
    if isinstance(asked, Mapping):
        return {kind: _of_kind_by_stage(one, stages, groups) for kind, one in asked.items()}
    return _of_kind_by_stage(asked, stages, groups)


def _of_kind_by_stage(asked: CacheSpec, stages: int, groups: int) -> CacheSpec:
    def cut(one: CacheArray) -> CacheArray:
        layers, *rest = one.shape
        shape = (stages, layers // stages * groups, *rest)
        return dataclasses.replace(one, shape=shape, dims=("stages", *one.dims))

    return dataclasses.replace(asked, arrays={name: cut(x) for name, x in asked.arrays.items()})


def _carry_sharding(bound: BoundPlan, x: Any) -> NamedSharding:
    """Of `[stages, ...]`: beside the stages as the residual stream, else whole."""
    dims = ("stages", "batch", "seq:residual", "embed")
    try:
        return activation_sharding(bound, (*dims, *[None] * x.ndim)[: x.ndim], x.shape)
    except PlanError:
        return NamedSharding(bound.mesh, PartitionSpec(STAGE))


def _entered(waiting: Array, enters: Array) -> Array:
    """What waits before each stage, before the first what enters."""
    first = jnp.arange(waiting.shape[0]).reshape(-1, *[1] * (waiting.ndim - 1)) == 0
    return jnp.where(first, enters[None], waiting)


def _pushed(held: Array, enters: Any) -> Array:
    """Each stage's handed on to the next, the last one's dropped."""
    return jnp.concatenate([jnp.asarray(enters)[None], held[:-1]])


def _of_last(x: Array) -> Array:
    """The last stage's on all: a sum in which the others' are 0."""
    last = jnp.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1)) == x.shape[0] - 1
    zero = jnp.zeros((), x.dtype)
    return jax.lax.reduce(jnp.where(last, x, zero), zero, jax.lax.add, (0,))


def _padding(width: int) -> tuple[Any, FlatTokens]:
    ids = jnp.zeros(width, jnp.int32)
    return ids, FlatTokens(seat=jnp.full_like(ids, -1), position=ids, slot=ids)


def _shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _form(x: Any) -> tuple[Any, Any]:
    return x.shape, x.dtype
