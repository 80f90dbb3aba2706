"""The picture of a schedule."""

import colorsys
from collections.abc import Iterable, Sequence
from pathlib import Path

from colossax.pipeline.simulate import Report, simulate
from colossax.pipeline.table import KINDS, Kind, Op, Table
from colossax.pipeline.timeline import Costs, Span, free_spans, lockstep_spans, slots

_INK, _LINE, _VAIN = "#1f2933", "#cbd2d9", "#e4e7eb"
_COLORS = {
    Kind.FORWARD: "#2f6fde",
    Kind.BACKWARD: "#2f9e6e",
    Kind.INPUT: "#17a2a8",
    Kind.WEIGHT: "#e08a1e",
}
_AXES = {
    "lockstep": "tick",
    "free": "time; forward, input and weight gradient of a stage take 1 each",
}
_NAMES = {Kind.INPUT: "input gradient", Kind.WEIGHT: "weight gradient"}

_WIDEST_IN, _NARROWEST_IN = 24.0, 7.0
"""Of the picture."""

_UNIT_IN, _ROW_IN = 0.3, 0.34
"""Of the shortest operation, where there is room; of a stage."""


def plot_schedule(
    table: Table,
    path: Path,
    *,
    title: str = "",
    costs: Costs | None = None,
    form: str = "lockstep",
) -> None:
    """Draw a table to a PNG: a row for each stage, operations by time with their microbatches.

    In lock step ticks are set off by lines, and what a device runs on zeros is grey; free, the
    operations stand where the stages get to them.

    Args:
        table: As `checked` passes it.
        path: Of the PNG.
        title: Above it, before what the schedule takes.
        costs: How long operations take; None: forward, input and weight gradient alike.
        form: One of `FORMS`.

    Raises:
        OSError: The file cannot be written.

    Cost: importing matplotlib, about half a second, and 0.5 ms for each operation.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = schedule_size_in(table, costs, form)
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    draw_schedule(figure, table, title=title, costs=costs, form=form)
    figure.savefig(path, format="png")


def schedule_size_in(
    table: Table, costs: Costs | None = None, form: str = "lockstep"
) -> tuple[float, float]:
    """Width and height in inches in which a table can be read, within limits."""
    spans, report = _spans(table, costs or Costs(), form)
    width = max(_NARROWEST_IN, report.time * _unit_in(spans, report.time) + 1)
    return width, table.stages * _ROW_IN + 1.5


def draw_schedule(
    figure,
    table: Table,
    *,
    title: str = "",
    costs: Costs | None = None,
    form: str = "lockstep",
) -> None:
    """Draw a table into a figure, or a part of one; see `plot_schedule`.

    Args:
        figure: Of matplotlib, as large as `schedule_size_in` says, or larger.
        table: As `checked` passes it.
        title: Above it.
        costs: How long operations take.
        form: One of `FORMS`.
    """
    given, costs = costs, costs or Costs()
    spans, report = _spans(table, costs, form)
    width, _ = schedule_size_in(table, costs, form)
    axes = figure.subplots()
    if form == "lockstep":
        _draw_ticks(axes, table, costs)
    _draw_spans(axes, spans)
    _number(axes, spans, _unit_in(spans, report.time) * 72, len(str(table.microbatches - 1)))
    _dress(axes, table, report, title)
    axes.set_xlabel(_AXES[form] if given is None or form == "lockstep" else "seconds", color=_INK)
    _explain(figure, table, form, columns=4 if width < 10 else 8)


def _spans(table: Table, costs: Costs, form: str) -> tuple[list[Span], Report]:
    of = lockstep_spans if form == "lockstep" else free_spans
    return of(table, costs), simulate(table, costs, form)


def _unit_in(spans: Iterable[Span], time: float) -> float:
    """Inches of a second: room for a number in the shortest operation, within limits."""
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    return min(_UNIT_IN / shortest, (_WIDEST_IN - 1) / time) if time else 1.0


def _draw_ticks(axes, table: Table, costs: Costs) -> None:
    """Grey behind all that a slot runs, lines and numbers of ticks."""
    found = slots(table, costs)
    runs = [(slot.start, slot.end - slot.start) for slot in found]
    for stage in range(table.stages):
        axes.broken_barh(runs, (stage - 0.42, 0.84), facecolors=_VAIN, linewidth=0, zorder=1)
    starts = {slot.tick: slot.start for slot in reversed(found)}
    axes.vlines(starts.values(), -0.5, table.stages - 0.5, color=_LINE, linewidth=0.5, zorder=2)
    every = -(-len(starts) // 40)
    marked = [tick for tick in starts if tick % every == 0]
    axes.set_xticks([starts[tick] for tick in marked], [str(tick) for tick in marked])


def _draw_spans(axes, spans: Iterable[Span]) -> None:
    rows: dict[int, list[Span]] = {}
    for span in spans:
        rows.setdefault(span.stage, []).append(span)
    for stage, row in rows.items():
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in row],
            (stage - 0.42, 0.84),
            facecolors=[color(span.op) for span in row],
            edgecolors="white",
            linewidth=0.5,
            zorder=3,
        )


def _number(axes, spans: Iterable[Span], unit_pt: float, digits: int) -> None:
    """Microbatches on their operations, as large as fits; none where that cannot be read."""
    for span in spans:
        size = min(8.0, (span.end - span.start) * unit_pt / (0.62 * digits))
        if size >= 3.5:
            middle, ink = (span.start + span.end) / 2, _ink_on(color(span.op))
            style = {"fontsize": size, "ha": "center", "va": "center_baseline", "zorder": 4}
            axes.text(middle, span.stage, str(span.op.microbatch), color=ink, **style)


def color(op: Op) -> str:
    """Of an operation: that of its kind, lighter from chunk to chunk."""
    red, green, blue = (int(_COLORS[op.kind][at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light += (0.9 - light) * (1 - 0.6**op.chunk)
    shade = colorsys.hls_to_rgb(hue, light, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in shade)


def _ink_on(background: str) -> str:
    parts = [int(background[at : at + 2], 16) for at in (1, 3, 5)]
    bright = 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]
    return _INK if bright > 150 else "white"


def _dress(axes, table: Table, report: Report, title: str) -> None:
    takes = (
        f"{_count(table.stages, 'stage')}, {_count(table.microbatches, 'microbatch', 'es')}, bubble"
        f" {report.bubble:.1%}, at most {_count(max(report.saved), 'input')} saved on a stage"
    )
    axes.set_title(f"{title}: {takes}" if title else takes, loc="left", color=_INK, fontsize=10)
    axes.set_ylabel("stage", color=_INK)
    axes.set_yticks(range(table.stages))
    axes.set_ylim(table.stages - 0.5, -0.5)
    axes.set_xlim(0, report.time or 1)
    axes.tick_params(colors=_INK, length=0, labelsize=7)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _count(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{ending if number != 1 else ''}"


def _explain(figure, table: Table, form: str, columns: int) -> None:
    from matplotlib.patches import Patch

    there = {op.kind for _, _, op in table.operations()}
    shown = _some(range(table.chunks))
    patches = [
        Patch(facecolor=color(Op(kind, 0, chunk)), label=_label(kind, chunk, table.chunks))
        for kind in KINDS
        if kind in there
        for chunk in shown
    ]
    if form == "lockstep":
        patches.append(Patch(facecolor=_VAIN, label="runs on zeros"))
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=_INK,
        fontsize=8,
    )


def _some(chunks: Sequence[int]) -> list[int]:
    """All of a few, else the first and the last."""
    return list(chunks) if len(chunks) <= 3 else [chunks[0], chunks[-1]]


def _label(kind: Kind, chunk: int, chunks: int) -> str:
    name = _NAMES.get(kind, str(kind))
    return name if chunks == 1 else f"{name}, chunk {chunk}"
