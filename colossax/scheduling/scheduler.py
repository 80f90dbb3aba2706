"""Which tokens of which requests go into the next step of the engine: numbers alone, no devices."""

import bisect
import heapq
import operator
from collections import deque
from collections.abc import Mapping, Sequence

from colossax.scheduling.checks import check_budget, check_least
from colossax.scheduling.drafts import Drafts
from colossax.scheduling.holdings import Holdings
from colossax.scheduling.plan import Ended, EndReason, Piece, Stats, StepPlan
from colossax.scheduling.queue import Queue
from colossax.scheduling.request import EngineRequest
from colossax.scheduling.running import NOWHERE, Run

LAST = (-1,)
"""The tokens of a piece that only the device knows yet."""

IDLE = 8
"""One of so many seats, or pages, may stand empty until prompts fill a step."""

_NUMBER = operator.attrgetter("number")


class Scheduler:
    """Prompts in chunks beside decodes, in steps of at most `mixed` tokens (SplitFuse).

    Each step takes one token of every request that decodes, the oldest first; what is left of the
    budget goes to prompts, those that have begun first, then to new ones while there are a seat
    and pages for a prompt and one page more. New ones begin in the order of coming, but a longer
    cached prefix goes first as long as nobody has waited for `max_wait`. A decode that finds no
    page takes that of the youngest request, which goes back to the front of the queue with what it
    has said.

    While more wait than can begin, prompts that would leave a `mixed` step unfilled wait for
    others, for `max_wait` at most, as long as seven of eight seats decode or seven of eight pages
    are in use: such a step takes as long as a full one.

    `next` may be called again before `took` is called for the last plan: it counts tokens, and
    does not have to know them. Where tokens are drafted it does not know how many there are
    either: a request has room for the most that steps on their way may say, or takes another's
    page for it, and for drafts behind them where pages are free.

    Cost on a CPU, `next` and `took` together: bench/scheduler.py.
    Reference: Holmes et al. 2024, DeepSpeed-FastGen; Agrawal et al. 2024, Sarathi-Serve.
    """

    def __init__(
        self,
        *,
        seats: int,
        pages: int,
        page_tokens: int = 16,
        pages_a_seat: int,
        mixed: int,
        decode: int | None = None,
        max_wait: float = 1.0,
        reuse: bool = True,
        draft: int = 0,
        adapts: bool = True,
        host_pages: int = 0,
    ):
        """With nobody there.

        Args:
            seats: Requests that run at once.
            pages: Of the cache.
            page_tokens: Tokens of one.
            pages_a_seat: Most of a request.
            mixed: Most tokens of a step.
            decode: Most tokens of a step that only decodes; None: one for each seat, and its
                drafts.
            max_wait: Seconds.
            reuse: Whether prefixes are kept and found again.
            draft: Tokens drafted after each that is said.
            adapts: See `Drafts`.
            host_pages: Prefixes whose pages were taken back, kept in host memory.

        Raises:
            InputError: Naming a number that is out of bounds.
        """
        check_least(0, draft=draft, max_wait=max_wait, host_pages=host_pages)
        decode = seats * (1 + draft) if decode is None else decode
        sizes: dict[str, int] = {"seats": seats, "pages": pages, "page_tokens": page_tokens}
        sizes["pages_a_seat"] = pages_a_seat
        check_least(1, **sizes, decode=decode)
        check_budget(mixed, max(seats * (1 + draft), decode))
        self._page_tokens, self._mixed, self._decode = page_tokens, mixed, decode
        self._seats, self._pages, self._max_wait = seats, pages, max_wait
        self._slots = pages_a_seat * page_tokens
        self._longest = min(pages, pages_a_seat) * page_tokens
        self._holdings = Holdings(**sizes, reuse=reuse, host_pages=host_pages)
        self._pool = self._holdings.pool
        self._drafts = Drafts(draft, adapts=adapts)
        self._queue = Queue(self._holdings.cached, max_wait)
        self._live: dict[int, Run] = {}
        self._running: list[Run] = []
        self._empty = list(range(seats))[::-1]
        self._plans: deque[StepPlan] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._gone: list[Ended] = []
        self._held_since_s: float | None = None
        self._added = self._planned = self._reused = self._preemptions = self._finished = 0

    @property
    def busy(self) -> bool:
        """Whether any request is not over, or any plan on its way."""
        return bool(self._live or self._plans)

    @property
    def stats(self) -> Stats:
        """What it holds and has done."""
        return Stats(
            seats=len(self._running),
            waiting=len(self._queue),
            **self._holdings.counts,
            planned=self._planned,
            reused=self._reused,
            preemptions=self._preemptions,
            finished=self._finished,
            drafted=self._drafts.drafted,
            accepted=self._drafts.accepted,
        )

    def add(self, request: EngineRequest) -> int:
        """Let a request wait for its turn; its number.

        What the vocabulary says of it is `EngineRequest.check`'s.

        Raises:
            InputError: It would not fit though it were alone, or there is nothing to say.
        """
        run = Run(self._added, request, self._page_tokens, self._drafts.most, self._mixed)
        request.check_room(self._slots if run.fits(self._pages) else self._longest)
        self._live[run.number], self._added = run, self._added + 1
        self._queue.add(run)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, run.number))
        return run.number

    def ahead(self, request: EngineRequest) -> tuple[int, int]:
        """What a request that came now would find before it, and how many have not ended.

        Tokens of prompts that are still to be computed, its own without the prefix that is there;
        and for each request more than there are seats, itself among them, those of a step.

        Cost: a look at each request; its own prompt is hashed as far as it is found.
        """
        own = Run(-1, request, self._page_tokens, step=self._mixed)
        waiting = [run for run in (*self._live.values(), own) if run.seat == NOWHERE]
        begun = sum(run.length - run.written for run in self._running)
        there = sum(self._holdings.cached(run) * self._page_tokens for run in waiting)
        unread = sum(len(run.ids) for run in waiting) - there
        beyond = max(0, len(self._live) + 1 - self._seats)
        return begun + unread + beyond * self._mixed, len(self._live)

    def cancel(self, number: int) -> bool:
        """End a request now; whether it was not over yet. `gone` tells of it."""
        return self._drop(number, "cancelled")

    def gone(self) -> list[Ended]:
        """Those who ended otherwise than by a token, since this was last asked."""
        gone, self._gone = self._gone, []
        return gone

    def next(self, now: float) -> StepPlan | None:
        """The next step; None where there is nothing to do before `took` or `add`.

        Args:
            now: Seconds of the clock of deadlines; never less than before.
        """
        self._queue.see(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            self._drop(heapq.heappop(self._deadlines)[1], "deadline")
        pieces: list[Piece] = []
        prompts, preempted = self._decodes(pieces)
        decodes = sum(len(piece.tokens) for piece in pieces) if self._drafts.most else len(pieces)
        left = self._mixed - decodes
        fresh: list[Run] = []
        if not self._holds(prompts, decodes, now):
            left = self._chunks(pieces, prompts, left)
            if not preempted:
                left = self._begin(pieces, fresh, left, now)
        if not pieces:
            return None
        plan = self._plan(pieces, fresh, decodes, self._mixed - left)
        for run in (*prompts, *fresh):  # not before: what a step writes is there for later ones
            self._holdings.name(run)
        return plan

    def took(
        self,
        plan: StepPlan,
        tokens: Sequence[int],
        more: Mapping[int, Sequence[int]] | None = None,
    ) -> list[Ended]:
        """Note what a step has said; who ended by it.

        Args:
            plan: The oldest that has not been told of.
            tokens: One for each piece that emits, in order.
            more: By request what was said behind it, where drafts were right.

        Raises:
            ValueError: It is another plan, or there are more or fewer tokens.
        """
        if not self._plans or self._plans[0] is not plan:
            raise ValueError("plan: it is not the oldest on its way; tell of plans in their order")
        emitting = [piece for piece in plan.pieces if piece.emits]
        if len(tokens) != len(emitting):
            raise ValueError(f"tokens: found {len(tokens)}; give {len(emitting)}, as pieces emit")
        self._plans.popleft()
        if not self._plans or self._plans[0].table is not plan.table:
            self._holdings.tables.give_back(plan.table)
        ended: list[Ended] = []
        live = self._live
        for piece, token in zip(emitting, tokens, strict=True):
            number = piece.request
            run = live.get(number)
            if run is None:  # it was over while this was on its way
                continue
            run.ids.append(token)
            if run.drafts:
                last = self._took_drafts(run, piece, more.get(number, ()) if more else ())
            else:  # `run.end`, looked up only where it has come
                last = run.end if token in run.ends or len(run.ids) == run.most else None
            if run.written >= run.next_name:
                self._holdings.name(run)
            if last is not None:
                ended.append(last)
        for one in ended:
            self._end(live[one.request])
        return ended

    def _took_drafts(self, run: Run, piece: Piece, more: Sequence[int]) -> Ended | None:
        """Note what was said behind a token that is noted; the end, where it came."""
        self._drafts.took(run, len(piece.tokens) - 1 if piece.tokens[0] < 0 else 0, len(more))
        last, left = run.end, list(more)[::-1]
        while left and last is None:
            run.ids.append(left.pop())
            run.length += 1
            run.written += run.seat != NOWHERE
            last = run.end
        return last and last._replace(unused=len(left))

    def _decodes(self, pieces: list[Piece]) -> tuple[list[Run], bool]:
        """Plan a token of each that decodes; those with more due, and whether one had to leave."""
        prompts: list[Run] = []
        before = self._preemptions
        for run in tuple(self._running):
            written = run.written
            if run.length - written != 1:
                prompts.append(run)
                continue
            known = written < len(run.ids)
            if run.length >= run.most or (run.waits and not known) or run.seat == NOWHERE:
                continue
            if (run.drafts or run.room < run.length) and not self._reach(run):
                continue
            if run.drafts and run.speaks:
                tokens = self._drafts.tokens(run)
            else:
                tokens = (run.ids[written],) if known else LAST
            pieces.append(Piece(run.number, run.seat, written, tokens, True, run.room))
            run.written = written + 1
            run.length += 1
            run.speaks = True
        return [run for run in prompts if run.seat != NOWHERE], self._preemptions > before

    def _reach(self, run: Run) -> bool:
        """Get room for the last token that steps on their way may say, and for drafts if there is.

        False where it had to leave its seat for it.
        """
        sure = min(run.length + self._drafts.most * run.in_flight, run.most)
        while run.room < sure:
            if not self._grow(run):
                return False
        self._spare(run, sure + 2 * run.drafts)  # those that are looked at, and the next ones
        return True

    def _spare(self, run: Run, tokens: int) -> None:  # where pages are free
        while run.room < min(tokens, run.most) and self._holdings.grow(run):
            pass

    def _grow(self, run: Run) -> bool:
        """Get one more page; False where the request had to leave its own seat for it."""
        while not self._holdings.grow(run):
            youngest = self._running[-1]
            self._leave(youngest)
            self._queue.put_back(youngest)
            self._preemptions += 1
            if youngest is run:
                return False
        return True

    def _holds(self, prompts: list[Run], decodes: int, now: float) -> bool:
        """Whether prompts wait until they fill a step together."""
        if not (decodes and len(self._queue) and self._unfilled(prompts, self._mixed - decodes)):
            self._held_since_s = None
            return False
        if self._held_since_s is None:
            self._held_since_s = now
        if now - self._held_since_s < self._max_wait:
            return True
        self._held_since_s = None
        return False

    def _unfilled(self, prompts: list[Run], left: int) -> bool:
        """Whether prompts leave some of a step, while others wait for scarce seats or pages."""
        empty = len(self._empty)
        scarce_seats = (empty + len(prompts)) * IDLE <= self._seats
        scarce_pages = self._pool.available * IDLE <= self._pages
        tokens = sum(run.length - run.written for run in prompts)
        if not (scarce_seats or scarce_pages) or tokens >= left:
            return False
        can_begin = 0
        for run in self._queue.first(empty):
            if self._holdings.comes(run):
                can_begin += 1
                continue
            if not self._holdings.fits(run):
                break
            can_begin += 1
            tokens += len(run.ids) - run.cached * self._page_tokens
            if tokens >= left:
                return False
        return bool(tokens) and can_begin < len(self._queue)

    def _chunks(self, pieces: list[Piece], prompts: Sequence[Run], left: int) -> int:
        """Plan as much of these prompts as the budget has left; what is left then."""
        for run in prompts:
            start, tokens = run.written, run.ids[run.written : run.written + left]
            if not tokens:
                break
            left -= len(tokens)
            run.written += len(tokens)
            emits = run.written == run.length
            run.length += emits
            run.speaks = emits
            if emits and run.drafts:
                self._spare(run, run.length + run.drafts)
            pieces.append(Piece(run.number, run.seat, start, tuple(tokens), emits, run.room))
        return left

    def _begin(self, pieces: list[Piece], fresh: list[Run], left: int, now: float) -> int:
        """Give seats to those whose turn it is, while there is some budget for each."""
        if not self._empty or not len(self._queue) or left < 1:
            return left
        unread = left
        for run in self._queue.in_turn(now):
            if self._holdings.comes(run):
                continue
            if self._holdings.fits(run):
                self._queue.remove(run)
                self._holdings.begin(run, self._empty.pop())
                self._reused += run.written
                bisect.insort(self._running, run, key=_NUMBER)
                fresh.append(run)
                unread -= len(run.ids) - run.written
                if unread < 1 or not self._empty:
                    break
            elif self._queue.overdue(run, now):
                break
        return self._chunks(pieces, fresh, left)

    def _plan(self, pieces: list[Piece], fresh: list[Run], decodes: int, tokens: int) -> StepPlan:
        plan = StepPlan(
            kind="decode" if decodes == tokens <= self._decode else "mixed",
            pieces=tuple(pieces),
            fresh=tuple((run.seat, run.asked()) for run in fresh),
            table=self._holdings.tables.current(used=bool(self._plans)),
            version=self._holdings.tables.version,
            **self._holdings.host.moves(),
        )
        self._planned += tokens
        self._plans.append(plan)
        return plan

    def _drop(self, number: int, reason: EndReason) -> bool:
        run = self._live.get(number)
        if run is not None:
            self._end(run)
            self._gone.append(Ended(number, reason))
        return run is not None

    def _end(self, run: Run) -> None:
        self._leave(run)
        self._queue.remove(run)
        del self._live[run.number]
        self._finished += 1

    def _leave(self, run: Run) -> None:
        """Let go of seat and pages, if it has them."""
        if run.seat != NOWHERE:
            del self._running[bisect.bisect_left(self._running, run.number, key=_NUMBER)]
            self._empty.append(self._holdings.leave(run))
