"""The picture of plans: memory by term against the budget, what a step's time is made of, and when
it does what."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from colossax.planner.counting.inspection_plot import stack_bars
from colossax.planner.searching.planned import Answer, Planned
from colossax.planner.telling.time_line import TimeLine, time_line

_GIB = 2**30
_OUTLINED = 64
"""Bars of a kind in a row that have an outline; of more it would be all that one sees."""


def plot_plans(answer: Answer, path: Path) -> None:
    """A row for each plan, the fastest on top: its memory, and what its step is made of; below them
    the time line of the first plan's step.

    Raises:
        OSError: The file cannot be written.
    """
    # Mesh above rules: in one line they would take the room of the bars.
    names = [
        f"{one.candidate.label.removesuffix(one.candidate.words).strip()}\n{one.candidate.words}"
        for one in answer.plans
    ]
    line = time_line(answer.plans[0])
    heights = (2.8 + 0.7 * max(2, len(names)), 1.6 + 0.3 * min(16, len(line.rows)))
    figure = Figure(figsize=(13.0, sum(heights)), layout="constrained")
    both: Any = figure.subfigures(2, 1, height_ratios=heights)
    above, below = both
    memory, time = above.subplots(1, 2)
    stack_bars(memory, names, _memory(answer), columns=2)
    room = answer.room / _GIB
    memory.axvline(room, color="black", linewidth=2)
    memory.set_xlabel("device memory in GiB; black: what a step may take")
    stack_bars(time, names, _seconds(answer.plans), columns=2)
    for at, one in enumerate(answer.plans):
        beside = one.seconds.beside - one.seconds.exposed
        time.barh(at, beside, height=0.2, color="black", alpha=0.6)
    time.set_xlabel("seconds of a step; thin black: collectives beside compute")
    time.set_yticklabels([])
    _draw(below.subplots(), line)
    figure.savefig(path, dpi=110, format="png")


def _draw(axes: Any, line: TimeLine) -> None:
    """The first plan's step, a row for each stage, or for the device and its links."""
    for number, kind in enumerate(line.kinds):
        for row in range(len(line.rows)):
            own = [b for b in line.bars if b.kind == kind and b.row == row]
            axes.broken_barh(
                [(bar.start, bar.seconds) for bar in own],
                (row - 0.4, 0.8),
                facecolor=f"C{number}",
                edgecolor="white",
                linewidth=0.3 if len(own) <= _OUTLINED else 0.0,
                label=kind if row == 0 else None,
            )
    axes.set_yticks(range(len(line.rows)), line.rows, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0.0, line.end)
    axes.set_xlabel(f"a step of the first plan, in seconds by formula; {line.note}")
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(line.kinds))


def _memory(answer: Answer) -> Mapping[str, list[float]]:
    """By term: compiled where a plan is, else by formula."""
    plans = answer.plans
    terms = [
        one.candidate.predicted.bytes.terms
        if one.found is None
        else one.found["device_bytes"]["terms"]
        for one in plans
    ]
    weight = {name: max(each.get(name, 0) for each in terms) for each in terms for name in each}
    shown = sorted((name for name in weight if weight[name]), key=lambda name: -weight[name])
    return {name: [each.get(name, 0) / _GIB for each in terms] for name in shown}


def _seconds(plans: tuple[Planned, ...]) -> Mapping[str, list[float]]:
    """By what they are spent on, as far as any plan spends any."""
    spent = {
        "matmuls": [one.seconds.compute for one in plans],
        "collectives waited for": [one.seconds.waited for one in plans],
        "collectives that stick out": [one.seconds.exposed for one in plans],
        "matmuls slowed by collectives": [one.seconds.slowed for one in plans],
        "updates and sums of gradients": [one.seconds.memory for one in plans],
        "transfers to and from host": [one.seconds.bus for one in plans],
        "updates of layers in a file": [one.seconds.disk for one in plans],
    }
    return {name: each for name, each in spent.items() if any(each)}
