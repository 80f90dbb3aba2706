"""Benchmarks, asked together of one model by one engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from colossax.evaluation.items import Asked, Item
from colossax.evaluation.reading import Reader
from colossax.evaluation.scores import Score, mean_of, scores_of
from colossax.inference.generator import Generation
from colossax.scheduling import EngineRequest

_MOST_BYTES = 4
"""Of a character, and so of its tokens at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Items that make one set of scores.

    Attributes:
        name: As people know it.
        items: One or more.
        metric: Which of their metrics stands for it where there is room for one.
        groups_alike: Whether its scores are means of its groups', however many items each has.
    """

    name: str
    items: tuple[Item, ...]
    metric: str
    groups_alike: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a benchmark.

    Attributes:
        metric: See `Benchmark`.
        items: How many.
        shortened: Items of which text was left out, as a model's sequences are too short for it.
        scores: Over all items.
        groups: Likewise over each group, where there are any.
        records: Of each item its `where`, `group`, metrics, and by what it was rated.
    """

    metric: str
    items: int
    shortened: int
    scores: Mapping[str, Score]
    groups: Mapping[str, Mapping[str, Score]]
    records: tuple[Mapping[str, Any], ...]

    def told(self) -> dict[str, Any]:
        """As JSON has it, without the records."""
        groups = {
            name: {"items": max(one.items for one in scores.values()), **_told(scores)}
            for name, scores in self.groups.items()
        }
        told = {"metric": self.metric, "items": self.items, "shortened": self.shortened}
        return {**told, **_told(self.scores), **({"groups": groups} if groups else {})}


def _told(scores: Mapping[str, Score]) -> dict[str, Any]:
    return {"scores": {k: {"value": v.value, "stderr": v.stderr} for k, v in scores.items()}}


class Examination:
    """Some benchmarks as requests to a model, and what comes of them.

    Attributes:
        requests: Of all, for `several`; `run(over=examination.over)` ends answers where they do.
    """

    def __init__(self, benchmarks: Sequence[Benchmark], reader: Reader):
        """Make tokens of all items.

        Raises:
            InputError: An item does not fit into a sequence of the model.
        """
        self._benchmarks, self._reader = tuple(benchmarks), reader
        self._asked: list[list[Asked]] = [
            [item.asked(reader) for item in one.items] for one in self._benchmarks
        ]
        self.requests: list[EngineRequest] = []
        self._ends: list[tuple[str, ...]] = []
        for asked in (one for each in self._asked for one in each):
            self.requests += asked.requests
            self._ends += [asked.ends] * len(asked.requests)
        self._said: dict[int, list[int]] = {}

    def over(self, place: int, token: int | None) -> bool:
        """Whether a text has come that ends the answer; see `several`."""
        if token is None or not (ends := self._ends[place]):
            return False
        # As many of the last tokens as the longest such text can be of, and a broken character.
        most = _MOST_BYTES * (max(map(len, ends)) + 1)
        said = self._said[place] = [*self._said.get(place, ())[-most:], token]
        text = self._reader.tokenizer.decode(said)
        return any(one in text for one in ends)

    def results(self, found: Sequence[Generation]) -> dict[str, Result]:
        """What came of the requests, by the names of the benchmarks."""
        left, self._said = iter(found), {}
        return {
            one.name: self._result(one, asked, left)
            for one, asked in zip(self._benchmarks, self._asked, strict=True)
        }

    def _result(self, benchmark: Benchmark, asked: Sequence[Asked], left: Any) -> Result:
        rated, groups, records = [], {}, []
        for item, one in zip(benchmark.items, asked, strict=True):
            metrics, told = item.rated([next(left) for _ in one.requests], self._reader)
            rated.append(metrics)
            if item.group:
                groups.setdefault(item.group, []).append(metrics)
            values = {name: part.over / part.under for name, part in metrics.items()}
            records.append({"where": item.where, "group": item.group, **values, **told})
        scored = {name: scores_of(each) for name, each in groups.items()}
        alike = benchmark.groups_alike and scored
        return Result(
            metric=benchmark.metric,
            items=len(benchmark.items),
            shortened=sum(one.shortened for one in asked),
            scores=mean_of([*scored.values()]) if alike else scores_of(rated),
            groups=scored,
            records=tuple(records),
        )
