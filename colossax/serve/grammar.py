"""Grammars: which tokens may come next, from a JSON schema.

The server compiles a grammar once to see that it is one (`compiled`), and hands it on as text; the
engine's process makes a `Constraint` of it for each request.
"""

from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from colossax.data import Tokenizer
from colossax.errors import InputError

_OVERRIDES: Any = {"lenient": False}
"""Whatever the schema says of itself: a keyword that is not honoured is refused."""


def _limits() -> llguidance.LLParserLimits:
    """Smaller than the library's: a schema comes from a stranger. Messages quote no grammar."""
    return llguidance.LLParserLimits(
        max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False
    )


class Grammars:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: Of the model.
        vocab: Tokens that the model tells logits of.
        ends: Token ids that end a continuation.

    Cost: about 1 s to make for a vocabulary of 128,000, so once.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: tuple[int, ...]) -> None:
        self.vocab = vocab
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.definition, n_vocab=vocab, eos_token=list(ends) or tokenizer.eos
        )

    def compiled(self, schema: str, name: str = "response_format") -> str:
        """A grammar for JSON of this schema; takes up to seconds, without the interpreter's lock.

        Args:
            schema: As text.
            name: Of the field that it is of.

        Raises:
            InputError: It is no JSON schema, or has what is not supported; the sentence says what.
        """
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_OVERRIDES)
        except ValueError as problem:
            raise _refused(str(problem), name) from problem
        failed, told = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, self._tokenizer, limits=_limits()
        )
        if failed:
            raise _refused(told[0], name)
        return grammar

    def constraint(self, grammar: str) -> "Constraint":
        """The beginning of a continuation by this grammar.

        Compiles it anew, as `compiled` did, without the interpreter's lock: an engine calls it in
        a thread beside its steps.

        Raises:
            InputError: It is none.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return Constraint(matcher, self.vocab)


def _refused(why: str, name: str = "response_format") -> InputError:
    first = " ".join(why.partition("<state>")[0].split())[:300]
    return InputError(f"{name}: no grammar can be made of it ({first}); change the schema")


class Constraint:
    """Which tokens a continuation may go on with."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def mask(self) -> NDArray[np.uint32]:
        """Bit `t % 32` of item `t // 32` says whether token t may come; `[ceil(vocab / 32)]`.

        Once the grammar can only end, it has the ends alone.

        Raises:
            InputError: The grammar became too complex here.
        """
        words = np.zeros(-(-self._vocab // 32), np.uint32)
        told = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())
        count = min(len(words), len(told))
        words[:count] = told[:count]
        return words

    def took(self, token: int) -> None:
        """Go on after a token.

        Raises:
            InputError: The mask did not have it.
        """
        if not self._matcher.consume_token(token):
            raise InputError(f"grammar: token {token} cannot come here; sample by the mask")

    @property
    def can_end(self) -> bool:
        """Whether what was said is whole."""
        return self._matcher.is_accepting()
