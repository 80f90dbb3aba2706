"""Log-probabilities: of tokens that are said, and of a prompt's own where they are asked for."""

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from colossax.inference.engine.sampling import Chosen, told, untold
from colossax.inference.engine.values import emitted_of
from colossax.scheduling import Emitted, Ended, EngineRequest, Piece, StepPlan

Score = tuple[float, tuple[tuple[int, float], ...]]
"""Log-probability of a token, and the likeliest tokens there with theirs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """What a step tells of tokens of prompts, in the order of `Batch.scored`.

    Attributes:
        logprob: `[n]` float32; behind those that were asked for anything.
        top_tokens: The likeliest there, `[n, MOST_LOGPROBS]` int32.
        top_logprobs: Likewise of theirs.
    """

    logprob: Any
    top_tokens: Any
    top_logprobs: Any


def scored(
    logits_of: Callable[[Int[Array, " rows"]], Float[Array, "rows v"]],
    places: Int[Array, " n"],
    targets: Int[Array, " n"],
    rows: int,
) -> Scored | None:
    """Log-probabilities of tokens behind given ones of a step; None where the step has no room.

    Args:
        logits_of: Of tokens by their places in the step; of -1 anything.
        places: Those that are asked for first, then -1; `n` is a multiple of `rows`.
        targets: The token behind each.
        rows: Logits that are held at once.

    Cost: the head for as many tokens as are asked for, in turns of `rows`; nothing where none are.
    """
    if not places.size:
        return None

    def one(i: Array, found: Scored) -> Scored:
        def part(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i * rows, rows)

        here = told(logits_of(part(places)).astype(jnp.float32), part(targets))
        return jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, i * rows, 0),
            found,
            _as_scored(here),
        )

    turns = -(-jnp.sum(places >= 0) // rows)
    nothing = _as_scored(untold(places[:, None], targets))
    return jax.lax.fori_loop(0, turns, one, nothing)


def _as_scored(of: tuple[Array, Array, Array]) -> Scored:
    return Scored(logprob=of[0], top_tokens=of[1], top_logprobs=of[2])


class Place(NamedTuple):
    """Of a token of a prompt that a step scores the one behind.

    Attributes:
        request: Whose.
        at: In the step.
        position: Of the token that is scored.
        target: That token.
    """

    request: int
    at: int
    position: int
    target: int


class _Asked:
    """A request, and what is known of its prompt, by position."""

    def __init__(self, request: EngineRequest):
        self.logprobs = request.sampling.logprobs
        self.prompt, self.begin = request.prompt, request.score_from
        if request.generated:  # it was told with the first of them
            self.begin = None
        self.scores: dict[int, Score] = {}

    def tell(self) -> tuple[Score, ...]:
        """What its prompt scored, once."""
        told, self.scores, self.begin = self.scores, {}, None
        return tuple(told[position] for position in sorted(told))


class Probabilities:
    """What each request of an engine asks of log-probabilities, and what steps on their way will
    tell of prompts."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}
        self._scoring = set[int]()
        self._flying: deque[list[Place]] = deque()

    def __contains__(self, number: int) -> bool:
        """Whether the request has not ended."""
        return number in self._asked

    def add(self, number: int, request: EngineRequest) -> None:
        """Note what a request asks."""
        asked = self._asked[number] = _Asked(request)
        if asked.begin is not None:
            self._scoring.add(number)

    def forget(self, number: int) -> None:
        """It has ended."""
        self._asked.pop(number, None)
        self._scoring.discard(number)

    def sends(self, plan: StepPlan) -> list[Place]:
        """What a step has to score that is about to be sent; `lands` is called for it once."""
        found: list[Place] = []
        at = 0
        for piece in plan.pieces if self._scoring else ():
            asked = self._asked.get(piece.request)
            if asked is not None and asked.begin is not None and piece.tokens[0] >= 0:
                first = max(asked.begin, piece.start + 1)
                behind = min(piece.start + len(piece.tokens) + 1, len(asked.prompt))
                for position in range(first, behind):
                    place = at + position - 1 - piece.start
                    target = asked.prompt[position]
                    found.append(Place(piece.request, place, position, target))
            at += len(piece.tokens)
        self._flying.append(found)
        return found

    def lands(self, chosen: Chosen) -> tuple[Chosen, set[int]]:
        """Note what the oldest step scored.

        Returns:
            All else that the step gave, in host memory, and which requests' scores are no numbers.
        """
        places, broken = self._flying.popleft(), set[int]()
        if places:
            found: Scored = jax.tree.map(np.asarray, chosen.scored)
            for i, place in enumerate(places):
                asked = self._asked.get(place.request)
                if asked is None:
                    continue
                if np.isnan(found.logprob[i]):
                    broken.add(place.request)
                # What was told of a place first stands: it may be computed again, in other company.
                asked.scores.setdefault(place.position, _score(found, i, asked.logprobs))
        return jax.tree.map(np.asarray, dataclasses.replace(chosen, scored=None)), broken

    def emitted(self, piece: Piece, i: int, found: Chosen, last: Ended | None) -> Emitted:
        """What is told of a piece's token, or of the i-th behind it; else as of `emitted_of`."""
        asked = self._asked[piece.request]
        emitted = emitted_of(piece.request, (piece.seat, i), found, asked.logprobs, last)
        if asked.begin is None:
            return emitted
        self._scoring.discard(piece.request)
        return emitted._replace(scores=asked.tell())


def _score(found: Scored, i: int, logprobs: int | None) -> Score:
    pairs = zip(found.top_tokens[i, :logprobs], found.top_logprobs[i, :logprobs], strict=True)
    return float(found.logprob[i]), tuple((int(t), float(p)) for t, p in pairs if t >= 0)
