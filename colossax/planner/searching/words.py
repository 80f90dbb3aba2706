"""Sizes and times for people, and what makes one plan slower than another."""

from colossax.planner.searching.seconds import Seconds

_GIB = 2**30

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


def spent_words(seconds: Seconds) -> dict[str, float]:
    """What a step's seconds are made of, as people call it; their sum is the step's."""
    return {
        "matmuls": seconds.compute,
        "collectives that matmuls wait for": seconds.waited,
        "collectives beside matmuls that stick out": seconds.exposed,
        "matmuls slowed by collectives beside them": seconds.slowed,
        "updates and sums of gradients": seconds.memory,
        "transfers to and from host memory": seconds.bus,
        "reads and writes of a file": seconds.disk,
        "calls and microbatches, whatever their sizes": seconds.fixed,
    }


def why_slower(one: Seconds, first: Seconds) -> str:
    """What makes a plan slower than the first, and what it has less of."""
    own, others = spent_words(one), spent_words(first)
    more = {name: own[name] - others[name] for name in own}
    most, least = max(more, key=lambda name: more[name]), min(more, key=lambda name: more[name])
    slower = f"{one.total / first.total - 1:.1%} slower"
    if more[most] <= 0:
        return slower
    told = f"{time_words(own[most])} of {most}, where the first has {time_words(others[most])}"
    though = ""
    if -more[least] >= _TOLD * more[most]:
        though = f", though {time_words(-more[least])} less of {least}"
    return f"{slower}: {told}{though}"
