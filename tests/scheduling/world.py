"""A device that keeps what pages hold and finds fault with plans; a client that asks at random."""

import dataclasses
import itertools
import random
from collections import Counter, deque

import numpy as np

from colossax.scheduling import EngineRequest, Scheduler

VOCAB = 50

BEHIND = 40
"""Tokens that steps on their way may say of a request that is over."""


def after(tokens, count, adapter=None):
    """What the toy model says behind these tokens, when nobody ends it: it depends on all."""
    state = 1 if adapter is None else 2
    said = []
    for token in tokens:
        state = (state * 1_000_003 + token + 7) % (2**61 - 1)
    for _ in range(count):
        said.append((state >> 20) % VOCAB)
        state = (state * 1_000_003 + said[-1] + 7) % (2**61 - 1)
    return tuple(said)


def alone(request):
    """What a request says when it is served alone, and why it ends."""
    said = list(request.generated)
    every = after(request.prompt, request.max_tokens, request.adapter)
    assert every[: len(said)] == tuple(said)
    for token in every[len(said) :]:
        said.append(token)
        if token in request.ends:
            return tuple(said), "stop"
    return tuple(said), "length"


class Device:
    """Runs plans in their order; what a page holds is what was written to it last."""

    def __init__(self, *, pages, page_tokens, right=lambda _place: True):
        """Drafts for a place of a sequence are right where `right` says so."""
        self.right = right
        self.slots = np.full(pages * page_tokens, -9)
        self.page_tokens, self.host = page_tokens, {}
        self.whole, self.computed_by, self.ends = {}, {}, {}
        self.last = {}
        self.starts = {}

    def knows(self, number, request):
        """All that the request's tokens can ever be, and what steps may say behind its end."""
        said = after(request.prompt, request.max_tokens + BEHIND, request.adapter)
        self.whole[number] = (*request.prompt, *said)
        self.ends[number] = len(request.prompt) + len(alone(request)[0])
        self.computed_by[number] = 0 if request.adapter is None else VOCAB

    def run(self, plan):
        """What the pieces that emit say, one token or more.

        A seat reads what steps before have written and what it writes itself, which is less than
        hardware would grant. Drafts are written too, wrong ones among them.
        """
        self.move(plan)
        self.check_pages(plan)
        fresh = {seat for seat, _ in plan.fresh}
        assert fresh <= {piece.seat for piece in plan.pieces}
        before, said = self.slots.copy(), []
        for piece in plan.pieces:
            whole, start = self.whole[piece.request], self.start_of(piece)
            assert piece.start <= start
            if piece.seat not in fresh:
                assert self.starts[piece.seat] == (piece.request, start)
            if self.is_over(piece):
                said.append(whole[start : start + 1])
                continue
            tokens = [self.fed(piece, whole, start + i, t) for i, t in enumerate(piece.tokens)]
            slots = self.slots_of(plan, piece)
            if drafts := piece.tokens[-1] < -1:
                tokens = tokens[: len(slots) - start]
            pairs = zip(tokens, whole[start:], strict=False)
            right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            assert right == len(tokens) or (drafts and right), f"{piece} feeds other tokens"
            adapter = self.computed_by[piece.request]
            held = before[slots[:start]] - adapter
            assert tuple(held) == whole[:start], f"{piece} reads others' tokens"
            self.slots[slots[start:]] = np.array(tokens) + adapter
            stop = start + right
            self.starts[piece.seat] = (piece.request, stop)
            if piece.emits:
                self.last[piece.seat] = whole[stop]
                said.append(whole[start + 1 if drafts else stop : stop + 1])
        return said

    def move(self, plan):
        """What goes to host memory, and then what comes back."""
        pages = self.slots.reshape(-1, self.page_tokens)
        for page, place in plan.out:
            self.host[place] = pages[page].copy()
        for place, page in plan.back:
            pages[page] = self.host[place]

    def start_of(self, piece):
        """Where its first token stands: where drafts may have been right the device knows."""
        if piece.tokens[0] == -1:
            request, start = self.starts[piece.seat]
            assert request == piece.request
            return start
        return piece.start

    def is_over(self, piece):
        """Whether it has no room because it has ended, which only the device knows yet."""
        start = self.start_of(piece)
        return start >= max(piece.room, self.ends[piece.request])

    def fed(self, piece, whole, place, token):
        """A token that the piece names."""
        if token == -1:
            return self.last[piece.seat]
        if token < -1:  # all are right up to the first wrong one
            return whole[place] if self.right(place) else -7
        return token

    def slots_of(self, plan, piece):
        """Of all its tokens up to the last one of the piece; of drafts those that have room."""
        start = self.start_of(piece)
        stop = start + len(piece.tokens)
        if piece.tokens[-1] < -1:
            stop = min(stop, piece.room)
        assert start < stop <= piece.room, f"{piece} has no room"
        places = np.arange(stop)
        row = plan.table[piece.seat]
        return row[places // self.page_tokens] * self.page_tokens + places % self.page_tokens

    def check_pages(self, plan):
        """No page is written that another seat writes or reads."""
        read, written = Counter(), []
        for piece in plan.pieces:
            if self.is_over(piece):
                continue
            pages = self.slots_of(plan, piece) // self.page_tokens
            read.update(set(pages))
            written += set(pages[self.start_of(piece) :])
        assert all(read[page] == 1 for page in written), "a page that is written is shared"


def audit(scheduler):
    """Every page is free, referenced or a prefix, and nobody's count is off."""
    pool, prefixes, stats = scheduler._pool, scheduler._holdings.prefixes, scheduler.stats
    assert stats.free + stats.referenced + stats.cached == scheduler._pages
    counts = Counter(page for run in scheduler._running for page in run.pages)
    assert pool._references == [counts[page] for page in range(scheduler._pages)]
    apart = [*pool._free, *prefixes._idle, *counts]
    assert sorted(apart) == list(range(scheduler._pages))
    assert not set(pool._free) & set(prefixes._keys)
    assert set(prefixes._keys.values()) == set(prefixes._pages)
    assert len(scheduler._holdings._coming) <= stats.seats
    audit_host(scheduler)
    for run in scheduler._running:
        named = [prefixes.page(run.key(i)) for i in range(run.named)]
        assert named == run.pages[: run.named]
    assert stats.seats + len(scheduler._empty) == scheduler._seats


def audit_host(scheduler):
    """Every place is free or of one key that has no page; nothing is there without its parents."""
    holdings = scheduler._holdings
    host, prefixes = holdings.host, holdings.prefixes
    if not host._back:
        assert sorted([*host._free, *host._held.values()]) == list(range(host.places))
    assert not set(host._held) & set(prefixes._pages)
    assert host.out >= host.back and scheduler.stats.hosted == len(host._held)
    for run in scheduler._live.values():
        there = [
            prefixes.page(run.key(i)) is not None or run.key(i) in host
            for i in range(len(run.ids) // scheduler._page_tokens)
        ]
        assert there == sorted(there, reverse=True)


@dataclasses.dataclass
class World:
    """A scheduler, its device, and plans on their way."""

    scheduler: Scheduler
    device: Device
    depth: int = 2
    now: float = 0.0
    said: dict = dataclasses.field(default_factory=dict)
    asked: dict = dataclasses.field(default_factory=dict)
    ended: dict = dataclasses.field(default_factory=dict)
    flight: deque = dataclasses.field(default_factory=deque)
    plans: list = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, *, depth=2, right=lambda _place: True, **sizes):
        sizes = {"page_tokens": 4, **sizes}
        device = Device(pages=sizes["pages"], page_tokens=sizes["page_tokens"], right=right)
        return cls(Scheduler(**sizes), device, depth)

    def add(self, request):
        number = self.scheduler.add(request)
        self.asked[number] = request
        self.said[number] = list(request.generated)
        self.device.knows(number, request)
        return number

    def ask(self, *prompt, **fields):
        return self.add(EngineRequest(prompt=prompt, **fields))

    def step(self):
        """Plan one step; tell of the oldest where there are as many as the depth, or no more."""
        plan = self.scheduler.next(self.now)
        self.hear(self.scheduler.gone())
        for number in self.asked.keys() - self.ended.keys():
            deadline_s = self.asked[number].deadline_s
            assert deadline_s is None or deadline_s > self.now
        self.now += 1
        if plan is not None:
            self.check(plan)
            self.flight.append(plan)
            self.plans.append((plan.kind, plan.tokens, len(plan.pieces), len(plan.fresh)))
        if self.flight and (plan is None or len(self.flight) >= self.depth):
            self.tell()
        return plan

    def tell(self):
        """Run the oldest plan, as late as can be, and say what came of it."""
        plan = self.flight.popleft()
        tokens = self.device.run(plan)
        emitting = [piece.request for piece in plan.pieces if piece.emits]
        more = {number: said[1:] for number, said in zip(emitting, tokens, strict=True)}
        before = {number for number in emitting if number not in self.ended}
        ended = self.scheduler.took(plan, [said[0] for said in tokens], more)
        unused = {one.request: one.unused for one in ended}
        for number, said in zip(emitting, tokens, strict=True):
            if number in before:
                self.said[number] += said[: len(said) - unused.get(number, 0)]
        self.hear(ended)

    def hear(self, ended):
        for one in ended:
            assert one.request not in self.ended, "it ended twice"
            self.ended[one.request] = one.reason

    def check(self, plan):
        scheduler = self.scheduler
        budget = scheduler._decode if plan.kind == "decode" else scheduler._mixed
        assert 0 < plan.tokens <= budget
        seats = [piece.seat for piece in plan.pieces]
        assert len(set(seats)) == len(seats)
        for piece in plan.pieces:
            request = self.asked[piece.request]
            drafts = sum(token < -1 for token in piece.tokens)
            assert (
                piece.start + len(piece.tokens) - drafts < len(request.prompt) + request.max_tokens
            )
            assert drafts <= scheduler._drafts.most
            if request.waits:
                assert -1 not in piece.tokens
            if plan.kind == "decode":
                assert piece.emits and len(piece.tokens) == 1 + drafts
        for seat, request in plan.fresh:
            number = next(piece.request for piece in plan.pieces if piece.seat == seat)
            said = tuple(self.said[number])
            assert request == dataclasses.replace(self.asked[number], generated=said)

    def drain(self, most=10_000):
        """Steps until nobody is there, in so many at most."""
        for count in itertools.count():
            if not self.scheduler.busy:
                return count
            assert count < most, "somebody waits too long"
            self.step()

    def verdict(self):
        """All is over, and each said what it would have said alone."""
        stats = self.scheduler.stats
        assert (stats.seats, stats.waiting, stats.referenced) == (0, 0, 0)
        assert stats.finished == len(self.asked) == len(self.ended)
        for number, request in self.asked.items():
            said, reason = alone(request)
            if self.ended[number] in ("cancelled", "deadline"):
                assert tuple(self.said[number]) == said[: len(self.said[number])]
            else:
                assert (tuple(self.said[number]), self.ended[number]) == (said, reason)


def any_request(rng, longest):
    """A request that fits; many begin alike, some end early, wait, go on, or share no prefix."""
    begins = [random.Random(i).choices(range(VOCAB), k=40) for i in range(3)]
    most = rng.randint(1, min(24, longest - 1))
    length = rng.randint(1, min(60, longest - most))
    shared = rng.choice(begins)[: rng.randint(0, 40)]
    tail = rng.choices(range(VOCAB), k=length)
    prompt = tuple((shared + tail)[:length])
    adapter = rng.choice([None, None, "a"])
    generated = ()
    if rng.random() < 0.15:
        generated = after(prompt, rng.randint(0, most - 1), adapter)
    ends = set(rng.sample(range(VOCAB), rng.choice([0, 1, 3])))
    return EngineRequest(
        prompt=prompt,
        generated=generated,
        max_tokens=most,
        ends=tuple(ends - set(generated)),
        waits=rng.random() < 0.2,
        adapter=adapter,
    )


def play(seed, steps=150):
    """A world with a random history, over."""
    rng = random.Random(seed)
    seats = rng.choice([1, 2, 3, 5, 16])
    draft = rng.choice([0, 0, 1, 3, 5])
    luck, each = random.Random(seed), rng.choice([0.0, 0.5, 0.9, 1.0])
    pages = rng.randint(6, 16 + 6 * seats)
    world = World.of(
        depth=rng.randint(1, 3),
        seats=seats,
        pages=pages,
        pages_a_seat=rng.randint(5, 30),
        mixed=(mixed := rng.randint((1 + draft) * seats, (1 + draft) * seats + 36)),
        decode=rng.choice([None, rng.randint(1, mixed)]),
        draft=draft,
        adapts=rng.random() < 0.7,
        right=lambda _place: luck.random() < each,
        max_wait=rng.choice([0.0, 10.0, 40.0]),
        reuse=rng.random() < 0.85,
        host_pages=random.Random(-1 - seed).choice([0, 1, 4, 12, 40]),
    )
    longest = world.scheduler._longest
    rate = rng.uniform(0.05, 0.3 + seats / 16)
    for _ in range(steps):
        while rng.random() < rate / (1 + rate):
            request = any_request(rng, longest)
            if rng.random() < 0.1:
                later = world.now + rng.randint(0, 60)
                request = dataclasses.replace(request, deadline_s=later)
            world.add(request)
        if rng.random() < 0.03 and world.asked:
            number = rng.choice(list(world.asked))
            assert world.scheduler.cancel(number) == (number not in world.ended)
            world.hear(world.scheduler.gone())
        if world.flight and rng.random() < 0.1:
            world.tell()
        world.step()
        audit(world.scheduler)
    # The oldest goes on in every step that does not have to hear of another first, and is never
    # preempted: all together take no longer than one after another.
    left = [request for number, request in world.asked.items() if number not in world.ended]
    tokens = sum(len(request.prompt) + request.max_tokens for request in left)
    held = int(world.scheduler._max_wait) * len(left)
    world.drain((world.depth + 1) * tokens + held + 10)
    audit(world.scheduler)
    world.verdict()
    return world
