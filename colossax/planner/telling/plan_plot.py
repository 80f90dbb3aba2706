"""The picture of plans: memory by term against the budget, what a step's time is made of, and when
it does what."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from colossax.planner.counting.inspection_plot import stack_bars
from colossax.planner.searching.planned import Answer, Planned
from colossax.planner.searching.words import SPENT, size_words, time_words
from colossax.planner.telling.time_line import TimeLine, time_line

_GIB = 2**30
_ROOM, _SMALL = 1.15, 0.05
"""Of an axis to its longest bar; and of a budget, below which plans are drawn without it."""

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
    _draw_memory(memory, names, answer)
    _draw_seconds(time, names, answer.plans)
    _draw(below.subplots(), line)
    figure.savefig(path, dpi=110, format="png")


def _draw_memory(axes: Any, names: list[str], answer: Answer) -> None:
    room, sizes = answer.room / _GIB, [one.total_bytes / _GIB for one in answer.plans]
    stack_bars(axes, names, _memory(answer), columns=2)
    for row, size in enumerate(sizes):
        near = 0.8 * room < size <= room  # behind the line, on which it would stand
        _beside(axes, row, room if near else size, size_words(size * _GIB))
    told = f"what a step may take, {room:.1f}"
    if max(sizes) < _SMALL * room:
        axes.set_xlim(0.0, _ROOM * max(sizes))
        axes.set_xlabel(f"device memory in GiB; far to the right: {told}")
    else:
        axes.axvline(room, color="black", linewidth=2)
        axes.set_xlim(0.0, _ROOM * max(room, *sizes))
        axes.set_xlabel(f"device memory in GiB; black: {told}")
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _draw_seconds(axes: Any, names: list[str], plans: Sequence[Planned]) -> None:
    totals = [one.seconds.total for one in plans]
    scale, unit = _unit(max(totals))
    spent = {name: [scale * one for one in each] for name, each in _seconds(plans).items()}
    stack_bars(axes, names, spent, columns=2)
    for row, one in enumerate(plans):
        beside = one.seconds.beside - one.seconds.exposed
        axes.barh(row, scale * beside, height=0.2, color="black", alpha=0.6)
        _beside(axes, row, scale * totals[row], time_words(totals[row]))
    axes.set_xlabel(f"a step in {unit}; thin black: collectives beside matmuls")
    axes.set_yticklabels([])
    axes.set_xlim(0.0, _ROOM * scale * max(totals))
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _unit(seconds: float) -> tuple[float, str]:
    """How many of what there are in a second, for times up to this."""
    return (1.0, "seconds") if seconds >= 0.1 else (1e3, "milliseconds")


def _beside(axes: Any, row: int, end: float, words: str) -> None:
    """A number at the end of a bar."""
    axes.annotate(words, (end, row), (4, 0), textcoords="offset points", va="center", fontsize=7)


def _draw(axes: Any, line: TimeLine) -> None:
    """The first plan's step, a row for each stage, or for the device and its links."""
    scale, unit = _unit(line.end)
    for number, kind in enumerate(line.kinds):
        for row in range(len(line.rows)):
            own = [b for b in line.bars if b.kind == kind and b.row == row]
            axes.broken_barh(
                [(scale * bar.start, scale * bar.seconds) for bar in own],
                (row - 0.4, 0.8),
                facecolor=f"C{number}",
                edgecolor="white",
                linewidth=0.3 if len(own) <= _OUTLINED else 0.0,
                label=kind if row == 0 else None,
            )
    axes.set_yticks(range(len(line.rows)), line.rows, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0.0, scale * line.end)
    axes.set_xlabel(f"a step of the first plan, in {unit} by formula; {line.note}")
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


def _seconds(plans: Sequence[Planned]) -> Mapping[str, list[float]]:
    """By what they are spent on, as far as any plan spends any."""
    spent = {name: [one.seconds.terms[term] for one in plans] for term, name in SPENT.items()}
    return {name: each for name, each in spent.items() if any(each)}
