"""The picture of a run's losses."""

from collections.abc import Iterable
from pathlib import Path

from colossax.run.records import Record

_INK = "#1f2933"
_GRID = "#e4e7eb"
_TRAIN = "#9fb3c8"
_SMOOTH = "#2f6fde"
_VALIDATION = "#d64545"


def plot_losses(
    records: Iterable[Record], path: Path, *, title: str, unigram_entropy: float | None
) -> None:
    """Draw training and validation loss over steps, and the unigram entropy as a line, to a PNG.

    Cost: importing matplotlib, about half a second.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(records)
    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    held_out = [
        (r["step"], r["validation_loss"]) for r in rows if r.get("validation_loss") is not None
    ]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color=_TRAIN, linewidth=0.8, label="training loss")
        axes.plot(steps, smooth(losses), color=_SMOOTH, linewidth=1.8, label="training, smoothed")
    if held_out:
        steps, losses = zip(*held_out, strict=True)
        axes.plot(steps, losses, "o-", color=_VALIDATION, markersize=5, label="validation loss")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (steps[-1], losses[-1]),
            xytext=(-4, 8),
            textcoords="offset points",
            ha="right",
            color=_VALIDATION,
            fontweight="bold",
        )
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color=_INK, linestyle="--", linewidth=1)
        axes.annotate(
            f"unigram entropy {unigram_entropy:.3f}",
            (0.99, unigram_entropy),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            color=_INK,
        )
    _dress(axes, title)
    figure.savefig(path)


def smooth(values: Iterable[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def _dress(axes, title: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("nats per token", color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=_INK)
