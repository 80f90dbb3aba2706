"""Drafts of a smaller model of the same vocabulary."""

from typing import Any

from jaxtyping import Array, Int

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.cache import Cache
from colossax.inference.decode import decoding_model
from colossax.inference.engine.drafting.drafter import Target
from colossax.inference.engine.drafting.sequential import SequentialDrafter
from colossax.inference.engine.pages import pages_of
from colossax.nn import FlatTokens, ModelSpec
from colossax.sharding import use
from colossax.typing import Params


class ModelDrafter(SequentialDrafter):
    """A smaller model of the same vocabulary.

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
            params, tokens, nodes: As of `SequentialDrafter`.

        Raises:
            InputError: Likewise; or it cannot decode.
        """
        self._model = decoding_model(spec)
        super().__init__(spec, bound, params, tokens, nodes, vocab=self._model.config.vocab)

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
        asked = pages_of(self._model, sizes, program.bound)
        if asked.whole:
            raise InputError(
                "draft: the drafting model keeps something of a sequence as a whole, which cannot"
                " be taken back token by token; draft with a model that keeps keys and values"
            )
        return self._in(asked)

    def forward(
        self,
        given: tuple[Params, Cache, Target],
        ids: Int[Array, " t"],
        flat: FlatTokens,
        verified: Int[Array, " t"],
        ends: slice,
    ) -> tuple[Array, Cache]:
        """See `SequentialDrafter`."""
        params, held, _ = given
        with use(self._bound):
            model: Any = self.spec.merge(params)
            hidden, held = model.decode(ids, held, flat)
            return model.logits(hidden[ends]), held
