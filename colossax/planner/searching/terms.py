"""What bounds of ways to run are made of, of one way or of many at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class OfTokens(NamedTuple):
    """Seconds of what is sent for the tokens of a step.

    Attributes:
        waits, beside: Of all tokens going through the layers of a stage once: what compute waits
            for, and what it can hide.
        calls, calls_beside: Likewise of the hops of a microbatch.
        passed: Of all tokens handed on once, and their gradients.
        ends: Of what stands beside layers.
    """

    waits: float
    beside: float
    calls: float
    calls_beside: float
    passed: float
    ends: float


class OfWeights(NamedTuple):
    """Seconds of what is sent for weights.

    Attributes:
        gathers: Of all of a stage once.
        sums: Of their gradients once.
        states: Of new parameters.
    """

    gathers: float
    sums: float
    states: float


class Terms(NamedTuple):
    """What all numbers of microbatches of a way share, or columns of them for many ways.

    Attributes:
        tokens, weights: Sent.
        whole, once: See `Way`.
        left: Bytes of a device for what layers keep.
        inner: Devices that share a row.
        updates: Seconds of them.
        adds: Of a microbatch's gradients, added to the sums.
    """

    tokens: OfTokens
    weights: OfWeights
    whole: Any
    once: Any
    left: Any
    inner: Any
    updates: Any
    adds: Any


def columns_of(some: Sequence[Terms]) -> Terms:
    """Each term of many ways as a column."""
    tokens, weights, *others = zip(*some, strict=True)
    table = [*zip(*tokens, strict=True), *zip(*weights, strict=True), *others]
    all_of = np.array(table, np.float64)[:, :, None]
    of_tokens, of_weights = len(OfTokens._fields), len(OfWeights._fields)
    return Terms(
        OfTokens(*all_of[:of_tokens]),
        OfWeights(*all_of[of_tokens : of_tokens + of_weights]),
        *all_of[of_tokens + of_weights :],
    )
