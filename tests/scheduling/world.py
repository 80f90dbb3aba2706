"""A device that keeps what pages hold and finds fault with plans; a client that asks at random."""

import dataclasses
import itertools
import random
from collections import Counter, deque

import numpy as np

from colossax.scheduling import EngineRequest, Scheduler

VOCAB = 50


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

    def __init__(self, *, pages, page_tokens):
        self.slots = np.full(pages * page_tokens, -9)
        self.page_tokens = page_tokens
        self.whole, self.computed_by = {}, {}
        self.last = {}
        self.starts = {}

    def knows(self, number, request):
        """All that the request's tokens can ever be, one more than it may say among them."""
        said = after(request.prompt, request.max_tokens + 1, request.adapter)
        self.whole[number] = (*request.prompt, *said)
        self.computed_by[number] = 0 if request.adapter is None else VOCAB

    def run(self, plan):
        """The tokens of the pieces that emit.

        A seat reads what steps before have written and what it writes itself, which is less than
        hardware would grant.
        """
        self.check_pages(plan)
        fresh = {seat for seat, _ in plan.fresh}
        assert fresh <= {piece.seat for piece in plan.pieces}
        before, said = self.slots.copy(), []
        for piece in plan.pieces:
            whole, stop = self.whole[piece.request], piece.start + len(piece.tokens)
            tokens = [self.last[piece.seat] if t == -1 else t for t in piece.tokens]
            slots = self.slots_of(plan, piece)
            assert tuple(tokens) == whole[piece.start : stop], f"{piece} feeds other tokens"
            adapter = self.computed_by[piece.request]
            held = before[slots[: piece.start]] - adapter
            assert tuple(held) == whole[: piece.start], f"{piece} reads others' tokens"
            if piece.seat not in fresh:
                assert self.starts[piece.seat] == (piece.request, piece.start)
            self.starts[piece.seat] = (piece.request, stop)
            self.slots[slots[piece.start :]] = np.array(tokens) + adapter
            if piece.emits:
                self.last[piece.seat] = whole[stop]
                said.append(whole[stop])
        return said

    def slots_of(self, plan, piece):
        """Of all its tokens up to the last one of the piece."""
        places = np.arange(piece.start + len(piece.tokens))
        row = plan.table[piece.seat]
        return row[places // self.page_tokens] * self.page_tokens + places % self.page_tokens

    def check_pages(self, plan):
        """No page is written that another seat writes or reads."""
        read, written = Counter(), []
        for piece in plan.pieces:
            pages = self.slots_of(plan, piece) // self.page_tokens
            read.update(set(pages))
            written += set(pages[piece.start :])
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
    for run in scheduler._running:
        named = [prefixes.page(run.key(i)) for i in range(run.named)]
        assert named == run.pages[: run.named]
    assert stats.seats + len(scheduler._empty) == scheduler._seats


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
    def of(cls, *, depth=2, **sizes):
        sizes = {"page_tokens": 4, **sizes}
        device = Device(pages=sizes["pages"], page_tokens=sizes["page_tokens"])
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
        for number, token in zip(emitting, tokens, strict=True):
            if number not in self.ended:
                self.said[number].append(token)
        self.hear(self.scheduler.took(plan, tokens))

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
            assert piece.start + len(piece.tokens) < len(request.prompt) + request.max_tokens
            if request.waits:
                assert -1 not in piece.tokens
            if plan.kind == "decode":
                assert piece.emits and len(piece.tokens) == 1
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
    pages = rng.randint(6, 16 + 6 * seats)
    world = World.of(
        depth=rng.randint(1, 3),
        seats=seats,
        pages=pages,
        pages_a_seat=rng.randint(5, 30),
        mixed=(mixed := rng.randint(seats, seats + 36)),
        decode=rng.choice([None, rng.randint(1, mixed)]),
        max_wait=rng.choice([0.0, 10.0, 40.0]),
        reuse=rng.random() < 0.85,
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
