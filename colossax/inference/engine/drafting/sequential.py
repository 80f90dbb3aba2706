"""Drafts that a model makes one token after another, with others for the same places."""

import abc
import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.cache import Cache, CacheLayout
from colossax.inference.engine.drafting.drafter import Drafter, Guesses, Target, View
from colossax.inference.engine.pages import PagedSpec, engine_plan
from colossax.inference.engine.parts import params_on
from colossax.inference.engine.sampling import Several, ranked
from colossax.nn import FlatTokens, ModelSpec
from colossax.pallas.attention import Pages
from colossax.typing import Params

WIDTH = 8
"""Most guesses for one place."""


class SequentialDrafter(Drafter):
    """Reads what the engine's model reads, into pages of its own under the same table.

    What it guesses it draws as its seat's request asks and with the same key, so that where it is
    of one mind with the model both draw the same.

    Attributes:
        depth: How many it guesses, one behind another.
        width: Guesses for one place.

    Cost, for each step: its forward pass of the step's tokens where there are prompts among them,
    and `depth` passes of one token for each seat, the first of two; guesses beside the line cost
    none.
    """

    depth: int
    width: int
    _again: int = 2

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        params: Params,
        tokens: int,
        nodes: int | None,
        *,
        vocab: int,
    ):
        """Compile nothing.

        Args:
            spec: Of what guesses, as `describe` gave it under `bound`.
            bound: Where its parameters live: the devices of the engine.
            params: Laid out by `bound`; kept.
            tokens: How many it guesses, one behind another.
            nodes: How many with others for the same places: a tree. None: no others.
            vocab: Tokens that there are.

        Raises:
            InputError: It guesses nothing, or more than there is.
        """
        if tokens < 1:
            raise InputError(f"tokens: found {tokens}; give 1 or more")
        if nodes is not None and nodes < tokens:
            raise InputError(f"nodes: found {nodes}; give {tokens} or more, one for each token")
        self.spec, self.params = spec, params
        self._bound = BoundPlan(engine_plan(bound.plan), bound.mesh)
        self.depth, self.tokens = tokens, tokens if nodes is None else nodes
        self.tree = self.tokens > self.depth
        self.width = min(WIDTH, 1 + self.tokens - self.depth, vocab)
        most = self.depth * self.width
        if self.tokens > most:
            raise InputError(
                f"nodes: found {nodes}, and {tokens} places have {self.width} guesses each; give"
                f" {most} or fewer"
            )
        self._cache: CacheLayout | None = None

    def on(self, bound: BoundPlan) -> "SequentialDrafter":
        """See `Drafter`."""
        one = copy.copy(self)
        one._bound = BoundPlan(self._bound.plan, bound.mesh)
        one.params = params_on(self.spec, one._bound, self.params)
        return one

    def checked_by_another(self) -> "SequentialDrafter":
        """See `Drafter`.

        Where all its guesses are right the other adds one before the model does: two are unread.
        """
        one = copy.copy(self)
        one._again = 3
        return one

    def _in(self, asked: PagedSpec) -> Any:
        """One with a cache in these pages."""
        one = copy.copy(self)
        one._cache = CacheLayout(self._bound, asked.specs)
        return one

    @abc.abstractmethod
    def forward(
        self,
        given: tuple[Params, Cache, Target],
        ids: Int[Array, " t"],
        flat: FlatTokens,
        verified: Int[Array, " t"],
        ends: slice,
    ) -> tuple[Array, Cache]:
        """Logits behind some flat tokens, and its cache with all of them.

        Args:
            given: Its parameters, its cache, and the model that it drafts for.
            ids: The tokens.
            flat: Where they belong.
            verified: Of each, how many positions of its sequence the model has seen.
            ends: Behind which of them.
        """

    @property
    def shardings(self) -> Any:
        """Of its cache."""
        return self._layout.shardings

    @property
    def abstract(self) -> Any:
        """Of its cache."""
        return self._layout.abstract

    def empty(self) -> Cache:
        """Its cache before the first token."""
        return self._layout.empty()

    def read(
        self, params: Params, held: Cache, target: Target, ids: Int[Array, " t"], flat: FlatTokens
    ) -> Cache:
        """See `Drafter`."""
        return self.forward((params, held, target), ids, flat, flat.position, slice(0, 1))[1]

    def draft(self, params: Params, held: Cache, view: View) -> tuple[Guesses, Cache]:
        """See `Drafter`.

        The last token but one is read again: where all drafts were right nobody has read it.
        """
        guess = _Guess(self, params, view)
        seats, rows = view.said.shape[0], jnp.arange(view.said.shape[0], dtype=jnp.int32)
        first, held = guess(held, view.said, jnp.int32(0), tokens=self._again)
        found = jax.tree.map(
            lambda x: jnp.zeros((seats, self.depth, *x.shape[1:]), x.dtype).at[:, 0].set(x), first
        )

        def more(i: Array, state: tuple[Candidates, Array, Cache]) -> Any:
            found, said, held = state
            at = jnp.where(view.speaks, view.length + i - 1, said.shape[1])
            said = said.at[rows, at].set(found.tokens[:, i - 1, 0], mode="drop")
            guessed, held = guess(held, said, i, tokens=1)
            return jax.tree.map(lambda all, x: all.at[:, i].set(x), found, guessed), said, held

        found, _, held = jax.lax.fori_loop(1, self.depth, more, (found, view.said, held))
        return found.guesses(self.tokens - self.depth), held

    @property
    def _layout(self) -> CacheLayout:
        assert self._cache is not None, "it is fitted to no program"
        return self._cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """What may come at each place, the first of which goes on the line that is guessed.

    Attributes:
        tokens: `[..., w]` int32, those that are drawn first.
        logprobs: What the drafting model gives each, `[..., w]` float32.
    """

    tokens: Any
    logprobs: Any

    def guesses(self, more: int) -> Guesses:
        """The line, and of the other candidates those that are likeliest to be reached and drawn.

        Those hang on the line as leaves: where it is likely to be right there are few of them, and
        where the drafting model does not know there are many.

        Args:
            more: How many of the others.

        Reference: Du et al. 2024, GliDe with a CaPE, which widens by thresholds; these are as many
        as there is room for.
        """
        line = self.tokens[:, :, 0]
        if not more:
            return Guesses(tokens=line)
        seats, depth, width = self.tokens.shape
        of_line = jnp.cumsum(self.logprobs[:, :, 0], axis=1)
        reached = jnp.pad(of_line[:, :-1], ((0, 0), (1, 0)))
        worth = (reached[:, :, None] + self.logprobs[:, :, 1:]).reshape(seats, -1)
        _, best = jax.lax.top_k(worth, more)
        others = self.tokens[:, :, 1:].reshape(seats, -1)
        leaves = jnp.take_along_axis(others, best, axis=1)
        chain = jnp.tile(jnp.arange(depth, dtype=jnp.int32), (seats, 1))
        return Guesses(
            tokens=jnp.concatenate([line, leaves], axis=1),
            parent=jnp.concatenate([chain, best.astype(jnp.int32) // (width - 1)], axis=1),
        )


class _Guess:
    """A pass over the last tokens of all seats, and the token that the smaller model draws."""

    def __init__(self, drafter: SequentialDrafter, params: Params, view: View):
        self._drafter, self._params, self._view = drafter, params, view

    def __call__(
        self, held: Cache, said: Int[Array, "r s"], behind: Array, *, tokens: int
    ) -> tuple[Candidates, Cache]:
        """What may stand at `length + behind`, from that many of the seat's last tokens.

        Args:
            held: Its cache.
            said: With drafts.
            behind: How many drafts there are.
            tokens: Last ones to read.
        """
        view, seats = self._view, len(said)
        length = view.length + behind
        back = jnp.arange(-tokens, 0, dtype=jnp.int32)
        position = length[:, None] + back
        own = jnp.broadcast_to(jnp.arange(seats, dtype=jnp.int32)[:, None], position.shape)
        there = view.speaks[:, None] & (position >= 0)
        ids = jnp.take_along_axis(said, jnp.clip(position, 0, said.shape[1] - 1), axis=1)
        flat = FlatTokens(
            seat=jnp.where(there, own, -1).reshape(-1),
            position=jnp.maximum(position, 0).reshape(-1),
            slot=jnp.where(there & (position < view.room[:, None]), position, -1).reshape(-1),
            pages=Pages(
                table=view.table,
                groups=jnp.arange(position.size, dtype=jnp.int32).reshape(position.shape),
            ),
            length=jnp.maximum(view.draws.begin[:, None], position + 1).reshape(-1),
        )
        # Before it, as in prompts; a draft knows what the model has seen when it began.
        verified = jnp.minimum(flat.position, jnp.repeat(view.seen, tokens))
        given = self._params, held, view.target
        ends = slice(tokens - 1, None, tokens)
        logits, held = self._drafter.forward(given, ids.reshape(-1), flat, verified, ends)
        alone = Several(
            seat=own[:, 0],
            known=length,
            drafted=jnp.zeros((seats, 0), jnp.int32),
            before=jnp.zeros((seats, 0), bool),
        )
        draws = {"draws": view.draws, "said": said, "mask": view.mask, "masked": view.masked}
        drawn, _ = ranked(logits, position=length, several=alone, **draws)
        width = self._drafter.width
        if width == 1:
            best = jnp.argmax(drawn, axis=-1, keepdims=True).astype(jnp.int32)
            return Candidates(tokens=best, logprobs=jnp.zeros(best.shape)), held
        _, best = jax.lax.top_k(drawn, width)
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        logprobs = jnp.take_along_axis(logprobs, best, axis=1)
        return Candidates(tokens=best.astype(jnp.int32), logprobs=logprobs), held
