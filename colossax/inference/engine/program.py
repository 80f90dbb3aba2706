"""The compiled steps of an engine: flat tokens of all seats in, a token of each seat out."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from colossax.config import BoundPlan
from colossax.inference.cache import Cache, CacheLayout
from colossax.inference.decode import decoding_model, resolved_slots
from colossax.inference.engine.keeping import check_keeps
from colossax.inference.engine.pages import paged_spec
from colossax.inference.engine.sampling import Chosen, Draws, choose
from colossax.inference.plan import inference_plan
from colossax.inference.reading import Reading
from colossax.nn import DecoderConfig, FlatTokens, ModelSpec
from colossax.pallas.attention import Kept, Pages
from colossax.sharding import replicated, use
from colossax.typing import Params

GROUP = 16
"""Tokens of a prompt that attend together: their seat's pages are read once for all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of an engine; what compiles a program of its own.

    Attributes:
        seats: Sequences at once.
        pages: Of the cache.
        page_tokens: Tokens of a page.
        slots: Longest sequence.
        mixed: Tokens of a step with prompts.
        decode: Tokens of a step without.
        cache: What pages are kept in, one of `FORMATS`.
        rings: Whether layers with a window or chunks keep those alone; see `paged_spec`.
        keeps: Whether requests may keep the first and the last of their tokens alone.
    """

    seats: int
    pages: int
    page_tokens: int
    slots: int
    mixed: int
    decode: int
    cache: str = "own"
    rings: bool = False
    keeps: bool = False

    @property
    def pages_a_seat(self) -> int:
        """Most that a sequence takes."""
        return -(-self.slots // self.page_tokens)

    def step(self, kind: str) -> "StepShape":
        """Of `mixed` or `decode` steps."""
        if kind == "decode":
            return StepShape(tokens=self.decode, groups=self.decode, group=1, seats=self.seats)
        group = min(GROUP, self.mixed)
        groups = min(self.mixed, self.seats + self.mixed // group)
        return StepShape(tokens=self.mixed, groups=groups, group=group, seats=self.seats)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """Of a step: how many tokens, and in how many groups they attend; see `Pages`."""

    tokens: int
    groups: int
    group: int
    seats: int

    def empty(self) -> "Batch":
        """With nothing but padding, in host memory."""
        return Batch(
            ids=np.zeros(self.tokens, np.int32),
            position=np.zeros(self.tokens, np.int32),
            seat=np.full(self.tokens, -1, np.int32),
            groups=np.full((self.groups, self.group), -1, np.int32),
            emit=np.full(self.seats, -1, np.int32),
        )

    def unpacked(self, packed: Int[Array, " n"]) -> "Batch":
        """See `Batch.packed`."""
        sizes = [self.tokens] * 3 + [self.groups * self.group, self.seats]
        ids, position, seat, groups, emit = jnp.split(packed, np.cumsum(sizes)[:-1])
        groups = groups.reshape(self.groups, self.group)
        return Batch(ids=ids, position=position, seat=seat, groups=groups, emit=emit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens of a step, int32.

    Attributes:
        ids: `[t]`; -1: what the seat was given last.
        position: `[t]`.
        seat: `[t]`; negative is padding.
        groups: See `Pages`.
        emit: Of each seat which of the tokens is followed by one that it is given, `[r]`;
            negative: none is.
    """

    ids: Any
    position: Any
    seat: Any
    groups: Any
    emit: Any

    def packed(self) -> np.ndarray:
        """All of it in one array, which goes to the devices at once."""
        parts = (self.ids, self.position, self.seat, self.groups.reshape(-1), self.emit)
        return np.concatenate(parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """What a step gives up and gives back.

    Attributes:
        cache: In pages; see `paged_spec`.
        said: Tokens of each seat by position, `[seats, slots + 1]` int32, read or chosen.
    """

    cache: Cache
    said: Any


class EngineProgram:
    """`step(params, state, batch, table, draws, mask) -> (Chosen, state)`, for two sizes of steps.

    It keeps neither parameters nor cache. Cost: a compilation for each size, at first use; and of
    models that read a source, sound or images, those of `Reading`.
    """

    def __init__(self, spec: ModelSpec, bound: BoundPlan, sizes: Sizes):
        """Compile nothing yet.

        Args:
            spec: The model, as `describe` gave it under `bound`.
            bound: Where the parameters live.
            sizes: See there.

        Raises:
            InputError: The model cannot decode, or `slots` is above its `max_seq`.
        """
        model = decoding_model(spec)
        self.spec, self.sizes = spec, sizes
        self.config: DecoderConfig = model.config
        resolved_slots(self.config, sizes.slots)
        self.bound = BoundPlan(inference_plan(bound.plan), bound.mesh)
        asked = paged_spec(
            model,
            seats=sizes.seats,
            pages=sizes.pages,
            page_tokens=sizes.page_tokens,
            slots=sizes.slots,
            form=sizes.cache,
            ring_tokens=sizes.mixed if sizes.rings else None,
        )
        if sizes.keeps:
            check_keeps(self.config)
        self.shares = not asked.whole and stretched_from(self.config) >= sizes.slots
        self.cache = CacheLayout(self.bound, asked.specs)
        self.reading = Reading(spec, model, self.bound, self.cache)
        here = replicated(self.bound)
        self.placed = functools.partial(jax.device_put, device=here)
        out = (here, EngineState(cache=self.cache.shardings, said=here))
        kept = sizes.page_tokens if sizes.keeps else None
        self._steps = {
            kind: jax.jit(
                functools.partial(step, spec, self.bound, sizes.step(kind), asked.rings, kept),
                donate_argnums=1,
                out_shardings=out,
            )
            for kind in ("mixed", "decode")
        }
        self._said = jax.jit(
            lambda: jnp.zeros((sizes.seats, sizes.slots + 1), jnp.int32), out_shardings=here
        )

    @property
    def compiled(self) -> dict[str, int]:
        """How many programs there are by now, by kind."""
        steps: dict[str, Any] = self._steps
        return {kind: jitted._cache_size() for kind, jitted in steps.items()}

    def begin(self) -> EngineState:
        """With empty pages."""
        return EngineState(cache=self.cache.empty(), said=self._said())

    def __call__(
        self, kind: str, params: Params, state: EngineState, *given: Any
    ) -> tuple[Chosen, EngineState]:
        """Run a step; see `step`. `state` is given up."""
        return self._steps[kind](params, state, *given)

    def read(self, params: Params, state: EngineState, seat: int, asked: Any) -> EngineState:
        """The state with what a request's tokens attend to, before its first one in this seat.

        Args:
            params: Of the model.
            state: Given up.
            seat: Of the request.
            asked: With `source`, `frames` and `images`.
        """
        given = {"source": asked.source, "frames": asked.frames, "images": asked.images}
        return dataclasses.replace(state, cache=self.reading(params, state.cache, seat, **given))

    def read_nothing(self, params: Params, state: EngineState) -> EngineState:
        """Run each program of `Reading.cases` for a seat that there is not."""
        for case in self.reading.cases:
            cache = self.reading(params, state.cache, self.sizes.seats, **case)
            state = dataclasses.replace(state, cache=cache)
        return state

    def arguments(self, kind: str, params: Params) -> tuple[Any, ...]:
        """Shapes and shardings of what a step gets.

        Args:
            kind: `mixed` or `decode`.
            params: Arrays, or shapes with shardings.
        """
        here, sizes = replicated(self.bound), self.sizes

        def shape(x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)

        said = jax.ShapeDtypeStruct((sizes.seats, sizes.slots + 1), jnp.int32, sharding=here)
        given = (
            sizes.step(kind).empty().packed(),
            np.zeros((sizes.seats, sizes.pages_a_seat), np.int32),
            Draws.empty(sizes.seats),
            all_allowed(sizes.seats, self.config.vocab),
            np.zeros((), bool),
        )
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
        )
        state = EngineState(cache=self.cache.abstract, said=said)
        return params, state, *jax.tree.map(shape, given)

    def lowered(self, kind: str, params: Params) -> Any:
        """A step, traced and not compiled; arguments as of `arguments`."""
        return self._steps[kind].lower(*self.arguments(kind, params))


def stretched_from(config: DecoderConfig) -> float:
    """The length above which what is kept of a token depends on the length of its prompt."""
    ropes = (config.rope, config.local_rope)
    known = [one.stretched_from for one in ropes if one is not None]
    return min((float(x) for x in known if x is not None), default=math.inf)


def all_allowed(seats: int, vocab: int) -> np.ndarray:
    """A mask under which every token may come, `[seats, words]` uint32."""
    return np.full((seats, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)


def step(
    spec: ModelSpec,
    bound: BoundPlan,
    shape: StepShape,
    rings: tuple[tuple[int, int], ...],
    kept: int | None,
    params: Params,
    state: EngineState,
    packed: Int[Array, " n"],
    table: Int[Array, "r p"],
    draws: Draws,
    mask: UInt32[Array, "r words"],
    masked: Bool[Array, ""],
) -> tuple[Chosen, EngineState]:
    """Tokens into their seats' pages, and a token for each seat that emits; pure.

    Args:
        spec, bound, shape: Of the program.
        rings: See `Pages`.
        kept: Tokens of a page, where requests may keep some of theirs alone.
        params: Of the model.
        state: Given up.
        packed: A `Batch`.
        table: Pages of each seat.
        draws: What its request asks.
        mask, masked: See `choose`.
    """
    batch, model = shape.unpacked(packed), spec.merge(params)
    reads_source = getattr(model.config, "longest_source", None) is not None
    seats, most = state.said.shape
    valid = batch.seat >= 0
    row, own = jnp.where(valid, batch.seat, seats), jnp.clip(batch.seat, 0)
    known = state.said.at[row, batch.position].get(mode="fill", fill_value=0)
    ids = jnp.where(batch.ids < 0, known, batch.ids)
    said = state.said.at[row, batch.position].set(ids, mode="drop")
    pages = Pages(table=table, groups=batch.groups, rings=rings)
    if kept is not None:
        sinks, window, ring = draws.kept.T
        kept_pages = Kept(sinks=sinks, window=window, ring=ring, page_tokens=kept)
        pages = dataclasses.replace(pages, kept=kept_pages)
    flat = FlatTokens(
        seat=batch.seat,
        position=batch.position,
        slot=batch.position,
        source=draws.source[own] if reads_source else None,
        pages=pages,
        closer=None if pages.kept is None else pages.kept.closer(batch.seat, batch.position),
        # A prompt is as long as it is, however it is cut; what is said makes it longer.
        length=jnp.maximum(draws.begin[own], batch.position + 1),
    )
    emits = batch.emit >= 0
    last = jnp.clip(batch.emit, 0)
    after = jnp.where(emits, batch.position[last] + 1, most)
    with use(bound):
        hidden, cache = model.decode(ids, state.cache, flat)
        logits = model.logits(hidden[last])
        chosen = choose(logits, draws, said, after, mask, masked)
    said = said.at[jnp.arange(seats, dtype=jnp.int32), after].set(chosen.token, mode="drop")
    return chosen, EngineState(cache=cache, said=said)
