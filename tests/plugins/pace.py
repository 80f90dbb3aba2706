"""How slow this core is, so that what tests are said to cost is theirs and not the machine's.

Cores that machines share do the same work in one CPU-second or in two, from minute to minute. So
a small fixed piece of work is timed now and then while tests run; a run's pace is the mean.
"""

import statistics
import time

REFERENCE_S = 0.005
"""CPU-seconds that the piece takes on a core whose seconds costs and budgets are told in: one that
does the core of the tests in about 600. Cores from 0.004 to 0.014 were met."""

EVERY_S = 2.0

_TEXT = "\n".join(
    f"def f{n}(a, b=1):\n    return [x * b + a for x in range({n}) if x != a]" for n in range(120)
)


def probe():
    """The pace of this moment: CPU time of the piece, which Python compiles, by `REFERENCE_S`."""
    started = time.thread_time()
    compile(_TEXT, "piece", "exec")
    return (time.thread_time() - started) / REFERENCE_S


class Pace:
    """Probes of one worker, taken where some time has passed since the last."""

    def __init__(self):
        self._due = 0.0

    def probes(self):
        """What was found since this was asked last: one probe, or none."""
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + EVERY_S
        return [probe()]


def pace_of(probes):
    """The pace of a run; 1 where nothing was probed."""
    return statistics.fmean(probes) if probes else 1.0
