"""What an engine is asked, and what it says: values that the scheduler and the server share."""

import dataclasses
from typing import Annotated

from colossax.config import Count, Natural, Temperature, check_types, within
from colossax.config.bounds import Bound
from colossax.errors import InputError

DrawSeed = Annotated[int, within(0, 2**32 - 1)]
Penalty = Annotated[float, within(-2, 2)]
MOST_BIASED = 300
MOST_LOGPROBS = 20
"""Likeliest tokens that may be told beside a chosen one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is drawn from its logits.

    Attributes:
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_k: Only so many of the likeliest tokens may be drawn; 0 is all.
        top_p: Only the likeliest tokens that together have this share.
        min_p: Only tokens at least so likely, relative to the likeliest.
        seed: The token at position p is drawn with `fold_in(key(seed), p)`.
        presence_penalty: Taken off the logit of each token that was said.
        frequency_penalty: Taken off as often as it was said.
        logit_bias: Pairs of a token id and what is added to its logit.
        logprobs: How many of the likeliest tokens are told beside each; None: no log-probability.
    """

    temperature: Temperature = 0.0
    top_k: Natural = 0
    top_p: Annotated[
        float, Bound(low=0, high=1, above=True, told="a number above 0, at most 1")
    ] = 1.0
    min_p: Annotated[float, within(0, 1)] = 0.0
    seed: DrawSeed = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: Annotated[int, within(0, MOST_LOGPROBS)] | None = None

    def __post_init__(self):
        check_types(self, "")
        if len(self.logit_bias) > MOST_BIASED:
            raise InputError(
                f"logit_bias: has {len(self.logit_bias)} tokens; give at most {MOST_BIASED}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt and how to continue it.

    Attributes:
        prompt: Token ids, at least one.
        generated: What was said of it before a restart: read as the prompt is, counted as said.
        max_tokens: Most tokens to say, those of `generated` among them.
        ends: Token ids that end it.
        sampling: How its tokens are drawn.
        waits: Whether each token must be known before the next step, as under a grammar.
        grammar: What its tokens have to follow: a `serve.Constraint` is made of it.
        adapter: Name of the adapter that continues it; None: the base model.
        deadline_s: When it ends whatever it has said, on the engine's clock; None: never.
    """

    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    max_tokens: Count = 64
    ends: tuple[int, ...] = ()
    sampling: SamplingConfig = SamplingConfig()
    waits: bool = False
    grammar: str | None = None
    adapter: str | None = None
    deadline_s: float | None = None

    def __post_init__(self):
        check_types(self, "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emitted:
    """One token that was said, or an end.

    Attributes:
        request: Number of the request.
        token: Its id; None where the request ended without one.
        logprob: Its log-probability, where asked for.
        top: The likeliest tokens with theirs, the likeliest first.
        ended: `stop` (the token is one of `ends`), `length`, `cancelled`, `deadline`, `error`;
            None while it goes on.
        message: Of an error: what went wrong, in one sentence.
    """

    request: int
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ended: str | None = None
    message: str = ""
