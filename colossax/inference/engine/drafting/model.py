"""Drafts of a smaller model of the same vocabulary, run as often as there are tokens to guess."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.cache import Cache, CacheLayout
from colossax.inference.decode import decoding_model
from colossax.inference.engine.drafting.drafter import Drafter, Guesses, View
from colossax.inference.engine.pages import paged_spec
from colossax.inference.engine.parts import params_on
from colossax.inference.engine.sampling import Several, ranked
from colossax.inference.plan import inference_plan
from colossax.nn import FlatTokens, ModelSpec
from colossax.pallas.attention import Pages
from colossax.sharding import use
from colossax.typing import Params

WIDTH = 8
"""Most guesses for one place."""


class ModelDrafter(Drafter):
    """A model that reads what the engine's reads, into pages of its own under the same table.

    What it guesses it draws as its seat's request asks and with the same key, so that where it is
    of one mind with the model both draw the same.

    Cost, for each step: its forward pass of the step's tokens where there are prompts among them,
    and `tokens` passes of one token for each seat, the first of two; guesses of a tree beside its
    line cost none.
    Reference: Leviathan et al. 2023; drawing with a common key: Daliri et al. 2025.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        params: Params,
        tokens: int = 4,
        *,
        nodes: int | None = None,
    ):
        """Compile nothing.

        Args:
            spec: The smaller model, as `describe` gave it under `bound`.
            bound: Where its parameters live: the devices of the engine.
            params: Laid out by `bound`; kept.
            tokens: How many it guesses, one behind another.
            nodes: How many with others for the same places: a tree. Default none.

        Raises:
            InputError: It cannot decode, guesses nothing, or there are fewer nodes than tokens.
        """
        if tokens < 1:
            raise InputError(f"tokens: found {tokens}; give 1 or more")
        if nodes is not None and nodes < tokens:
            raise InputError(f"nodes: found {nodes}; give {tokens} or more, one for each token")
        self._model = decoding_model(spec)
        self._bound = BoundPlan(inference_plan(bound.plan), bound.mesh)
        self.spec, self.params = spec, params
        self.depth, self.tokens = tokens, tokens if nodes is None else nodes
        self.tree = self.tokens > self.depth
        self.width = min(WIDTH, 1 + self.tokens - self.depth, self._model.config.vocab)
        most = self.depth * self.width
        if self.tokens > most:
            raise InputError(
                f"nodes: found {nodes}, and {tokens} places have {self.width} guesses each; give"
                f" {most} or fewer"
            )
        self._cache: CacheLayout | None = None

    def fitted(self, program: Any) -> "ModelDrafter":
        """See `Drafter`."""
        config, sizes = self._model.config, program.sizes
        if config.vocab != program.config.vocab:
            raise InputError(
                f"draft: the drafting model has {config.vocab} tokens and the model that it drafts"
                f" for {program.config.vocab}; draft with one that was trained on the same"
                " vocabulary"
            )
        if config.max_seq < sizes.slots:
            raise InputError(
                f"draft: the drafting model's longest sequence is {config.max_seq} tokens and the"
                f" engine's {sizes.slots}; give fewer slots, or another model"
            )
        asked = paged_spec(
            self._model,
            seats=sizes.seats,
            pages=sizes.pages,
            page_tokens=sizes.page_tokens,
            slots=sizes.slots,
        )
        if asked.whole:
            raise InputError(
                "draft: the drafting model keeps something of a sequence as a whole, which cannot"
                " be taken back token by token; draft with a model that keeps keys and values"
            )
        one = copy.copy(self)
        one._cache = CacheLayout(self._bound, asked.specs)
        return one

    def on(self, bound: BoundPlan) -> "ModelDrafter":
        """See `Drafter`."""
        one = copy.copy(self)
        one._bound = BoundPlan(self._bound.plan, bound.mesh)
        one.params = params_on(self.spec, one._bound, self.params)
        return one

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

    def read(self, params: Params, held: Cache, ids: Int[Array, " t"], flat: FlatTokens) -> Cache:
        """See `Drafter`."""
        with use(self._bound):
            return self.spec.merge(params).decode(ids, held, flat)[1]

    def draft(self, params: Params, held: Cache, view: View) -> tuple[Guesses, Cache]:
        """See `Drafter`.

        The last token but one is read again: where all drafts were right nobody has read it.
        """
        guess = _Guess(self, params, view)
        seats, rows = view.said.shape[0], jnp.arange(view.said.shape[0], dtype=jnp.int32)
        first, held = guess(held, view.said, jnp.int32(0), tokens=2)
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

    def __init__(self, drafter: ModelDrafter, params: Params, view: View):
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
        with use(self._drafter._bound):
            model = self._drafter.spec.merge(self._params)
            hidden, held = model.decode(ids.reshape(-1), held, flat)
            logits = model.logits(hidden[tokens - 1 :: tokens])
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
