"""The ring: what happens at the same time, what never does, and how it ends."""

import threading
import time

import pytest

from colossax.offload.disk.pipeline import RING, run_ring


def ignore(item, buffer):
    """Do nothing."""


class Recorder:
    """Buffers that refuse to be used out of turn."""

    def __init__(self):
        self.held = [None] * RING
        self.done = []

    def read(self, item, buffer):
        assert self.held[buffer] is None, "read into a buffer that was not written yet"
        self.held[buffer] = item, "read"

    def compute(self, item, buffer):
        assert self.held[buffer] == (item, "read")
        self.held[buffer] = item, "computed"

    def write(self, item, buffer):
        time.sleep(0.001 * (item % 3))
        assert self.held[buffer] == (item, "computed")
        self.held[buffer] = None
        self.done.append(item)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 30])
def test_every_item_passes_once_in_order(count):
    recorder, items = Recorder(), list(range(100, 100 + count))
    run_ring(items, read=recorder.read, compute=recorder.compute, write=recorder.write)
    assert recorder.done == items


def test_reading_computing_and_writing_overlap():
    """Each of the three waits for the two others: without all at once this never ends."""
    meet = threading.Barrier(3, timeout=20)

    def at(first, last):
        return lambda item, buffer: meet.wait() if first <= item <= last else None

    # while item 4 is computed, 3 is written and 5 or later is read
    run_ring(range(10), read=at(6, 6), compute=at(4, 4), write=at(3, 3))


def test_threads_are_where_the_docstring_says():
    seen = {}

    def note(what):
        return lambda item, buffer: seen.setdefault(what, set()).add(threading.current_thread())

    run_ring(range(8), read=note("read"), compute=note("compute"), write=note("write"))
    assert seen["compute"] == {threading.current_thread()}
    assert len(seen["read"]) == len(seen["write"]) == 1
    assert len(set.union(*seen.values())) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 1, 4, 11])
@pytest.mark.parametrize("stage", ["read", "compute", "write"])
def test_an_error_of_any_stage_reaches_the_caller(stage, at, error):
    before = set(threading.enumerate())
    calls = {name: [] for name in ("read", "compute", "write")}

    def make(name):
        def call(item, buffer):
            calls[name].append(item)
            if (name, item) == (stage, at):
                raise error(f"{name} {item}")

        return call

    with pytest.raises(error, match=f"{stage} {at}"):
        run_ring(range(12), **{name: make(name) for name in calls})
    assert set(threading.enumerate()) == before, "a thread is left"
    assert calls["write"] == list(range(len(calls["write"])))
    assert max(calls["compute"], default=0) <= at + RING, "went on after the error"


def test_what_is_not_under_way_when_it_fails_is_left_out():
    begun, second = [], threading.Event()

    def read(item, buffer):
        begun.append(item)
        if item == 1:
            second.set()
            time.sleep(0.3)

    def compute(item, buffer):
        assert second.wait(20)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_ring(range(12), read=read, compute=compute, write=ignore)
    assert begun == [0, 1]


def test_slow_work_is_waited_for():
    done = []

    def slow(item, buffer):
        time.sleep(0.05)
        done.append(item)

    run_ring(range(6), read=ignore, compute=ignore, write=slow)
    assert done == list(range(6))
