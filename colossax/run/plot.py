"""The picture of a run's losses."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from colossax.run.records import Record, spelt

_INK = "#1f2933"
_GRID = "#e4e7eb"
_TRAIN = "#9fb3c8"
_SMOOTH = "#2f6fde"
_EVALUATED = ("#d64545", "#2f9e6e", "#8a4fd6", "#c98a1b")


def plot_losses(
    records: Iterable[Record],
    path: Path,
    *,
    title: str,
    unit: str = "",
    baselines: Mapping[str, float] = MappingProxyType({}),
    only: Sequence[str] = (),
) -> None:
    """Draw the training loss and what evaluators gave over steps, to a PNG.

    Args:
        records: Of steps, which have a `loss`, and of evaluations, which have metrics instead.
        path: Of the PNG.
        title: Above it.
        unit: Of the loss, or of what is drawn instead.
        baselines: Drawn as lines across.
        only: Metrics that are drawn in place of the loss and all there are; the first is one of
            steps.

    Cost: importing matplotlib, about half a second.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(records)
    metrics, name = metrics_of(rows), "training loss"
    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    if only:
        name, *others = only
        train = metrics.get(name, [])
        metrics = {other: metrics[other] for other in others if other in metrics}
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if train:
        steps, values = zip(*train, strict=True)
        axes.plot(steps, values, color=_TRAIN, linewidth=0.8, label=name)
        axes.plot(steps, smooth(values), color=_SMOOTH, linewidth=1.8, label="training, smoothed")
    for color, (name, points) in zip(itertools.cycle(_EVALUATED), metrics.items(), strict=False):
        _plot_metric(axes, name, points, color)
    for name, value in baselines.items():
        # In the legend: beside the line it would lie over what comes near it.
        label = f"{spelt(name)} {value:.3f}"
        axes.axhline(value, color=_INK, linestyle="--", linewidth=1, label=label)
    _dress(axes, title, unit)
    figure.savefig(path)


def metrics_of(records: Iterable[Record]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each metric of the evaluations."""
    metrics: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if "loss" not in record and name != "step" and value is not None:
                metrics.setdefault(name, []).append((record["step"], value))
    return metrics


def _plot_metric(axes, name: str, points: Sequence[tuple[int, float]], color: str) -> None:
    steps, values = zip(*points, strict=True)
    label = f"{spelt(name)} {values[-1]:.3f}"
    axes.plot(steps, values, "o-", color=color, markersize=5, label=label)


def smooth(values: Iterable[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def _dress(axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(unit, color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=_INK)
