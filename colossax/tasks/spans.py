"""Which spans of a row an encoder-decoder is to write, as data."""

import dataclasses
from typing import Annotated

from colossax.config import Bound, Positive, check_types
from colossax.errors import InputError

_SHARE = Bound(low=0, above=True, high=1, below=True, told="a share above 0, below 1, as 0.15")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """Spans of a row that are left out of what is read, and written; see `data.SpanRows`.

    Attributes:
        rate: Share of the tokens.
        length: Of a span, on average.
    """

    rate: Annotated[float, _SHARE] = 0.15
    length: Positive = 3.0

    def __post_init__(self):
        check_types(self, "data.spans")

    @property
    def told(self) -> str:
        """For people, and of which run it is: `0.15, 3`."""
        return f"{self.rate:g}, {self.length:g}"

    def counts(self, seq_len: int) -> tuple[int, int]:
        """How many tokens of a row are left out, and in how many spans.

        Raises:
            InputError: So many spans have no token between them, or none of their own.
        """
        told = round(seq_len * self.rate)
        spans = max(1, round(told / self.length))
        if not spans <= told <= seq_len - spans:
            raise InputError(
                f"data.spans: {told} of the {seq_len} tokens of a row, in {spans} spans, leave no"
                " token between them or in them; give another rate or length, or longer rows"
            )
        return told, spans

    def lengths(self, seq_len: int) -> tuple[int, int]:
        """Tokens that are read of a row, and that are written."""
        told, spans = self.counts(seq_len)
        return seq_len - told + spans + 1, told + spans + 1
