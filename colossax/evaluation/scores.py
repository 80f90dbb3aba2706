"""Means with their standard errors, of what each item of a benchmark gave."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """What an item adds to a score: a part above the line, and one below.

    Attributes:
        over: Summed over the items.
        under: Likewise; the score is the one sum over the other. 1: the score is a mean.
    """

    over: float
    under: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """A number with how far off it may be.

    Attributes:
        value: The number.
        stderr: Its standard error; None of one item.
        items: Of how many.
    """

    value: float
    stderr: float | None
    items: int


def score_of(parts: Sequence[Ratio], *, exponential: bool = False) -> Score:
    """The sum above over the sum below, or e to the power of that.

    The standard error is that of a ratio's linear part, `sqrt(n / (n - 1) sum(d^2)) / sum(under)`
    with `d = over - value under`; where every `under` is 1 that is the standard error of a mean.

    Args:
        parts: Of one item or more.
        exponential: Of a mean log-probability: its perplexity.
    """
    count, under = len(parts), math.fsum(one.under for one in parts)
    value = math.fsum(one.over for one in parts) / under
    stderr = None
    if count > 1:
        off = math.fsum((one.over - value * one.under) ** 2 for one in parts)
        stderr = math.sqrt(off * count / (count - 1)) / under
    if exponential:
        # Beyond what a float holds a model knows nothing, whatever the number.
        value = math.exp(min(value, 700.0))
        stderr = None if stderr is None else stderr * value
    return Score(value=value, stderr=stderr, items=count)


def scores_of(rated: Sequence[Mapping[str, Ratio]]) -> dict[str, Score]:
    """The score of each metric, over the items that have it; those of `perplexity` as powers."""
    names = dict.fromkeys(name for one in rated for name in one)
    return {
        name: score_of(
            [one[name] for one in rated if name in one], exponential=name.endswith("perplexity")
        )
        for name in names
    }


def mean_of(groups: Sequence[Mapping[str, Score]]) -> dict[str, Score]:
    """The mean over groups of each metric that all have, each group counted alike.

    Its standard error is `sqrt(sum(stderr^2)) / groups`; None where one of them has none.
    """
    means = {}
    for name in groups[0]:
        each = [one[name] for one in groups if name in one]
        if len(each) < len(groups):
            continue
        errors = [one.stderr for one in each]
        known = [one for one in errors if one is not None]
        means[name] = Score(
            value=math.fsum(one.value for one in each) / len(each),
            stderr=math.hypot(*known) / len(each) if len(known) == len(each) else None,
            items=sum(one.items for one in each),
        )
    return means
