"""The picture of what inspections found: memory, bytes sent, schedules of stages."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from colossax.pipeline import Costs, Table
from colossax.pipeline.picture import draw_schedule, schedule_size_in
from colossax.planner.counting.inspection import Inspection
from colossax.planner.counting.stage_cost import StageCost
from colossax.planner.counting.stage_programs import ProgramsCost

_GIB, _GB = 2**30, 1e9


def plot_inspections(by_name: Mapping[str, Inspection], path: Path) -> None:
    """Memory by term against the limit as stacked bars, ring bytes by axis beside it, as PNG.

    Below them, of plans with stages, each schedule; one that several plans have, once.

    Raises:
        OSError: The file cannot be written.
    """
    schedules = _schedules(by_name)
    sizes = [schedule_size_in(one.table, one.costs, one.form) for one in schedules.values()]
    heights = [1.6 + 0.7 * max(3, len(by_name)), *(height for _, height in sizes)]
    width = max([11.0, *(width for width, _ in sizes)])
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    bars, *rest = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_bars(bars, by_name)
    for part, (title, one) in zip(rest, schedules.items(), strict=True):
        draw_schedule(part, one.table, title=title, costs=one.costs, form=one.form)
    figure.savefig(path, dpi=110, format="png")


def _schedules(by_name: Mapping[str, Inspection]) -> dict[str, StageCost | ProgramsCost]:
    """The different ones, by what stands above them."""
    found: dict[tuple[Table, Costs | None], list[str]] = {}
    costs = {name: one.pipeline for name, one in by_name.items() if one.pipeline is not None}
    for name, cost in costs.items():
        found.setdefault((cost.table, cost.costs), []).append(name)
    several = len(found) > 1
    return {
        costs[names[0]].schedule + (f" ({', '.join(names)})" if several else ""): costs[names[0]]
        for names in found.values()
    }


def _draw_bars(figure, by_name: Mapping[str, Inspection]) -> None:
    memory, sent = figure.subplots(1, 2)
    names = list(by_name)
    terms = {term for one in by_name.values() for term, size in one.memory.terms.items() if size}
    weight = {t: max(one.memory.terms.get(t, 0) for one in by_name.values()) for t in terms}
    stack_bars(
        memory,
        names,
        {
            term: [by_name[name].memory.terms.get(term, 0) / _GIB for name in names]
            for term in sorted(terms, key=lambda t: -weight[t])
        },
    )
    for at, name in enumerate(names):
        limit = by_name[name].limit_bytes / _GIB
        memory.plot([limit, limit], [at - 0.45, at + 0.45], color="black", linewidth=2)
    memory.set_xlabel("device memory in GiB; black: what the GPU has")
    axes = sorted({link.totals.axis for one in by_name.values() for link in one.links})
    stack_bars(
        sent,
        names,
        {
            axis: [
                sum(x.totals.ring_bytes for x in by_name[name].links if x.totals.axis == axis) / _GB
                for name in names
            ]
            for axis in axes
        },
    )
    sent.set_xlabel("bytes sent per device and step in rings, in GB, by mesh axis")


def stack_bars(
    axes, names: list[str], parts: Mapping[str, list[float]], *, columns: int = 4
) -> None:
    """A bar for each name, made of what each part has of it; a legend of so many columns below."""
    left = [0.0] * len(names)
    for number, (label, widths) in enumerate(parts.items()):
        hatch = "//" if number >= 10 else None
        axes.barh(names, widths, left=left, height=0.7, label=label, hatch=hatch)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    if parts:
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=columns)
