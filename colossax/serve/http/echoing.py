"""Prompts that stand before their continuations, with the log-probabilities of their tokens."""

import dataclasses

from colossax.data import Tokenizer
from colossax.scheduling import Emitted
from colossax.serve.text import Entry, detokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Echo:
    """What is told of a prompt before its continuation.

    Attributes:
        text: The prompt's.
        prompt: Its tokens.
        scored: Whether log-probabilities of them are told; they come with the first token.
        alone: Whether nothing is told of the continuation.
    """

    text: str
    prompt: tuple[int, ...]
    scored: bool = False
    alone: bool = False

    def entries(self, tokenizer: Tokenizer, first: Emitted) -> tuple[Entry, ...]:
        """The prompt's tokens as log-probabilities tell of them: of the first nothing is known.

        Args:
            tokenizer: Of the model.
            first: The continuation's first token, which brings the scores of all but the first.
        """
        if not self.scored:
            return ()
        reading, read, found = detokenizer(tokenizer), 0, []
        for token, (logprob, top) in zip(self.prompt, ((None, ()), *first.scores), strict=True):
            found.append(Entry(token=token, logprob=logprob, top=top, offset=read))
            read += len(reading.push(token))
        return tuple(found)

    def behind(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Of the continuation's, with offsets that count the prompt."""
        if not self.text:
            return entries
        return tuple(
            dataclasses.replace(one, offset=one.offset + len(self.text)) for one in entries
        )


NOTHING = Echo(text="", prompt=())
