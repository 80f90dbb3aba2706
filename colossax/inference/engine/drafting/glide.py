"""Drafts of a decoder that reads what the model itself keeps of its last layer."""

from typing import Any

from jaxtyping import Array, Int

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.cache import Cache
from colossax.inference.engine.drafting.drafter import Target
from colossax.inference.engine.drafting.sequential import SequentialDrafter
from colossax.inference.engine.pages import pages_of
from colossax.inference.plan import shapes_of
from colossax.nn import FlatTokens, ModelSpec, target_pages
from colossax.sharding import use
from colossax.typing import Params


class GlideDrafter(SequentialDrafter):
    """An `nn.Drafter`, which learned beside the model that it drafts for.

    Its tokens see the model's keys and values of all positions that the model had seen when the
    draft began, in the model's own pages. Embedding and head are the model's.

    Reference: Du et al. 2024, GliDe with a CaPE.
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
            spec: The drafter, as `describe` gave it under `bound`.
            bound: Where its parameters live: the devices of the engine.
            params, tokens, nodes: As of `SequentialDrafter`.

        Raises:
            InputError: Likewise.
        """
        self._model: Any = spec.merge(shapes_of(spec))
        self._program: Any = None
        super().__init__(spec, bound, params, tokens, nodes, vocab=self._model.config.vocab)

    def fitted(self, program: Any) -> "GlideDrafter":
        """See `Drafter`."""
        sizes = program.sizes
        if program.adapters:
            raise InputError(
                "draft: the drafter learned beside the base, whose embedding and head each adapter"
                " may change; draft with n-grams or a smaller model"
            )
        if sizes.cache != "own":
            raise InputError(
                f"draft: the cache is kept in {sizes.cache}, and a drafter reads keys and values as"
                " they are; leave out the cache's form, or draft with a smaller model"
            )
        one = self._in(pages_of(self._model, sizes, program.bound))
        one._program = program
        return one

    def forward(
        self,
        given: tuple[Params, Cache, Target],
        ids: Int[Array, " t"],
        flat: FlatTokens,
        verified: Int[Array, " t"],
        ends: slice,
    ) -> tuple[Array, Cache]:
        """See `SequentialDrafter`."""
        params, held, target = given
        theirs = self._program
        with use(theirs.bound):
            model: Any = theirs.spec.merge(target.params)
            embedded = model.embedded(ids[None])[0]
            seen = target_pages(model, target.cache, verified)
        with use(self._bound):
            drafter: Any = self.spec.merge(params)
            hidden, held = drafter.decode(embedded, held, flat, seen)
        with use(theirs.bound):
            return model.logits(hidden[ends]), held
