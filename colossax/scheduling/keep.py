"""What a request keeps of its own tokens, where it does not keep all."""

import dataclasses
from typing import NamedTuple

from colossax.config import Count, Natural, check_types
from colossax.errors import InputError

WORDS = {"first": "the first tokens", "heavy": "the tokens that were looked at most"}
"""What requests of an engine may keep beside a window, in words."""

KEEPS = tuple(WORDS)
"""Their names."""

SINKS = 4
"""First tokens that are kept where nobody says how many."""


class KeptPages(NamedTuple):
    """In pages.

    Attributes:
        sinks: From the first on; of heavy hitters, those for them.
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
    """The first tokens of a sequence, or those that were looked at most, and the last.

    All are rounded up to whole pages; a token's own page is one of the window's. What is said is
    not what would be said with all of it.

    With `sinks`, which tokens one sees depends on its position alone, and the first ones are as
    close to it as if they stood before the window. With `heavy`, each layer and kv head lets go,
    whenever a page begins, of as many tokens as a page has: of those before the window the ones
    that were given the least probability by all tokens so far. Positions stay as in the text.

    Attributes:
        sinks: Tokens from the first on; None: `SINKS`, and none with `heavy`.
        heavy: Tokens that were looked at most; 0: the first ones are kept in their place.
        window: Tokens up to the last.

    Source: Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks; Zhang et al.
    2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models.
    """

    sinks: Natural | None = None
    heavy: Natural = 0
    window: Count

    @property
    def kind(self) -> str:
        """One of `KEEPS`."""
        return "heavy" if self.heavy else "first"

    @property
    def named(self) -> dict[str, int]:
        """What is kept, as an answer says it."""
        first = SINKS if self.sinks is None else self.sinks
        front = {"heavy": self.heavy} if self.heavy else {"sinks": first}
        return {**front, "window": self.window}

    def check(self) -> None:
        """Refuse what is out of bounds.

        Raises:
            InputError: Naming the field, what was found and what would do.
        """
        check_types(self, "keep")
        if self.heavy and self.sinks is not None:
            raise InputError(
                f"keep: found sinks {self.sinks} and heavy {self.heavy}; give one of them, as what"
                " is kept beside a window is the first tokens or those looked at most"
            )

    def pages(self, page_tokens: int, most: int) -> KeptPages:
        """In pages of so many tokens, with steps of at most `most` tokens."""
        window = -(-self.window // page_tokens)
        ring = window if self.heavy else window - (1 - most) // page_tokens
        front = self.named[self.kind.replace("first", "sinks")]
        return KeptPages(sinks=-(-front // page_tokens), window=window, ring=ring)
