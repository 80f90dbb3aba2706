"""What a request keeps of its own tokens, where it does not keep all."""

import dataclasses
from typing import NamedTuple

from colossax.config import Count, Natural, check_types


class KeptPages(NamedTuple):
    """In pages.

    Attributes:
        sinks: From the first on.
        window: Up to and with that of the token that looks.
        ring: Places that pages behind the first ones take in turn.
    """

    sinks: int
    window: int
    ring: int

    @property
    def held(self) -> int:
        """Most that a request holds at a time."""
        return self.sinks + self.ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """The first tokens of a sequence and the last: what lies between is let go.

    Both are rounded up to whole pages; a token's own page is one of the window's. Which tokens one
    sees depends on its position alone, and the first ones are as close to it as if they stood
    before the window. What is said is not what would be said with all of it.

    Attributes:
        sinks: Tokens from the first on.
        window: Tokens up to the last.

    Source: Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks.
    """

    sinks: Natural = 4
    window: Count

    def check(self) -> None:
        """Refuse what is out of bounds.

        Raises:
            InputError: Naming the field, what was found and what would do.
        """
        check_types(self, "keep")

    def pages(self, page_tokens: int, most: int) -> KeptPages:
        """In pages of so many tokens, with steps of at most `most` tokens."""
        window = -(-self.window // page_tokens)
        return KeptPages(
            sinks=-(-self.sinks // page_tokens),
            window=window,
            ring=window - (1 - most) // page_tokens,
        )
