"""What goes between scheduler and engine: steps to run, and what came of them.

Named tuples where there is one for each token: a frozen dataclass takes four times as long to make.
"""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from colossax.scheduling.request import EngineRequest

StepKind = Literal["mixed", "decode"]

EndReason = Literal["stop", "length", "cancelled", "deadline", "error"]


class Piece(NamedTuple):
    """Tokens of one request in one step: a part of its prompt, or the token said last.

    Attributes:
        request: Its number.
        seat: Its.
        start: Position of the first. Where drafts are taken or not by steps on their way, the first
            one's at least: the device knows.
        tokens: Ids; -1 is the token that the seat sampled last, which only the device knows yet,
            and -2, -3, ... are what was drafted after it.
        emits: Whether the token that comes out continues the request.
        room: Tokens that the seat's pages hold.
    """

    request: int
    seat: int
    start: int
    tokens: tuple[int, ...]
    emits: bool
    room: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """One step of the engine.

    Attributes:
        kind: Which program: `decode` has what each seat said last and its drafts, `mixed` any
            tokens.
        pieces: At most one of a seat.
        fresh: (seat, request) of those that begin in this step; what the request has said by now
            is its `generated`.
        table: Pages of each seat, int32 `[seats, pages_a_seat]`; what lies behind the pages of a
            seat's tokens, or in rows without a request, has no meaning. It is this plan's own, or
            shared with plans that have the same pages, until `took` was called for it; then it is
            written anew.
        version: Of the table: plans of one version have the same numbers there.
        out: (page, place): what is copied to host memory before the step, as the page holds it
            behind the steps before. A place is written again when nobody needs what it holds.
        back: (place, page): what is copied to a page before the step, behind all that go out.
    """

    kind: StepKind
    pieces: tuple[Piece, ...]
    fresh: tuple[tuple[int, EngineRequest], ...]
    table: np.ndarray
    version: int
    out: tuple[tuple[int, int], ...] = ()
    back: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """How many it computes."""
        return sum(len(piece.tokens) for piece in self.pieces)


class Emitted(NamedTuple):
    """What the engine tells of one request after a step.

    Attributes:
        request: Its number.
        token: Its next token; None where it ended without, and where it got a seat.
        logprob: That of the token; None where nobody asked.
        top: The likeliest tokens with theirs, as many as were asked for.
        ended: Why it ended; None while it goes on.
        message: Of an error.
        scores: With the first token, of each token of the prompt from `score_from` on its
            log-probability, and the likeliest tokens there with theirs.
    """

    request: int
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ended: EndReason | None = None
    message: str = ""
    scores: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


class Ended(NamedTuple):
    """A request that is over.

    Attributes:
        request: Its number.
        reason: Why.
        unused: How many of the step's last tokens of it come after its end.
    """

    request: int
    reason: EndReason
    unused: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What a scheduler holds, and what it has done since it was made.

    Attributes:
        seats: Requests that run.
        waiting: Requests that do not run yet, or again.
        free: Pages that hold nothing.
        referenced: Pages of running requests.
        cached: Pages of none, kept as prefixes.
        planned: Tokens of all plans.
        reused: Tokens that were found as prefixes in place of being computed, in host memory too.
        preemptions: How often a request had to leave its seat.
        finished: Requests that are over, for whatever reason.
        drafted: Tokens that were drafted and looked at.
        accepted: Those of them that were said.
        hosted: Pages whose contents are in host memory.
        out: Pages that were copied there.
        back: Pages that were copied from there.
    """

    seats: int
    waiting: int
    free: int
    referenced: int
    cached: int
    planned: int
    reused: int
    preemptions: int
    finished: int
    drafted: int = 0
    accepted: int = 0
    hosted: int = 0
    out: int = 0
    back: int = 0

    def __add__(self, other: "Stats") -> "Stats":
        """Of both together."""
        return Stats(**{name: value + getattr(other, name) for name, value in vars(self).items()})
