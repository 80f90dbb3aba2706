"""The number of chunks, against a clock that runs the loop step by step, and against all others."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossax.config import ExpertRates
from colossax.sharding.experts.overlap import MOST_CHUNKS, best_chunks, chunked_seconds


def simulated(chunks, exchange_s, compute_s):
    """Two queues, of exchanges and of computation: what a turn of the loop begins, it ends."""
    turns = [[("send", 0)], *([] if chunks == 1 else [[("send", 1), ("compute", 0)]])]
    for turn in range(1, chunks - 1):
        turns.append([("send", turn + 1), ("receive", turn - 1), ("compute", turn)])
    last = chunks - 1
    turns.append([*([] if chunks == 1 else [("receive", last - 1)]), ("compute", last)])
    turns.append([("receive", last)])
    now, done = 0.0, set()
    for turn in turns:
        queues = {"exchange": now, "compute": now}
        for what, chunk in turn:
            needed = {"compute": ("send", chunk), "receive": ("compute", chunk)}.get(what)
            assert needed is None or needed in done
            queue = "compute" if what == "compute" else "exchange"
            queues[queue] += compute_s if what == "compute" else exchange_s
        done |= set(turn)
        now = max(queues.values())
    assert len(done) == 3 * chunks
    return now


TIMES = st.floats(1e-6, 1e-2)


@given(st.integers(1, 24), TIMES, TIMES)
def test_the_formula_is_the_clock(chunks, exchange_s, compute_s):
    found = chunked_seconds(chunks, exchange_s, compute_s)
    assert math.isclose(found, simulated(chunks, exchange_s, compute_s), rel_tol=1e-9)
    queues = max(2 * chunks * exchange_s + compute_s, 2 * exchange_s + chunks * compute_s)
    assert found <= queues * (1 + 1e-9)
    if compute_s >= 2 * exchange_s:
        assert math.isclose(found, queues, rel_tol=1e-9)


@pytest.mark.catches("chunks-without-latency")
@settings(deadline=None)
@given(TIMES, TIMES, st.floats(1e-5, 1e-1), st.floats(1e-5, 1e-1))
def test_the_number_chosen_is_the_best_there_is(exchange_s, compute_s, sent_s, computed_s):
    rates = ExpertRates(
        exchange_s=exchange_s, bytes_per_s=1e9, compute_s=compute_s, flops_per_s=1e12
    )
    times = {
        r: simulated(r, exchange_s + sent_s / r, compute_s + computed_s / r)
        for r in range(1, MOST_CHUNKS + 1)
    }
    chosen = best_chunks(rates, sent_s * 1e9, computed_s * 1e12)
    assert times[chosen] <= min(times.values()) * (1 + 1e-9)


def test_what_costs_much_to_begin_is_done_at_once():
    rates = ExpertRates(exchange_s=1.0, bytes_per_s=1e9, compute_s=1.0, flops_per_s=1e12)
    assert best_chunks(rates, 1e6, 1e9) == 1
