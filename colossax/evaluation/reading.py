"""Texts as the tokens that a model is asked with."""

import dataclasses
import functools
from collections.abc import Sequence

from colossax.data import Tokenizer

_ANY = "a"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """What makes tokens of texts for one model.

    Attributes:
        tokenizer: Of the model.
        slots: Longest sequence of the model; the last of its tokens is said.
    """

    tokenizer: Tokenizer
    slots: int

    @functools.cached_property
    def begin(self) -> tuple[int, ...]:
        """What the tokenizer's file puts before every text, as the token that begins documents."""
        framed, plain = self.tokenizer.encode_framed(_ANY), self.tokenizer.encode(_ANY)
        places = range(len(framed) - len(plain) + 1)
        at = next((i for i in places if framed[i : i + len(plain)] == plain), 0)
        return tuple(framed[:at])

    @property
    def nothing(self) -> tuple[int, ...]:
        """What stands for a context without text: `begin`, else the token that ends documents."""
        return self.begin or (self.tokenizer.eos,)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts, each behind `begin`."""
        return [[*self.begin, *ids] for ids in self.tokenizer.encode_batch(texts)]
