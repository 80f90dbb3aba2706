"""Which numbers a field takes, said beside its type: `eps: Annotated[float, above(0)]`.

`check_types` holds a configuration to the bounds of its fields, whoever made it: a recipe, a file,
an import or the command line. Help shows them.
"""

import dataclasses
import functools
import math
import typing
from typing import Annotated, Any

from colossax.errors import InputError

LARGEST_INT = 2**31 - 1
"""Sizes and steps are int32 on devices."""

LARGEST_FLOAT, SMALLEST_FLOAT = 3.4028234663852886e38, 1.1754943508222875e-38
"""Of float32, normal numbers: what is smaller than the smallest is 0 there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """Finite numbers from `low` to `high`.

    Attributes:
        low: Smallest.
        high: Largest; None: what int32 or float32 hold.
        above: `low` itself is none of them.
        below: Nor is `high`.
        told: The range in words, where numbers alone would not say it.
    """

    low: float | int
    high: float | int | None = None
    above: bool = False
    below: bool = False
    told: str = ""

    def __str__(self) -> str:
        """The range in words, as in `give 1 or more`."""
        if self.told:
            return self.told
        low = f"a number above {self.low:g}" if self.above else f"{self.low}"
        if self.high is None:
            return low if self.above else f"{low} or more"
        return f"{low} or more, below {self.high}" if self.below else f"{low} to {self.high}"

    def refusal(self, value: float | int) -> str | None:
        """What was found and what would do, of a number that is none of these; else None."""
        whole = isinstance(value, int)
        if not whole and not math.isfinite(value):
            return f"found {value}, which is not finite; give {self}"
        if self._holds(value):
            return self._unheld(value, LARGEST_INT if whole else LARGEST_FLOAT)
        return f"found {value}; give {self}"

    def _holds(self, value: float | int) -> bool:
        low = value > self.low if self.above else value >= self.low
        high = self.high is None or (value < self.high if self.below else value <= self.high)
        return low and high

    def _unheld(self, value: float | int, largest: float | int) -> str | None:
        """The refusal of a number that devices do not hold."""
        if self.high is None and value > largest:
            return f"found {value}; give {self}, at most {largest:.10g}"
        if self.above and self.low == 0 and value < SMALLEST_FLOAT:
            return f"found {value}, which devices take for 0; give {self}"
        return None

    def check(self, value: Any, where: str, *, error: type[InputError] = InputError) -> None:
        """Refuse a number that is none of these.

        Raises:
            InputError: `error`, with name, value and bounds.
        """
        if (refusal := self.refusal(value)) is not None:
            raise error(f"{where}: {refusal}")


def at_least(low: float | int) -> Bound:
    """From `low` on."""
    return Bound(low=low)


def above(low: float | int) -> Bound:
    """Greater than `low`."""
    return Bound(low=low, above=True)


def within(low: float | int, high: float | int) -> Bound:
    """From `low` to `high`, both among them."""
    return Bound(low=low, high=high)


Count = Annotated[int, at_least(1)]
"""How many, of what there has to be."""

Natural = Annotated[int, at_least(0)]
"""How many, none included."""

Seed = Annotated[int, Bound(low=0, high=2**63 - 1, told="0 to 2^63 - 1")]

Positive = Annotated[float, above(0)]

NotNegative = Annotated[float, at_least(0)]

ClipNorm = Annotated[
    float, Bound(low=0, above=True, told="a number above 0, or none, which leaves gradients")
]

Share = Annotated[float, within(0, 1)]

DECAYS = Bound(low=0, high=1, below=True)

Decay = Annotated[float, DECAYS]
"""Of a moment: 1 would never let go."""

GREEDY_OR_MORE = Bound(low=0, told="0 (greedy) or more")

Temperature = Annotated[float, GREEDY_OR_MORE]


def split_hint(hint: Any) -> tuple[Any, Bound | None]:
    """An annotation without its bound, and the bound."""
    if typing.get_origin(hint) is Annotated:
        plain, *extras = typing.get_args(hint)
        return plain, next((extra for extra in extras if isinstance(extra, Bound)), None)
    return hint, None


@functools.cache
def field_hints(cls: type) -> dict[str, Any]:
    """Annotations of a class by field, bounds included."""
    return typing.get_type_hints(cls, include_extras=True)


def bound_of(cls: type, field: str) -> Bound | None:
    """What a field of a dataclass is held to; that of its value where it may be None."""
    hint = field_hints(cls).get(field)
    inner = [hint, *typing.get_args(hint)]
    return next((bound for one in inner if (bound := split_hint(one)[1]) is not None), None)
