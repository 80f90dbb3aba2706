"""Questions with choices, answered by how likely a model finds each choice."""

import dataclasses
import math
from collections.abc import Sequence

from colossax.errors import InputError
from colossax.evaluation.items import SCORED, Asked, Prompt, Rated, shortened
from colossax.evaluation.reading import Reader
from colossax.evaluation.scores import Ratio
from colossax.inference.generator import Generation
from colossax.scheduling import EngineRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceItem:
    """A question whose right choice a model should find the likeliest.

    Attributes:
        prompt: What stands before a choice; may be empty.
        choices: Two or more texts as they stand behind it, with the blank that begins a word.
        answer: Which of them is right, counted from 0.
        where, group: See `Item`.
    """

    prompt: Prompt
    choices: tuple[str, ...]
    answer: int
    where: str
    group: str = ""

    def asked(self, reader: Reader) -> Asked:
        """See `Item`: a request for each choice, which scores the choice's tokens alone.

        Tokens are those of prompt and choice together, and blanks at a prompt's end go to the
        choice, as in lm-evaluation-harness. Choices share the pages of what is before them.
        """
        room, texts = reader.slots - 1, iter(self.prompt.texts())
        most = text = next(texts)
        some = len(self.prompt.shots)
        # One choice says sooner that examples are too many; all of them have the last word.
        while some and len(reader.encode([text + self.choices[0]])[0]) > room:
            text, some = next(texts), some - 1
        pairs = self._pairs(text, reader)
        while max(len(whole) for whole, _ in pairs) > room:
            if (text := next(texts, None)) is None:
                pairs = [self._cut(*pair, room, reader) for pair in pairs]
                break
            pairs = self._pairs(text, reader)
        requests = [
            EngineRequest(prompt=tuple(whole), max_tokens=1, score_from=begin, sampling=SCORED)
            for whole, begin in pairs
        ]
        return Asked(requests, shortened=text != most)

    def _pairs(self, text: str, reader: Reader) -> list[tuple[list[int], int]]:
        """Of each choice all tokens, and where its own begin."""
        before = text.rstrip()
        context, *wholes = reader.encode([before, *(text + choice for choice in self.choices)])
        begin = len(context)
        if not before:
            wholes = [[*reader.nothing, *whole[begin:]] for whole in wholes]
            begin = len(reader.nothing)
        for choice, whole in zip(self.choices, wholes, strict=True):
            if begin >= len(whole):
                raise InputError(
                    f"{self.where}: the choice '{choice[:40]}' has no token of its own behind the"
                    " prompt; give another"
                )
        return [(whole, begin) for whole in wholes]

    def _cut(
        self, whole: list[int], begin: int, room: int, reader: Reader
    ) -> tuple[list[int], int]:
        """Without the beginning, where there is no room for it."""
        if len(whole) <= room:
            return whole, begin
        own, first = len(whole) - begin, len(reader.begin)
        if self.prompt.cut is None or own + max(first, 1) > room:
            raise InputError(
                f"{self.where}: prompt and choice are {len(whole)} tokens, and the model reads"
                f" {room}; shorten it"
            )
        return shortened(whole, room, self.prompt.cut, first), room - own

    def rated(self, found: Sequence[Generation], reader: Reader) -> Rated:
        """See `Item`: whether the right one is the likeliest, by several measures of that.

        `accuracy` is by log-probability; `accuracy_norm`, `_bytes` and `_tokens` by it over the
        choice's characters, UTF-8 bytes and tokens; `accuracy_first` by its first token's alone.
        Of choices alike the first counts.
        """
        each = [[logprob for logprob, _ in one.scores] for one in found]
        sums = [math.fsum(one) for one in each]
        # A choice is as long as its words: the blank before them belongs to every choice.
        words = [text.lstrip() for text in self.choices]
        values = {
            "accuracy": sums,
            "accuracy_norm": _over(sums, [len(text) for text in words]),
            "accuracy_bytes": _over(sums, [len(text.encode()) for text in words]),
            "accuracy_tokens": _over(sums, [len(one) for one in each]),
            "accuracy_first": [one[0] for one in each],
        }
        metrics = {
            name: Ratio(float(own.index(max(own)) == self.answer)) for name, own in values.items()
        }
        told = {"answer": self.answer, "logprobs": sums, "tokens": [len(one) for one in each]}
        return Rated(metrics, told)


def _over(sums: Sequence[float], sizes: Sequence[int]) -> list[float]:
    return [total / size for total, size in zip(sums, sizes, strict=True)]
