"""What no model can continue, in numbers of tokens."""

from collections.abc import Sequence

from colossax.config import at_least
from colossax.errors import InputError


def check_tokens(prompt: Sequence[int], vocab: int, *, name: str = "prompt") -> None:
    """Refuse an empty prompt, or ids outside the vocabulary.

    Raises:
        InputError: Naming the id.
    """
    check_given(prompt, name)
    check_ids(prompt, vocab, name=name)


def check_given(prompt: Sequence[int], name: str) -> None:
    """Refuse an empty prompt.

    Raises:
        InputError: That.
    """
    if not prompt:
        raise InputError(f"{name}: it is empty; give at least one token to continue")


def check_ids(tokens: Sequence[int], vocab: int, *, name: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InputError: Naming the id.
    """
    outside = next((t for t in tokens if not 0 <= t < vocab), None)
    if outside is not None:
        raise InputError(
            f"{name}: token {outside} is outside the vocabulary of {vocab};"
            f" use ids from 0 to {vocab - 1}"
        )


def check_length(prompt: int, max_tokens: int, limit: int) -> None:
    """Refuse a prompt, or a prompt with its continuation, above `limit` tokens.

    Raises:
        InputError: With the numbers.
    """
    if prompt >= limit:
        raise InputError(
            f"prompt: it has {prompt} tokens, and at most {limit - 1} leave room for a next one"
            f" in a sequence of {limit}; shorten it"
        )
    if prompt + max_tokens > limit:
        raise InputError(
            f"max_tokens: a prompt of {prompt} and {max_tokens} more make {prompt + max_tokens}"
            f" tokens, above the longest sequence of {limit}; ask for at most {limit - prompt}"
        )


def check_least(least: int, **numbers: int | float) -> None:
    """Refuse numbers below the least one.

    Raises:
        InputError: Naming one.
    """
    for name, number in numbers.items():
        at_least(least).check(number, name)


def check_budget(mixed: int, least: int) -> None:
    """Refuse steps of `mixed` tokens that are too short for what they decode.

    Raises:
        InputError: With the tokens that are needed.
    """
    if mixed < least:
        raise InputError(
            f"mixed: found {mixed} tokens, fewer than the {least} that a step decodes; give"
            f" {least} or more"
        )
