"""Whose turn it is: by hand where one can say what has to come."""

import random

import pytest

from colossax.errors import InputError
from colossax.scheduling import EngineRequest, SamplingConfig, Scheduler
from tests.scheduling.world import World

SIZES = {"seats": 4, "pages": 40, "pages_a_seat": 20, "mixed": 8, "page_tokens": 4}


def shape(plan):
    """(request, start, how many tokens, whether it emits) of each piece."""
    return [(p.request, p.start, len(p.tokens), p.emits) for p in plan.pieces]


def test_prompts_in_chunks_beside_decodes():
    world = World.of(**SIZES)
    first, second = world.ask(*range(10), max_tokens=5), world.ask(*range(20, 27), max_tokens=2)
    plan = world.step()
    assert (plan.kind, shape(plan)) == ("mixed", [(first, 0, 8, False)])
    assert [request.prompt for _, request in plan.fresh] == [tuple(range(10))]
    assert shape(world.step()) == [(first, 8, 2, True), (second, 0, 6, False)]
    # Two more tokens: a decode, as whose token only the device knows, and the last of a prompt.
    plan = world.step()
    assert (plan.kind, shape(plan)) == ("decode", [(first, 10, 1, True), (second, 6, 1, True)])
    assert [piece.tokens for piece in plan.pieces] == [(-1,), (26,)]
    assert world.step().kind == "decode"
    world.drain()
    world.verdict()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_more_tokens_are_planned_than_wanted(depth):
    world = World.of(depth=depth, **SIZES)
    world.ask(1, 2, 3, max_tokens=6)
    world.drain()
    assert [tokens for _, tokens, _, _ in world.plans] == [3, 1, 1, 1, 1, 1]
    world.verdict()


def test_a_request_that_waits_leaves_its_step_out():
    world = World.of(depth=2, **SIZES)
    world.ask(1, 2, 3, max_tokens=3, waits=True)
    assert world.step() is not None
    assert world.scheduler.next(world.now) is None
    assert world.scheduler.busy
    world.drain()
    world.verdict()


def test_nothing_to_do():
    scheduler = Scheduler(**SIZES)
    assert not scheduler.busy and scheduler.next(0.0) is None
    assert not scheduler.cancel(0) and scheduler.gone() == []


def test_the_tables_rows_are_the_pages_of_seats():
    """An array is the same as the last one where no page was added."""
    world = World.of(depth=1, **SIZES)
    world.ask(*range(6), max_tokens=9)
    tables = [world.step().table for _ in range(6)]
    assert [table is tables[0] for table in tables] == [True] * 6
    world = World.of(depth=2, **SIZES)
    world.ask(*range(6), max_tokens=9)
    tables = [world.step().table for _ in range(6)]
    # Positions 6 and 7 lie on the second page, 8 to 10 on a third one.
    assert [table is tables[0] for table in tables] == [True] * 3 + [False] * 3
    assert tables[0] is not tables[3] is tables[4]


@pytest.mark.catches("the-oldest-loses-its-seat")
@pytest.mark.catches("preempted-to-the-end")
def test_the_youngest_loses_its_seat_and_gets_the_next_one():
    """Three of six pages for each of two; one that would find room waits behind them."""
    world = World.of(**{**SIZES, "pages": 6, "pages_a_seat": 6, "reuse": False})
    old, _ = (world.ask(*range(i, i + 7), max_tokens=12) for i in (0, 20))
    begun = []
    while world.scheduler.busy:
        plan = world.step()
        begun += [] if plan is None else [request.prompt[0] for _, request in plan.fresh]
        if old not in world.ended:
            assert old in [run.number for run in world.scheduler._running]
        if len(world.asked) == 2 and world.scheduler.stats.referenced == 6:
            world.ask(40, max_tokens=1)
    assert world.scheduler.stats.preemptions == 1
    assert begun == [0, 20, 20, 40]
    world.verdict()


@pytest.mark.catches("no-page-to-grow")
def test_none_begins_without_a_page_to_grow():
    """The last page is kept for those who have seats; one that needs no more begins."""
    world = World.of(**{**SIZES, "pages": 5, "pages_a_seat": 5})
    world.ask(*range(8), max_tokens=8)
    world.step()
    world.ask(*range(20, 28), max_tokens=8)
    world.step()
    assert world.scheduler.stats.seats == 1
    world.ask(30, max_tokens=3)
    world.step()
    assert world.scheduler.stats.seats == 2
    world.drain()
    world.verdict()
    assert world.scheduler.stats.preemptions == 0


def fill(world, *, count=4, tokens=30):
    for i in range(count):
        world.ask(*random.Random(i).choices(range(50), k=5), max_tokens=tokens)
    while world.scheduler.stats.seats < count:
        world.step()


@pytest.mark.catches("in-order-of-coming")
@pytest.mark.catches("whoever-waits-is-passed")
def test_the_longest_prefix_first_but_nobody_is_passed_for_ever():
    world = World.of(**{**SIZES, "max_wait": 60.0, "seats": 1, "depth": 1})
    begin = list(range(12))
    world.ask(*begin, max_tokens=2)
    world.drain()
    fill(world, count=1, tokens=4)
    alone = world.ask(*range(30, 40), max_tokens=4)
    asked = world.now
    order = []
    while alone not in order:
        while world.scheduler.stats.waiting < 3:
            world.ask(*begin, world.scheduler._added % 50, max_tokens=4)
        plan = world.step()
        order += [] if plan is None else [p.request for p in plan.pieces if plan.fresh]
        assert world.now - asked < 80
    assert len(order) > 5
    assert world.scheduler.stats.reused >= 8 * (len(order) - 1)
    world.drain()
    world.verdict()


@pytest.mark.catches("prefixes-in-spite-of-all")
def test_prefixes_are_found_or_left():
    prompt = tuple(range(12))
    for reuse, reused in ((True, 8), (False, 0)):
        world = World.of(**SIZES, reuse=reuse)
        for _ in range(2):
            world.ask(*prompt, max_tokens=3)
            world.drain()
        assert world.scheduler.stats.reused == reused
        world.verdict()


@pytest.mark.catches("all-compute-the-same")
def test_what_comes_at_once_is_computed_once():
    """One computes the prompt; the others begin when all but its last tokens can be found."""
    world = World.of(**{**SIZES, "pages": 80})
    for _ in range(4):
        world.ask(*range(39), max_tokens=3)
    plans = []
    while world.scheduler.busy:
        plan = world.step()
        plans += [] if plan is None else [plan.fresh]
    assert [len(fresh) for fresh in plans[:6]] == [1, 0, 0, 0, 0, 3]
    assert world.scheduler.stats.reused == 3 * 36
    world.verdict()


@pytest.mark.catches("scored-prompts-wait-for-one-another")
def test_prompts_that_are_scored_do_not_wait_for_what_they_may_not_find():
    world = World.of(**{**SIZES, "pages": 80})
    for _ in range(3):
        world.ask(*range(5), max_tokens=1, score_from=1, sampling=SamplingConfig(logprobs=0))
    assert len(world.step().fresh) > 1
    world.drain()
    assert world.scheduler.stats.reused == 0


def test_what_was_said_is_a_prefix_too():
    """A talk goes on: prompt, answer and all are found but for what is left of a page."""
    world = World.of(**SIZES)
    first = world.ask(*range(6), max_tokens=11)
    world.drain()
    said = world.said[first]
    world.ask(*range(6), *said, 1, 2, max_tokens=1)
    world.drain()
    assert world.scheduler.stats.reused == 16  # of 17 tokens, the last of which was never fed
    world.verdict()


def saturated(steps, **sizes):
    """Plans of a scheduler which more want to use than it has seats for."""
    scheduler = Scheduler(**{"seats": 64, "pages": 4000, "pages_a_seat": 64, "mixed": 512, **sizes})
    rng = random.Random(2)
    plans = []
    for step in range(steps):
        while scheduler.stats.waiting < 20:
            prompt = tuple(rng.choices(range(1000), k=rng.randint(20, 160)))
            scheduler.add(EngineRequest(prompt=prompt, max_tokens=rng.randint(10, 60)))
        plan = scheduler.next(step * 0.01)
        scheduler.took(plan, [0] * sum(piece.emits for piece in plan.pieces))
        plans.append((plan.kind, plan.tokens))
    return plans


@pytest.mark.catches("steps-half-full")
def test_steps_are_full_while_requests_wait():
    plans = saturated(400)
    full = [tokens / 512 for kind, tokens in plans if kind == "mixed"]
    assert len(full) > 60 and sum(full) / len(full) >= 0.95
    # What decodes meanwhile: seats do not stand empty for it.
    alone = [tokens for kind, tokens in plans if kind == "decode"]
    assert len(alone) > 60 and min(alone) >= 64 * 7 // 8


@pytest.mark.catches("a-step-is-never-full")
def test_none_waits_longer_than_that_for_a_full_step():
    """63 decode; of two short prompts one can begin, which fills no step."""
    scheduler = Scheduler(seats=64, pages=4000, pages_a_seat=64, mixed=512, max_wait=0.2)
    for i in range(63):
        scheduler.add(EngineRequest(prompt=(i,), max_tokens=500))
    assert len(took(scheduler, scheduler.next(0.0))) == 63
    for i in (70, 80):
        scheduler.add(EngineRequest(prompt=(i,) * 5, max_tokens=9))
    steps = [took(scheduler, scheduler.next(0.1 + 0.05 * i)) for i in range(6)]
    assert [len(pieces) for pieces in steps] == [63] * 4 + [64, 64]
    assert (steps[4][-1].start, len(steps[4][-1].tokens)) == (0, 5)


def took(scheduler, plan):
    scheduler.took(plan, [0] * sum(piece.emits for piece in plan.pieces))
    return plan.pieces


def test_prompts_do_not_wait_for_others_where_none_wait_behind_them():
    scheduler = Scheduler(seats=64, pages=4000, pages_a_seat=64, mixed=512)
    for i in range(60):
        scheduler.add(EngineRequest(prompt=(i,), max_tokens=500))
    took(scheduler, scheduler.next(0.0))
    scheduler.add(EngineRequest(prompt=(70,) * 5, max_tokens=9))
    assert len(took(scheduler, scheduler.next(0.1))) == 61


@pytest.mark.catches("the-first-waits-for-the-next")
def test_a_prompt_does_not_wait_for_those_that_wait_for_it():
    """Of two alike that are longer than a step one begins, and goes on."""
    scheduler = Scheduler(seats=64, pages=4000, pages_a_seat=64, mixed=512)
    for i in range(60):
        scheduler.add(EngineRequest(prompt=(i,), max_tokens=500))
    took(scheduler, scheduler.next(0.0))
    for _ in range(2):
        scheduler.add(EngineRequest(prompt=(70,) * 600, max_tokens=9))
    steps = [took(scheduler, scheduler.next(0.1)) for _ in range(3)]
    last = [[len(piece.tokens) for piece in pieces[60:]] for pieces in steps]
    assert last == [[452], [148], [1, 8]]


@pytest.mark.catches("the-larger-of-two-limits")
@pytest.mark.parametrize(("pages", "pages_a_seat"), [(3, 9), (9, 3)])
def test_what_would_never_fit_is_refused(pages, pages_a_seat):
    scheduler = Scheduler(**{**SIZES, "pages": pages, "pages_a_seat": pages_a_seat})
    with pytest.raises(InputError, match="^max_tokens: a prompt of 5 and 8 more make 13 tokens"):
        scheduler.add(EngineRequest(prompt=(1,) * 5, max_tokens=8))
    with pytest.raises(InputError, match="^prompt: it has 12 tokens, and at most 11 leave room"):
        scheduler.add(EngineRequest(prompt=(1,) * 12, max_tokens=1))
    with pytest.raises(InputError, match="^prompt: it is empty; give at least one token"):
        scheduler.add(EngineRequest(prompt=(), max_tokens=1))
    with pytest.raises(InputError, match="^generated: it has 3 tokens, and max_tokens is 3, so"):
        scheduler.add(EngineRequest(prompt=(1,), max_tokens=3, generated=(1, 2, 3)))
    assert not scheduler.busy
    scheduler.add(EngineRequest(prompt=(1,) * 5, max_tokens=7))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"seats": 0}, "^seats: found 0; give 1 or more$"),
        ({"pages": 0}, "^pages: found 0; give 1 or more$"),
        ({"page_tokens": 0}, "^page_tokens: found 0; give 1 or more$"),
        ({"pages_a_seat": 0}, "^pages_a_seat: found 0; give 1 or more$"),
        ({"decode": 0}, "^decode: found 0; give 1 or more$"),
        ({"max_wait": -1.0}, "^max_wait: found -1.0; give 0 or more$"),
        ({"mixed": 3}, "^mixed: found 3 tokens, fewer than the 4 that a step decodes; give 4 or"),
        ({"decode": 9}, "^mixed: found 8 tokens, fewer than the 9 that a step decodes; give 9 or"),
    ],
)
def test_sizes_out_of_bounds_are_refused(sizes, sentence):
    with pytest.raises(InputError, match=sentence):
        Scheduler(**{**SIZES, **sizes})


def test_plans_are_told_of_in_order_and_with_all_tokens():
    scheduler = Scheduler(**SIZES)
    scheduler.add(EngineRequest(prompt=(1, 2), max_tokens=5))
    first, second = scheduler.next(0.0), scheduler.next(0.0)
    with pytest.raises(ValueError, match="^plan: it is not the oldest on its way"):
        scheduler.took(second, [1])
    with pytest.raises(ValueError, match="^tokens: found 2; give 1, as pieces emit$"):
        scheduler.took(first, [1, 2])
    assert scheduler.took(first, [1]) == []
    assert scheduler.took(second, [1]) == []
    with pytest.raises(ValueError, match="^plan: "):
        scheduler.took(second, [1])


def test_who_is_cancelled_is_gone_at_once_with_its_pages():
    """Running, waiting, and over already; the token on its way is dropped."""
    world = World.of(**{**SIZES, "seats": 1})
    running, waiting = world.ask(*range(9), max_tokens=9), world.ask(5, 6, max_tokens=9)
    world.step()
    assert world.scheduler.cancel(running) and world.scheduler.cancel(waiting)
    assert not world.scheduler.cancel(running)
    assert [(one.request, one.reason) for one in world.scheduler.gone()] == [
        (running, "cancelled"),
        (waiting, "cancelled"),
    ]
    assert world.scheduler.gone() == []
    stats = world.scheduler.stats
    assert (stats.seats, stats.waiting, stats.referenced, stats.finished) == (0, 0, 0, 2)
    assert world.scheduler.busy  # a plan is on its way
    world.drain()


@pytest.mark.catches("ahead-without-what-is-cached")
@pytest.mark.catches("ahead-without-those-who-wait")
def test_what_a_request_would_find_before_it():
    """Tokens that nobody has read yet, its own among them, and a step for each without a seat."""
    world = World.of(**SIZES)
    asked = EngineRequest(prompt=tuple(range(9)), max_tokens=4)
    assert world.scheduler.ahead(asked) == (9, 0)
    world.ask(*range(10), max_tokens=5)
    assert world.scheduler.ahead(asked) == (10 + 9, 1)
    world.step()
    assert world.scheduler.ahead(asked) == (2 + 1, 1)  # two pages of it are there
    for first in range(20, 50, 10):
        world.ask(first, max_tokens=5)
    assert world.scheduler.ahead(asked) == (2 + 3 + 1 + 8, 4)  # and the fifth has no seat
    world.drain()
    assert world.scheduler.ahead(asked) == (1, 0)
    world.verdict()
