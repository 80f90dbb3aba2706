"""Sizes and times for people, and what makes one plan slower than another."""

from colossax.planner.searching.seconds import Seconds

_GIB = 2**30

SPENT = {
    "compute": "matmuls",
    "waited": "collectives that matmuls wait for",
    "exposed": "collectives beside matmuls that stick out",
    "slowed": "matmuls slowed by collectives beside them",
    "memory": "updates and sums of gradients",
    "bus": "transfers to and from host memory",
    "disk": "reads and writes of a file",
    "fixed": "calls and microbatches, whatever their sizes",
}
"""What people call the terms of `Seconds`."""

_TOLD = 0.1
"""Of what makes a plan slower: where another term falls by as much, that is told too."""


def time_words(seconds: float) -> str:
    """Seconds for people."""
    if not seconds:
        return "0 s"
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def size_words(count: float) -> str:
    """Bytes for people."""
    return f"{count / _GIB:.2f} GiB" if count >= 0.1 * _GIB else f"{count / 2**20:.3g} MiB"


def room_words(count: float) -> str:
    """Bytes that may be used, for people."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else size_words(count)


def why_slower(one: Seconds, first: Seconds) -> str:
    """What makes a plan slower than the first, and what it has less of."""
    own, others = one.terms, first.terms
    more = {name: own[name] - others[name] for name in own}
    most, least = max(more, key=lambda name: more[name]), min(more, key=lambda name: more[name])
    slower = f"{one.total / first.total - 1:.1%} slower"
    if more[most] <= 0:
        return slower
    has = time_words(others[most])
    told = f"{time_words(own[most])} of {SPENT[most]}, where the first has {has}"
    though = ""
    if -more[least] >= _TOLD * more[most]:
        though = f", though {time_words(-more[least])} less of {SPENT[least]}"
    return f"{slower}: {told}{though}"
