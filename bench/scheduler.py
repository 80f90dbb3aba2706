"""What the scheduler of the serving engine costs, and how full it makes steps.

`decode`: every seat decodes, two steps on their way: microseconds for `next` and `took` of one
step, medians and 99th percentiles. They are the clock's: to ask for a thread's own time takes as
long as a step on some machines, and a median passes over what else ran. `load`: more requests than
seats, of mixed lengths: the same, how full `mixed` steps are while requests wait, and how many of a
hundred steps are `mixed`. `at once`: the same where prompts do not wait to fill a step. No device
and no model: tokens are made up.

    python bench/scheduler.py [--out FILE]
"""

import argparse
import functools
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))

from colossax.scheduling import EngineRequest, Scheduler

BAR_US = 300
BAR_FULL = 0.95
MIXED = 2048
PAGES_A_SEAT = 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seats", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "scheduler.json")
    arguments = parser.parse_args()
    cases = [
        {"case": name, "seats": seats, **case(seats, arguments.steps)}
        for seats in arguments.seats
        for name, case in CASES.items()
    ]
    result = {
        "benchmark": "scheduler",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "mixed": MIXED,
        "pages_a_seat": PAGES_A_SEAT,
        "bar_us": BAR_US,
        "bar_full": BAR_FULL,
        "cases": cases,
    }
    common.write_json(arguments.out, result)
    names = ["case", "seats", "next_us", "took_us", "both_us", "both_p99_us"]
    names += ["mixed_full", "mixed_percent", "seats_used"]
    print(common.table(names, [[row.get(name, "") for name in names] for row in cases]))


def decode(seats: int, steps: int) -> dict[str, Any]:
    """All seats decode, none ends."""
    scheduler = Scheduler(
        seats=seats, pages=seats * 256, pages_a_seat=PAGES_A_SEAT, mixed=MIXED, reuse=True
    )
    rng = random.Random(0)
    for _ in range(seats):
        prompt = tuple(rng.choices(range(1000), k=rng.randint(20, 200)))
        scheduler.add(EngineRequest(prompt=prompt, max_tokens=steps + 100, ends=(2000,)))
    return _run(scheduler, steps, more=lambda: None, warm=50)


def load(seats: int, steps: int, max_wait: float = 1.0) -> dict[str, Any]:
    """Twice as many requests as seats at all times, a third of them with one long beginning."""
    scheduler = Scheduler(
        seats=seats,
        pages=seats * 64,
        pages_a_seat=PAGES_A_SEAT,
        mixed=MIXED,
        max_wait=max_wait,
    )
    rng = random.Random(1)
    begin = tuple(rng.choices(range(1000), k=400))

    def more() -> None:
        while scheduler.stats.waiting < seats:
            own = tuple(rng.choices(range(1000), k=round(rng.lognormvariate(5.3, 1)) % 2000 + 1))
            prompt = begin + own if rng.random() < 1 / 3 else own
            said = round(rng.lognormvariate(5, 0.8)) % 1000 + 1
            scheduler.add(EngineRequest(prompt=prompt, max_tokens=said))

    return _run(scheduler, steps, more=more, warm=300)


CASES = {"decode": decode, "load": load, "at once": functools.partial(load, max_wait=0.0)}


def _run(scheduler: Scheduler, steps: int, *, more: Any, warm: int) -> dict[str, Any]:
    """Seconds of each step, two on their way, at 10 ms a step of the scheduler's clock."""
    flight, planned, took, full, kinds, used = deque(), [], [], [], [], []
    for step in range(warm + steps):
        more()
        start = time.perf_counter()
        plan = scheduler.next(step * 0.01)
        planned.append(time.perf_counter() - start)
        if plan is not None:
            flight.append(plan)
            kinds.append(plan.kind)
            used.append(len(plan.pieces))
            if plan.kind == "mixed" and scheduler.stats.waiting:
                full.append(plan.tokens / MIXED)
        if len(flight) == 2:
            oldest = flight.popleft()
            tokens = [1000 + step % 7] * sum(piece.emits for piece in oldest.pieces)
            start = time.perf_counter()
            scheduler.took(oldest, tokens)
            took.append(time.perf_counter() - start)
        else:
            took.append(0.0)
    both = [a + b for a, b in zip(planned[warm:], took[warm:], strict=True)]
    found = {
        "next_us": 1e6 * statistics.median(planned[warm:]),
        "took_us": 1e6 * statistics.median(took[warm:]),
        "both_us": 1e6 * statistics.median(both),
        "both_p99_us": 1e6 * statistics.quantiles(both, n=100)[-1],
        "seats_used": statistics.mean(used[warm:]),
        "mixed_percent": 100 * kinds[warm:].count("mixed") / len(kinds[warm:]),
        "mixed_steps_while_waiting": len(full),
    }
    return {**found, "mixed_full": statistics.mean(full)} if full else found


if __name__ == "__main__":
    main()
