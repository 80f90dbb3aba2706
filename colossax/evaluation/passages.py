"""Texts whose every token is scored: perplexities."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from colossax.errors import InputError
from colossax.evaluation.items import SCORED, Asked, Rated
from colossax.evaluation.reading import Reader
from colossax.evaluation.scores import Ratio
from colossax.inference.generator import Generation
from colossax.scheduling import EngineRequest

_BLANKS = re.compile(r"\s+")
"""Part words; what is behind the last of them counts as one, as in lm-evaluation-harness."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassageItem:
    """A document, scored from its first token on.

    Attributes:
        text: All of it.
        context: Tokens at least that each window but the first repeats of the one before it, to
            read and not to score: 1 makes windows that follow one another, as the perplexities of
            lm-evaluation-harness; more slides them, which costs as many more passes.
        where, group: See `Item`.
    """

    text: str
    where: str
    context: int = 1
    group: str = ""

    def asked(self, reader: Reader) -> Asked:
        """See `Item`: a request for each window."""
        tokens, room = reader.tokenizer.encode(self.text), reader.slots - 1
        if not tokens:
            raise InputError(f"{self.where}: holds no text; leave it out")
        if self.context >= room:
            raise InputError(
                f"--context: found {self.context}, and a window has {room} tokens; give less"
            )
        requests = [
            EngineRequest(prompt=tuple(row), max_tokens=1, score_from=begin, sampling=SCORED)
            for row, begin in windows(tokens, reader.nothing, room, self.context)
        ]
        return Asked(requests)

    def rated(self, found: Sequence[Generation], reader: Reader) -> Rated:
        """See `Item`: by tokens, words that blanks part, and UTF-8 bytes."""
        logprobs = [logprob for one in found for logprob, _ in one.scores]
        nats = -math.fsum(logprobs)
        sizes = {
            "byte_perplexity": len(self.text.encode()),
            "word_perplexity": len(_BLANKS.split(self.text)),
            "token_perplexity": len(logprobs),
        }
        metrics = {name: Ratio(nats, size) for name, size in sizes.items()}
        bits = Ratio(nats / math.log(2), sizes["byte_perplexity"])
        told = {"logprob": -nats, "tokens": len(logprobs), "bytes": sizes["byte_perplexity"]}
        return Rated({"bits_per_byte": bits, **metrics}, told)


def windows(
    tokens: Sequence[int], before: Sequence[int], room: int, context: int
) -> Iterator[tuple[list[int], int]]:
    """Rows that score each token once, and where in each the scored ones begin.

    Args:
        tokens: One or more.
        before: What the first of them is scored behind.
        room: Most tokens of a row; more than `context`.
        context: See `PassageItem`; the last row has as much before its tokens as there is room for.
    """
    done = min(len(tokens), room - len(before))
    yield [*before, *tokens[:done]], len(before)
    while done < len(tokens):
        end = min(len(tokens), done + room - context)
        begin = max(0, end - room)
        yield [*tokens[begin:end]], done - begin
        done = end
