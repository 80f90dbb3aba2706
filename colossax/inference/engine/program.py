"""The compiled steps of an engine: flat tokens of all seats in, a token of each seat out."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.config import RING_AXES, BoundPlan
from colossax.errors import InputError, PlanError
from colossax.inference.cache import CacheLayout
from colossax.inference.decode import decoding_model, resolved_slots
from colossax.inference.engine.batch import EngineState, StepShape
from colossax.inference.engine.drafting import Drafter, Guesses
from colossax.inference.engine.drafting.trees import MOST_NODES
from colossax.inference.engine.keeping import check_keeps
from colossax.inference.engine.masses import check_split
from colossax.inference.engine.pages import PagedSpec, engine_plan, pages_of
from colossax.inference.engine.sampling import Chosen, Draws
from colossax.inference.engine.step import looking_step, step
from colossax.inference.reading import Reading
from colossax.nn import DecoderConfig, ModelSpec
from colossax.nn.adapters.several import adapters_in
from colossax.sharding import replicated
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
        draft: Tokens drafted behind each that is said.
        cache: What pages are kept in, one of `FORMATS`.
        rings: Whether layers with a window or chunks keep those alone; see `paged_spec`.
        keeps: What requests may keep beside a window, one of `KEEPS`; None: they keep all.
        host: Pages that host memory holds beside those; what copies them is compiled, no step.
    """

    seats: int
    pages: int
    page_tokens: int
    slots: int
    mixed: int
    decode: int
    draft: int = 0
    cache: str = "own"
    rings: bool = False
    keeps: str | None = None
    host: int = 0

    @property
    def pages_a_seat(self) -> int:
        """Most that a sequence takes."""
        return -(-self.slots // self.page_tokens)

    def step(self, kind: str) -> "StepShape":
        """Of `mixed` or `decode` steps."""
        tokens = self.decode if kind == "decode" else self.mixed
        group = min(GROUP, 1 + self.draft if kind == "decode" else tokens)
        groups = tokens if group == 1 else min(tokens, self.seats + tokens // group)
        rows = self.seats * (1 + self.draft)
        return StepShape(
            tokens=tokens,
            groups=groups,
            group=group,
            seats=self.seats,
            draft=self.draft,
            scored=0 if kind == "decode" else -(-tokens // rows) * rows,
        )


class EngineProgram:
    """`step(params, state, batch, table, draws, mask) -> (Chosen, state)`, for two sizes of steps.

    It keeps neither parameters nor cache. Cost: a compilation for each size, at first use; and of
    models that read a source, sound or images, those of `Reading`.
    """

    def __init__(
        self, spec: ModelSpec, bound: BoundPlan, sizes: Sizes, drafter: Drafter | None = None
    ):
        """Compile nothing yet.

        Args:
            spec: The model, as `describe` gave it under `bound`.
            bound: Where the parameters live.
            sizes: See there; with as many drafts as the drafter gives.
            drafter: Who guesses tokens.

        Raises:
            InputError: The model cannot decode, `slots` is above its `max_seq`, or the drafter
                cannot draft for it.
        """
        model = decoding_model(spec)
        self.spec, self.sizes = spec, sizes
        self.config: DecoderConfig = model.config
        resolved_slots(self.config, sizes.slots)
        self.bound = BoundPlan(engine_plan(bound.plan), bound.mesh)
        if sizes.keeps is not None:
            check_keeps(sizes.keeps, self.config, self.bound, drafts=drafter is not None)
        ring_tokens = sizes.mixed if sizes.rings else None
        asked = pages_of(model, sizes, bound, form=sizes.cache, ring_tokens=ring_tokens)
        if asked.rings and self.bound.size(RING_AXES) > 1:
            raise PlanError(
                "window_rings: the devices of 'ring' share a sequence's pages, and a window's ring"
                " is a seat's own; leave rings out, or give those devices to 'tensor' or 'fsdp'"
            )
        self.adapters = adapters_in(spec)
        self.shares = not asked.whole and stretched_from(self.config) >= sizes.slots
        check_split(self.bound, asked.specs, self.config.heads)
        self.cache = CacheLayout(self.bound, asked.specs)
        self.reading = Reading(spec, model, self.bound, self.cache)
        if drafter is not None:
            check_drafted(self, asked, drafter)
            drafter = drafter.fitted(self)
        self.drafter, self.fixed, self.rings = drafter, asked.fixed, asked.rings
        here = replicated(self.bound)
        self.placed = functools.partial(jax.device_put, device=here)
        out = (here, self._state(here, self.cache.shardings, drafter and drafter.shardings))
        self._steps = {
            kind: jax.jit(
                self._step(kind),
                donate_argnums=2,
                out_shardings=out,
            )
            for kind in ("mixed", "decode")
        }
        self._zeros = jax.jit(self._small, out_shardings=here)

    def _step(self, kind: str) -> Any:
        shape = self.sizes.step(kind)
        if self.drafter is not None:
            return functools.partial(looking_step, self, shape, kind)

        keeps = self.sizes.keeps
        kept = None if keeps is None else (keeps, self.sizes.page_tokens)

        def plain(params: Params, _drafter: None, *given: Any) -> Any:
            return step(self.spec, self.bound, shape, self.rings, params, *given, kept=kept)

        return plain

    def _small(self) -> dict[str, Any]:
        """What a state holds of seats, but for caches."""
        seats, slots, draft = self.sizes.seats, self.sizes.slots, self.sizes.draft
        small: dict[str, Any] = {"said": jnp.zeros((seats, slots + 1), jnp.int32)}
        if self.drafter is not None:
            none = jnp.zeros((seats, draft), jnp.int32)
            guesses = Guesses(tokens=none, parent=none if self.drafter.tree else None)
            small |= {"length": jnp.zeros((seats,), jnp.int32), "drafts": guesses}
        return small

    def _state(self, small: Any, cache: Any, drafter: Any) -> EngineState:
        """With something for each of what `_small` gives, or all that it gave."""
        if not isinstance(small, dict):
            small = jax.tree.map(lambda _: small, jax.eval_shape(self._small))
        return EngineState(cache=cache, drafter=drafter, **small)

    @property
    def compiled(self) -> dict[str, int]:
        """How many programs there are by now, by kind."""
        steps: dict[str, Any] = self._steps
        return {kind: jitted._cache_size() for kind, jitted in steps.items()}

    def begin(self) -> EngineState:
        """With empty pages."""
        held = self._of_drafter(lambda x: x.empty())
        return self._state(dict(self._zeros()), self.cache.empty(), held)

    def __call__(
        self, kind: str, params: Params, state: EngineState, *given: Any
    ) -> tuple[Chosen, EngineState]:
        """Run a step; see `step`. `state` is given up."""
        return self._steps[kind](params, self._of_drafter(lambda x: x.params), state, *given)

    def _of_drafter(self, make: Callable[[Drafter], Any]) -> Any:
        return None if self.drafter is None else make(self.drafter)

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

        given = (
            sizes.step(kind).empty().packed(),
            np.zeros((sizes.seats, sizes.pages_a_seat), np.int32),
            Draws.empty(sizes.seats),
            all_allowed(sizes.seats, self.config.vocab),
            np.zeros((), bool),
        )
        params, own = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (params, self._of_drafter(lambda x: x.params)),
        )
        small = dict(jax.tree.map(shape, jax.eval_shape(self._small)))
        held = self._of_drafter(lambda x: x.abstract)
        state = self._state(small, self.cache.abstract, held)
        return params, own, state, *jax.tree.map(shape, given)

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


def check_drafted(program: EngineProgram, asked: PagedSpec, drafter: Drafter) -> None:
    """Refuse models for which nothing can be drafted, and trees that nobody can look at.

    Raises:
        InputError: What is kept of a sequence cannot be taken back token by token, or moved.
    """
    if drafter.tree and drafter.tokens >= MOST_NODES:
        raise InputError(
            f"draft: found a tree of {drafter.tokens} guesses; give {MOST_NODES - 1} or fewer"
        )
    if drafter.tree and asked.rings:
        raise InputError(
            "draft: guesses for the same place are several, and a ring of pages keeps one for each;"
            " give as many nodes as tokens, or leave out the window's rings"
        )
    specs = asked.specs
    kinds = specs.values() if isinstance(specs, Mapping) else (specs,)
    if any(one.kind == "sequence" for one in kinds) and not program.reading.reads.anything:
        raise InputError(
            "draft: the model keeps a state of each sequence as a whole, from which a token that"
            " was guessed wrong cannot be taken back; serve it without drafts"
        )
