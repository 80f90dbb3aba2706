"""Questions that a model answers in its own words."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from colossax.errors import InputError
from colossax.evaluation.items import Asked, Prompt, Rated, shortened
from colossax.evaluation.reading import Reader
from colossax.evaluation.scores import Ratio
from colossax.inference.generator import Generation
from colossax.scheduling import EngineRequest

Measure = Callable[[str, Sequence[str]], Mapping[str, float]]
"""What was said and the right answers, one or more, to a number of each metric."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerItem:
    """A question whose answer is said, the likeliest token each time.

    Attributes:
        prompt: What is gone on with.
        answers: One or more right ones.
        measure: How near what was said is to them.
        max_tokens: Most tokens to say.
        ends: Texts before which the answer ends.
        where, group: See `Item`.
    """

    prompt: Prompt
    answers: tuple[str, ...]
    measure: Measure
    max_tokens: int
    where: str
    ends: tuple[str, ...] = ()
    group: str = ""

    def asked(self, reader: Reader) -> Asked:
        """See `Item`: one request."""
        room, first = reader.slots - self.max_tokens, len(reader.begin)
        if room <= first:
            raise InputError(
                f"{self.where}: its answer may have {self.max_tokens} tokens, and the model's"
                f" sequences have {reader.slots}; give a model of longer ones, or let it say less"
            )
        texts = iter(self.prompt.texts())
        most = text = next(texts)
        while len(tokens := self._tokens(text, reader)) > room:
            if (shorter := next(texts, None)) is None:
                break
            text = shorter
        cut = len(tokens) > room
        if cut:
            if self.prompt.cut is None:
                raise InputError(
                    f"{self.where}: the prompt is {len(tokens)} tokens, and the model reads {room}"
                    f" before an answer of {self.max_tokens}; shorten it"
                )
            tokens = shortened(tokens, room, self.prompt.cut, first)
        request = EngineRequest(prompt=tuple(tokens), max_tokens=self.max_tokens)
        return Asked([request], shortened=cut or text != most, ends=self.ends)

    def _tokens(self, text: str, reader: Reader) -> list[int]:
        (tokens,) = reader.encode([text])
        return tokens or [*reader.nothing]

    def rated(self, found: Sequence[Generation], reader: Reader) -> Rated:
        """See `Item`: by its measure."""
        (one,) = found
        said = reader.tokenizer.decode(one.tokens[:-1] if one.ended else one.tokens)
        places = [at for text in self.ends if (at := said.find(text)) >= 0]
        said = said[: min(places)] if places else said
        metrics = {
            name: Ratio(float(value)) for name, value in self.measure(said, self.answers).items()
        }
        return Rated(metrics, {"said": said, "answers": list(self.answers)})
