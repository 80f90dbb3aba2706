"""What benchmarks ask of a model, and how what comes of it is rated."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from colossax.evaluation.reading import Reader
from colossax.evaluation.scores import Ratio
from colossax.inference.generator import Generation
from colossax.scheduling import EngineRequest, SamplingConfig

SCORED = SamplingConfig(logprobs=0)
"""Tells log-probabilities of the tokens that were given, and of no others."""


class Asked(NamedTuple):
    """What a model is asked by an item.

    Attributes:
        requests: One or more.
        shortened: Whether text was left out for them to fit.
        ends: Texts before which what is said ends.
    """

    requests: list[EngineRequest]
    shortened: bool = False
    ends: tuple[str, ...] = ()


class Rated(NamedTuple):
    """What came of an item.

    Attributes:
        metrics: What it adds to each score.
        told: By what it was rated, for people and programs.
    """

    metrics: Mapping[str, Ratio]
    told: Mapping[str, Any]


@runtime_checkable
class Item(Protocol):
    """One thing that a benchmark asks."""

    @property
    def group(self) -> str:
        """What it is scored with beside all, as its subject; empty: with all alone."""
        ...

    @property
    def where(self) -> str:
        """Where it was read, for people."""
        ...

    def asked(self, reader: Reader) -> Asked:
        """What a model is asked.

        Raises:
            InputError: It does not fit into a sequence of the model.
        """
        ...

    def rated(self, found: Sequence[Generation], reader: Reader) -> Rated:
        """What came of its requests, in their order."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text before what is asked for.

    Attributes:
        text: What is asked.
        head: Before all, as what the task is.
        shots: Between them, examples with their answers: as many of the first as there is room for.
        cut: What is left out where there is none without them either: the "beginning", the
            "middle", or None: it is refused.
    """

    text: str
    head: str = ""
    shots: tuple[str, ...] = ()
    cut: str | None = "beginning"

    def texts(self) -> Iterator[str]:
        """With all of the examples, then with one after another left out."""
        for shots in range(len(self.shots), -1, -1):
            yield "".join((self.head, *self.shots[:shots], self.text))


def shortened(tokens: Sequence[int], room: int, cut: str, begin: int) -> list[int]:
    """As many of the tokens as there is room for.

    Args:
        tokens: More than that.
        room: Most of them.
        cut: See `Prompt`.
        begin: How many of the first stay: those that begin documents.
    """
    left = room - begin
    first = left // 2 if cut == "middle" else 0
    return [*tokens[: begin + first], *tokens[len(tokens) - (left - first) :]]
