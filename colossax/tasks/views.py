"""What is made of rows of text before a model sees them: some tokens masked, or spans left out."""

from collections.abc import Callable
from typing import Any

from colossax.data import MaskedRows, RowSource, SpanRows, Tokenizer
from colossax.errors import InputError
from colossax.tasks.config import DataConfig

View = Callable[[RowSource, int], RowSource]
"""`(rows, seed) -> rows`, of as many."""


def view_of(config: DataConfig, model: Any, tokenizer: Tokenizer) -> View:
    """What a run makes of its rows.

    Args:
        config: What is asked for.
        model: Configuration of the model, for the numbers of its vocabulary.
        tokenizer: Of the text.

    Raises:
        InputError: The tokenizer leaves no numbers for what stands in place of text.
    """
    if config.spans is not None:
        told, spans = config.spans.counts(config.seq_len)
        last = last_sentinel(tokenizer, model.vocab, spans)
        ends = {"start": model.decoder().start, "end": tokenizer.eos, "last": last}
        return lambda rows, seed: SpanRows(rows, told=told, spans=spans, seed=seed, **ends)
    if config.masking is not None:
        masking, mask = config.masking, mask_token(tokenizer, model.vocab)
        shares = {"rate": masking.rate, "random": masking.random, "kept": masking.kept}
        return lambda rows, seed: MaskedRows(
            rows, mask=mask, vocab=tokenizer.vocab_size, seed=seed, **shares
        )
    return lambda rows, seed: rows


def last_sentinel(tokenizer: Tokenizer, vocab: int, spans: int) -> int:
    """The number that stands for the first span of a row; the others are those below it.

    Args:
        tokenizer: Of the text.
        vocab: Numbers that the model knows, of which the last are sentinels.
        spans: Of a row.

    Raises:
        InputError: The tokenizer has some of those numbers itself.
    """
    if tokenizer.vocab_size + spans > vocab:
        raise InputError(
            f"data.spans: each of the {spans} spans of a row needs a number of its own, and of the"
            f" model's {vocab} the tokenizer has {tokenizer.vocab_size}; raise model.vocab to"
            f" {tokenizer.vocab_size + spans} or more, or give longer spans"
        )
    return vocab - 1


def mask_token(tokenizer: Tokenizer, vocab: int) -> int:
    """The tokenizer's own token for what is masked, else the first number behind its tokens.

    Args:
        tokenizer: Of the text.
        vocab: Numbers that the model knows.

    Raises:
        InputError: The tokenizer has none, and the model no number left.
    """
    if tokenizer.mask is not None:
        return tokenizer.mask
    if tokenizer.vocab_size >= vocab:
        raise InputError(
            f"data.masking: the tokenizer has {tokenizer.vocab_size} tokens, none of them for what"
            f" is masked, and the model's vocabulary of {vocab} has no number left for one; raise"
            " model.vocab by 1, or give a tokenizer that has [MASK] or <mask>"
        )
    return tokenizer.vocab_size
