"""A model that has been read, and what continues prompts with it."""

import dataclasses
from typing import Any

from colossax.checkpoint import RecordReader
from colossax.config import BoundPlan
from colossax.data import Tokenizer
from colossax.inference.embedding import Embedder
from colossax.inference.engine import Engine, ModelDrafter, Replicas, make_engine
from colossax.inference.fitting import argument_bytes
from colossax.inference.generator import Generator
from colossax.nn import AdapterConfig, DecoderConfig, ModelSpec
from colossax.typing import ParamInfo, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its parameters on devices, and the tokenizer it was trained with.

    Attributes:
        spec: The model without arrays, described under `bound`.
        bound: Plan and devices.
        params: Laid out by `bound`.
        config: Sizes of the decoder.
        tokenizer: None where the checkpoint holds none.
        adapter: What learned beside the rest, if anything did.
        origin: The checkpoint of that rest, or of all, and the model's name there.
        weights: How matrices are kept, one of `SERVED`.
        adapters: Names of those that it has side by side, for requests to an engine.
    """

    spec: ModelSpec
    bound: BoundPlan
    params: Params
    config: DecoderConfig
    tokenizer: Tokenizer | None
    adapter: AdapterConfig
    origin: tuple[RecordReader, str]
    weights: str = "own"
    adapters: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Of all parameters: on each device, and of the host for each."""
        return argument_bytes(self.params)

    @property
    def eos(self) -> int | None:
        """What ends a sequence: as the model says, else as the tokenizer does."""
        if self.config.eos is not None or self.tokenizer is None:
            return self.config.eos
        return self.tokenizer.eos

    def generator(self, *, slots: int | None = None, sequences: int | None = None) -> Generator:
        """A generator for prompts and continuations of up to `slots` tokens together.

        Args:
            slots: See `Generator`.
            sequences: With stages, how many are on their way at once.
        """
        sizes = {"slots": slots, "sequences": sequences}
        return Generator(self.spec, self.bound, self.params, **sizes, eos=self.eos)

    def drafter(self, tokens: int = 4, *, nodes: int | None = None) -> ModelDrafter:
        """One that guesses for a larger model of the same vocabulary; see `ModelDrafter`."""
        return ModelDrafter(self.spec, self.bound, self.params, tokens, nodes=nodes)

    def engine(self, **options: Any) -> Engine | Replicas:
        """One for many requests at once, with options as of `Engine`; load it `unrolled`.

        On a mesh with `data` one for each place there, see `make_engine`.
        """
        return make_engine(self.spec, self.bound, self.params, adapters=self.adapters, **options)

    def embedder(self, **options: Any) -> Embedder:
        """One for many texts at once, with options as of `Embedder`; load it `unrolled`."""
        return Embedder(self.spec, self.bound, self.params, **options)


def held_as(info: ParamInfo) -> tuple[str, int | None, str | None]:
    """What tells a parameter of a base, and a part of one, from others of it."""
    part = None if info.quantised is None else info.quantised.name
    return info.stood_at or info.path, info.first_layer, part


def stood(info: ParamInfo) -> ParamInfo:
    """A parameter of a base with the path that it has there."""
    if not info.of_base or not info.stood_at:
        return info
    return dataclasses.replace(info, path=info.stood_at)
