"""Drafts of the model itself, with attention to a small part of its cache."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.config import RING_AXES
from colossax.errors import InputError
from colossax.inference.cache import Cache, CacheLayout, Specs
from colossax.inference.decode import decoding_model
from colossax.inference.engine.drafting.drafter import Drafter, Guesses, Target, View
from colossax.inference.engine.drafting.looking import Looked, accepted, with_said
from colossax.inference.engine.pages import pages_of
from colossax.inference.engine.sampling import ranked
from colossax.nn import CacheArray, CacheSpec, FlatTokens
from colossax.nn.adapters.by_token import seats_turns, turns
from colossax.nn.adapters.several import adapters_in
from colossax.pallas.attention import Retrieved, mean_keys
from colossax.pallas.attention.codes import without_scales
from colossax.pallas.attention.retrieved import DRAFT, FOUND, MEAN
from colossax.sharding import CACHE_DIMS, MEAN_DIMS, use

PAGES = 64
"""Pages that are found for each kv head, where nobody says."""

RECENT = 4
"""Last pages that are seen whatever is found."""


class RetrievalDrafter(Drafter):
    """The model's own weights, which see a few pages of what the model has kept.

    A guess sees the first page, the last `recent` ones, and of those between the `pages` whose mean
    key has the highest logit with the query of the seat's last token, in each layer and for each
    kv head; and the guesses before it, whose keys and values are kept apart: the model's cache is
    only read. Pages are found anew whenever a draft begins.

    With somebody `below`, that one guesses first and the model looks at several of its guesses in
    one pass over those pages, by the engine's own rule: the guesses are the same, in fewer passes.

    Cost, for each step: `tokens` passes of one token for each seat, or with somebody below
    `tokens / (1 + below.tokens)` to `tokens` passes of `1 + below.tokens`, until the slowest seat
    has its guesses. A pass reads all weights, and keys and values of `1 + pages + recent` pages
    for each seat. Means of all pages are read once a draft, `2 * page_tokens` times fewer numbers
    than the cache holds of them, and hold as many. A step with prompts reads its keys once more.
    Reference: Sun et al. 2024, TriForce; guesses are right by the engine's rule, not by theirs.
    """

    def __init__(
        self,
        tokens: int = 4,
        *,
        pages: int = PAGES,
        recent: int = RECENT,
        below: Drafter | None = None,
    ):
        """Compile nothing.

        Args:
            tokens: How many it guesses, one behind another.
            pages: Pages that are found for each seat and kv head.
            recent: Last pages that are seen whatever is found.
            below: Who guesses first; None: nobody.

        Raises:
            InputError: A number is below 1, or below are trees.
        """
        for name, value in {"tokens": tokens, "pages": pages, "recent": recent}.items():
            if value < 1:
                raise InputError(f"{name}: found {value}; give 1 or more")
        if below is not None and below.tree:
            raise InputError(
                f"below: found a tree of {below.tokens} guesses, and retrieval looks at one line;"
                " give as many nodes as tokens"
            )
        self.tokens, self.params = tokens, None if below is None else below.params
        self._pages, self._recent, self._below = pages, recent, below
        self._program: Any = None
        self._specs: Any = None
        self._means: Any = None

    def on(self, bound: Any) -> "RetrievalDrafter":
        """See `Drafter`."""
        one = copy.copy(self)
        if one._below is not None:
            one._below = one._below.on(bound)
            one.params = one._below.params
        return one

    def fitted(self, program: Any) -> "RetrievalDrafter":
        """See `Drafter`."""
        check_retrieved(program)
        sizes, one = program.sizes, copy.copy(self)
        model = decoding_model(program.spec)
        one._specs = pages_of(model, sizes, program.bound, form=sizes.cache).specs
        for spec in one._specs.values() if isinstance(one._specs, Mapping) else [one._specs]:
            if without_scales(dict(spec.arrays)).keys() != {"k", "v"}:
                raise InputError(
                    f"draft: the model keeps {', '.join(sorted(spec.arrays))} of its tokens, and"
                    " pages are found by their keys; draft with n-grams or a smaller model"
                )
        one._program = program
        one._means = CacheLayout(program.bound, _of_kinds(one._specs, _mean_spec))
        if one._below is not None:
            one._below = one._below.fitted(program).checked_by_another()
        return one

    @property
    def shardings(self) -> Any:
        """Of mean keys, and of what is below."""
        return self._held(self._means.shardings, lambda x: x.shardings)

    @property
    def abstract(self) -> Any:
        """Likewise."""
        return self._held(self._means.abstract, lambda x: x.abstract)

    def empty(self) -> Any:
        """Before the first token."""
        return self._held(self._means.empty(), lambda x: x.empty())

    def read(
        self, params: Any, held: Any, target: Target, ids: Int[Array, " t"], flat: FlatTokens
    ) -> Any:
        """See `Drafter`: mean keys of the pages of all tokens of a step with prompts."""
        assert flat.pages is not None, "an engine's rows are pages"
        groups = flat.pages.groups
        there = (groups >= 0) & (flat.seat[groups] >= 0)
        position = flat.position[groups]
        last = jnp.max(jnp.where(there, position, -1), axis=1)
        seat = jnp.max(jnp.where(there, flat.seat[groups], 0), axis=1)
        rows = self._rows(flat.pages.table[seat], last, groups.shape[1])
        means = self._renewed(held["means"], target.cache, rows)
        return {"means": means, "below": self._read_below(params, held, target, ids, flat)}

    def _read_below(self, params: Any, held: Any, target: Target, ids: Any, flat: Any) -> Any:
        if self._below is None:
            return None
        return self._below.read(params, held["below"], target, ids, flat)

    def draft(self, params: Any, held: Any, view: View) -> tuple[Guesses, Any]:
        """See `Drafter`."""
        # Behind a step without prompts a seat has written one token and all guesses, at most.
        last = jnp.where(view.speaks, view.seen - 1, -1)
        means = self._renewed(
            held["means"], view.target.cache, self._rows(view.table, last, 1 + self.tokens)
        )
        rounds = _Rounds(self, params, means, view)
        begun = rounds.begun(held["below"])
        found = jax.lax.while_loop(rounds.more, rounds, begun)
        at = view.length[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)
        at = jnp.minimum(at, view.said.shape[1] - 1)
        tokens = jnp.take_along_axis(found.said, at, axis=1)
        return Guesses(tokens=tokens), {"means": means, "below": found.below}

    def _rows(self, table: Array, last: Array, tokens: int) -> Int[Array, " m"]:
        """Rows of the pages that hold so many tokens of seats up to their last position.

        Args:
            table: Pages of each.
            last: Position of each last one; negative: none.
            tokens: At most so many.
        """
        each, there = self._program.sizes.page_tokens, last >= 0
        pages = (tokens + each - 2) // each + 1
        number = last[:, None] // each - jnp.arange(pages, dtype=jnp.int32)
        rows = jnp.take_along_axis(table, jnp.clip(number, 0, table.shape[1] - 1), axis=1)
        none = jnp.iinfo(jnp.int32).max
        return jnp.where(there[:, None] & (number >= 0), rows, none).reshape(-1)

    def _renewed(self, means: Cache, cache: Cache, rows: Array) -> Cache:
        """Mean keys with those of some pages made anew."""
        with use(self._program.bound):
            return _of_kinds(
                self._specs, lambda _, m, c: {MEAN: mean_keys(m[MEAN], c, rows)}, means, cache
            )

    def _held(self, means: Any, of_below: Callable[[Drafter], Any]) -> dict[str, Any]:
        return {"means": means, "below": self._below and of_below(self._below)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Guessed:
    """A draft under way.

    Attributes:
        made: Guesses of each seat, `[r]` int32.
        said: Tokens by position with them.
        first: Whether there was no pass yet.
        parts: Of each layer, pages that were found and what is kept of guesses.
        below: What is below holds.
    """

    made: Any
    said: Any
    first: Any
    parts: Any
    below: Any


class _Rounds:
    """Guesses of all seats, one or more in each round."""

    def __init__(self, drafter: RetrievalDrafter, params: Any, means: Cache, view: View):
        self._drafter, self._params, self._view = drafter, params, view
        self._means, self._program = means, drafter._program
        self._several = 1 if drafter._below is None else 1 + drafter._below.tokens

    def begun(self, below: Any) -> _Guessed:
        """Before the first round."""
        view, drafter = self._view, self._drafter
        seats = len(view.length)
        places = drafter.tokens + self._several - 1
        precision = self._program.bound.plan.precision

        def of_kind(spec: CacheSpec) -> dict[str, Array]:
            return _parts_spec(spec, seats, places, drafter._pages).zeros(precision)

        return _Guessed(
            made=jnp.zeros((seats,), jnp.int32),
            said=view.said,
            first=jnp.ones((), bool),
            parts=_of_kinds(drafter._specs, of_kind),
            below=below,
        )

    def _goes_on(self, state: _Guessed) -> Array:
        return self._view.speaks & (state.made < self._drafter.tokens)

    def more(self, state: _Guessed) -> Array:
        """Whether a seat has fewer guesses than it is to have."""
        return jnp.any(self._goes_on(state))

    def __call__(self, state: _Guessed) -> _Guessed:
        """One round: a pass over each seat's last guess, and over what is guessed behind it."""
        view, there = self._view, self._goes_on(state)
        place = state.made[:, None] + jnp.arange(self._several, dtype=jnp.int32)
        position = view.seen[:, None] + place
        ids = jnp.take_along_axis(
            state.said, jnp.clip(position[:, :1], 0, state.said.shape[1] - 1), axis=1
        )
        below = state.below
        if self._drafter._below is not None:
            length = view.length + state.made
            ahead = dataclasses.replace(view, said=state.said, length=length, speaks=there)
            guesses, below = self._drafter._below.draft(self._params, below, ahead)
            ids = jnp.concatenate([ids, guesses.tokens], axis=1)
        each = jnp.broadcast_to(there[:, None], ids.shape)
        looked = Looked(there=each, ids=ids, position=position, kept=each, tree=None)
        logits, parts = self._forward(state, ids, jnp.where(each, place, -1))
        drawn, _ = ranked(
            logits,
            draws=view.draws,
            said=state.said,
            position=position.reshape(-1) + 1,
            mask=view.mask,
            masked=view.masked,
            several=looked.several(),
        )
        token = jnp.argmax(drawn, axis=-1).astype(jnp.int32).reshape(ids.shape)
        right, _ = accepted(looked, token)
        count = jnp.where(there, right + 1, 0)
        return _Guessed(
            made=state.made + count,
            said=with_said(state.said, token, count, position[:, 0] + 1),
            first=jnp.zeros((), bool),
            parts=parts,
            below=below,
        )

    def _forward(self, state: _Guessed, ids: Array, place: Array) -> tuple[Array, Any]:
        """Logits behind tokens `[r, w]`, and what is kept of them.

        Args:
            state: Before them.
            ids: Of each.
            place: See `Retrieved`.
        """
        view, program, drafter = self._view, self._program, self._drafter
        seats = jnp.arange(len(place), dtype=jnp.int32)[:, None]
        seat = jnp.where(place < 0, -1, seats).reshape(-1)
        position = jnp.maximum(view.seen[:, None] + jnp.maximum(place, 0), 0).reshape(-1)
        owner = jnp.maximum(seat, 0)
        flat = FlatTokens(
            seat=seat,
            position=position,
            slot=jnp.full_like(seat, -1),
            length=jnp.maximum(view.draws.begin[owner], position + 1),
            retrieved=Retrieved(
                table=view.table,
                verified=view.seen,
                place=place,
                renews=state.first,
                recent=drafter._recent,
            ),
        )
        given = self._means, view.target.cache, state.parts
        carried = _of_kinds(drafter._specs, lambda _, *held: _together(*held), *given)
        model: Any = program.spec.merge(view.target.params)
        adapters = adapters_in(program.spec)
        mine = seats_turns(view.draws.adapter, adapters) if adapters else None
        with use(program.bound), turns(mine and mine.of_tokens(owner, seat >= 0)):
            hidden, carried = model.decode(ids.reshape(-1), carried, flat)
            logits = model.logits(hidden)
        parts = _of_kinds(
            drafter._specs,
            lambda _, found, before: {name: found[name] for name in before},
            carried,
            state.parts,
        )
        return logits, parts


def check_retrieved(program: Any) -> None:
    """Refuse engines whose pages cannot be found by their keys.

    Raises:
        InputError: Saying why.
    """
    if program.reading.reads.anything:
        raise InputError(
            "draft: the model reads a source, sound or images, which retrieval does not; draft with"
            " n-grams or a smaller model"
        )
    if program.sizes.rings:
        raise InputError(
            "draft: with window_rings a layer's pages are a ring of each seat, and retrieval finds"
            " them by the table; leave out window_rings, or draft with n-grams or a smaller model"
        )
    if program.config.relative is not None:
        raise InputError(
            "draft: the model has biases by distance, which retrieval does not see; draft with"
            " n-grams or a smaller model"
        )
    if program.bound.size(RING_AXES) > 1:
        raise InputError(
            "draft: the devices of 'ring' share a sequence's pages, and retrieval reads any of them"
            " on each device; give those devices to 'tensor' or 'fsdp', or draft with n-grams"
        )


def _of_kinds(specs: Specs, make: Callable[..., Any], *held: Any) -> Any:
    """What is made of a spec and what is held of it; by kind of layers, where there are several."""
    if isinstance(specs, Mapping):
        return {kind: make(one, *(x[kind] for x in held)) for kind, one in specs.items()}
    return make(specs, *held)


def _together(means: Cache, cache: Cache, parts: Cache) -> Cache:
    return {**cache, **means, **parts}


def _mean_spec(spec: CacheSpec) -> CacheSpec:
    layers, pages, _, kv_heads, size = spec.arrays["k"].shape
    return CacheSpec(
        arrays={MEAN: CacheArray(shape=(layers, pages, kv_heads, size), dims=MEAN_DIMS)}
    )


def _parts_spec(spec: CacheSpec, seats: int, places: int, pages: int) -> CacheSpec:
    """Of a draft: keys and values of guesses, and pages that were found."""
    arrays = {}
    for name in ("k", "v"):
        layers, _, _, kv_heads, size = spec.arrays[name].shape
        shape = (layers, seats, places, kv_heads, size)
        arrays[DRAFT + name] = CacheArray(shape=shape, dims=CACHE_DIMS)
        found = CacheArray(
            shape=(layers, seats, kv_heads, pages),
            dims=("layers", None, "kv_heads", None),
            dtype="int32",
        )
    return CacheSpec(arrays={**arrays, FOUND: found})
