"""What is asked of the engine: a prompt, how to go on, and when to stop."""

import dataclasses
import math
from typing import Annotated, Any

from colossax.config import Bound, Count, Natural, Share, Temperature, check_types, within
from colossax.errors import InputError
from colossax.scheduling.checks import check_given, check_ids, check_length, check_tokens
from colossax.scheduling.keep import Keep
from colossax.scheduling.reading import NOTHING, Reads

DrawSeed = Annotated[int, within(0, 2**32 - 1)]
"""Devices get it as uint32."""

Penalty = Annotated[float, within(-2, 2)]

TOP_SHARE = Bound(low=0, high=1, above=True, told="a number above 0, at most 1")

TopShare = Annotated[float, TOP_SHARE]

MOST_BIASED = 300
"""Tokens of a request that have a bias: it has one shape on the device."""

MOST_LOGPROBS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen. All of it is data: no value compiles anything.

    Attributes:
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_k: Only so many of the likeliest tokens; 0 is all.
        top_p: Only the likeliest tokens that make up this probability together.
        min_p: Only tokens with this share of the likeliest one's probability.
        seed: The token at position p is drawn with `fold_in(key(seed), p)`.
        presence_penalty: Taken from the logit of each token that was said.
        frequency_penalty: Likewise, once for each time that it was said.
        logit_bias: (token, what is added to its logit), at most 300.
        logprobs: How many of the likeliest tokens are told with each token, up to 20; None: not
            even the token's own log-probability.
    """

    temperature: Temperature = 0.0
    top_k: Natural = 0
    top_p: TopShare = 1.0
    min_p: Share = 0.0
    seed: DrawSeed = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: Annotated[int, within(0, MOST_LOGPROBS)] | None = None

    def check(self, vocab: int) -> None:
        """Refuse what is out of bounds.

        Raises:
            InputError: Naming the field, what was found and what would do.
        """
        check_types(self, "")
        if len(self.logit_bias) > MOST_BIASED:
            raise InputError(
                f"logit_bias: found {len(self.logit_bias)} tokens; give at most {MOST_BIASED}"
            )
        check_ids([token for token, _ in self.logit_bias], vocab, name="logit_bias")
        for token, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise InputError(
                    f"logit_bias: found {bias} for token {token}, which is not finite; give a"
                    " number"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt and how to continue it among others.

    Attributes:
        prompt: Token ids, at least one.
        generated: What was said of it before a restart; it is fed as the prompt is, and counted as
            said.
        source: What an encoder reads first, as token ids; models of one stack read none.
        frames: Sound that it reads in place of those, `[frames, mels]`.
        images: What places among the prompt's tokens name, `[images, height, width, channels]`; see
            `nn.SeeingDecoder`.
        max_tokens: Most tokens to say, those of `generated` among them.
        ends: Token ids that end it.
        sampling: How tokens are chosen.
        score_from: Position of the first token of the prompt whose log-probability is told, with
            those behind it, together with the first token that is said; what `sampling.logprobs`
            asks is told of them too. No prefix is found from there on. None: of none.
        waits: Whether each token must be known before the next step, as under a grammar.
        grammar: What its tokens have to follow, serialised; the engine's matter.
        adapter: Name of the adapter that computes it; prefixes are shared within one alone.
        keep: What it keeps of its own tokens, see `Keep`; None: all.
        deadline_s: Time of the engine's clock at which it ends, said or not; None: never.
    """

    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    frames: Any = dataclasses.field(default=None, compare=False)
    images: Any = dataclasses.field(default=None, compare=False)
    max_tokens: Count = 64
    ends: tuple[int, ...] = ()
    sampling: SamplingConfig = SamplingConfig()
    score_from: Count | None = None
    waits: bool = False
    grammar: str | None = None
    adapter: str | None = None
    keep: Keep | None = None
    deadline_s: float | None = None

    def check(self, *, vocab: int, slots: int, reads: Reads = NOTHING) -> None:
        """Refuse what no model of this vocabulary can continue in a sequence of `slots` tokens.

        Args:
            vocab: Tokens that there are.
            slots: Of the sequence.
            reads: What it reads beside a prompt.

        Raises:
            InputError: Naming what is wrong and what would do.
        """
        check_tokens(self.prompt, vocab + reads.places(self, slots=slots))
        check_types(self, "")
        if self.keep is not None:
            self.keep.check()
        self.check_room(slots)
        self._check_scores()
        reads.check(self, vocab=vocab)
        check_ids(self.generated, vocab, name="generated")
        check_ids(self.ends, vocab, name="ends")
        self.sampling.check(vocab)

    def _check_scores(self) -> None:
        if self.score_from is None:
            return
        if self.sampling.logprobs is None:
            raise InputError("score_from: tells log-probabilities; give sampling.logprobs too")
        if self.images is not None:
            raise InputError(
                "score_from: places of images are no tokens that have a probability; leave it out"
            )

    def check_room(self, slots: int) -> None:
        """Refuse what has nothing to continue, or does not go into a sequence of `slots` tokens.

        Raises:
            InputError: With the numbers.
        """
        check_given(self.prompt, "prompt")
        check_length(len(self.prompt), self.max_tokens, slots)
        if len(self.generated) >= self.max_tokens:
            raise InputError(
                f"generated: it has {len(self.generated)} tokens, and max_tokens is"
                f" {self.max_tokens}, so none are left to say; ask for more"
            )
