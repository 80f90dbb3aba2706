"""How evenly a run used its experts: what is recorded of a step, and the picture of it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from colossax.typing import Metrics

LOAD, FULLEST = "expert_load", "expert_load_max"
"""Names in records: the load of each expert, layer by layer, and the fullest over the mean."""

_READ = ("expert_load", "dropped_choices", "dispatch_passes", "router_entropy")

_EVEN = 100
"""The load of an expert that gets as many choices as the others of its layer."""

_NUMBERS_A_STEP = 512
"""Loads that are recorded of a step, on average; with more experts, of fewer steps."""

_LAST_STEPS = 20
"""Over which the load at the end of a run is taken, or over so many records of it."""

_INK, _GRID = "#1f2933", "#e4e7eb"


def experts_record(step: int, metrics: Metrics) -> dict[str, Any]:
    """Numbers of a step whose layers have experts; none where they do not.

    `expert_load_max`: choices of the fullest expert of any layer over the mean of its layer.
    `dropped_choices`: of all layers and tokens. `dispatch_passes`: the most of any layer.
    `router_entropy`: of a token's scores, in nats, the mean over layers with experts.
    `expert_load`: a list for each layer, 100 for an even share, whole numbers, empty for a layer
    without experts; where a model has many experts not at every step.
    """
    if LOAD not in metrics:
        return {}
    named = {name: metrics[name] for name in _READ if name in metrics}
    values = {name: np.asarray(value) for name, value in jax.device_get(named).items()}
    loads = [_over_mean(layer) for layer in np.nan_to_num(np.atleast_2d(values[LOAD]))]
    most = max((float(layer.max()) for layer in loads if layer.size), default=0.0)
    found: dict[str, Any] = {FULLEST: round(most, 4)}
    if "dropped_choices" in values:
        share = float(np.sum(values["dropped_choices"]))
        found["dropped_choices"] = round(share * metrics["tokens"].item())
    if "dispatch_passes" in values:
        found["dispatch_passes"] = int(np.max(values["dispatch_passes"]))
    if "router_entropy" in values:
        entropy = np.atleast_1d(values["router_entropy"])
        chosen = [value for value, layer in zip(entropy, loads, strict=True) if layer.size]
        found["router_entropy"] = round(float(np.mean(chosen or [0.0])), 5)
    if step % max(1, -(-values[LOAD].size // _NUMBERS_A_STEP)) == 0:
        found[LOAD] = [np.rint(_EVEN * layer).astype(int).tolist() for layer in loads]
    return found


def _over_mean(layer: np.ndarray) -> np.ndarray:
    """Loads of a layer's experts over their mean; none of a layer that got nothing.

    Below 0 are experts that it has none of.
    """
    layer = layer[layer >= 0]
    return layer / layer.mean() if layer.sum() > 0 else layer[:0]


def scalars(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with numbers alone, as trackers take it: of loads the fullest of each layer."""
    loads = record.get(LOAD)
    found = {name: value for name, value in record.items() if name != LOAD}
    for number, layer in enumerate(loads or ()):
        if layer:
            found[f"{FULLEST}/{number:03}"] = max(layer) / _EVEN
    return found


def load_at_the_end(records: Iterable[Mapping[str, Any]]) -> np.ndarray | None:
    """Load of each expert over the mean of its layer, `[layers, experts]`; NaN for what is none.

    None where nothing is known.
    """
    loads = _filled([record[LOAD] for record in records if LOAD in record])
    return loads[-_LAST_STEPS:].mean(axis=0) if len(loads) else None


def _filled(loads: Sequence[Any]) -> np.ndarray:
    """`[steps, layers, experts]`, over the mean; NaN where a layer has fewer experts than another.

    Steps before the first one from which on all are of the last one's model are left out.
    """
    if not loads or not any(loads[-1]):
        return np.zeros((0, 0, 0))
    layers, experts = len(loads[-1]), max(map(len, loads[-1]))
    alike = [len(load) == layers and all(len(layer) <= experts for layer in load) for load in loads]
    first = max((at + 1 for at, one in enumerate(alike) if not one), default=0)
    filled = np.full((len(loads) - first, layers, experts), np.nan)
    for at, load in enumerate(loads[first:]):
        for number, layer in enumerate(load):
            filled[at, number, : len(layer)] = layer
    return filled / _EVEN


def experts_line(records: Iterable[Mapping[str, Any]]) -> str | None:
    """In one sentence; None where there are no experts."""
    rows = list(records)
    load = load_at_the_end(rows)
    if load is None:
        return None
    layer, expert = np.unravel_index(np.nanargmax(load), load.shape)
    told = [record for record in rows if FULLEST in record]
    dropped = sum(record.get("dropped_choices", 0) for record in told)
    most = max(record.get("dispatch_passes", 1) for record in told)
    return (
        f"experts: the fullest, number {expert} of layer {layer}, had {np.nanmax(load):.2f} times"
        f" the mean load at the end, the emptiest {np.nanmin(load):.2f}; {dropped:,} choices"
        f" dropped, at most {most} pass{'es' if most > 1 else ''}"
    )


def plot_experts(records: Iterable[Mapping[str, Any]], path: Path, *, title: str) -> bool:
    """Draw how experts were used to a PNG; False where records say nothing of them.

    Above, the load of each expert in each layer at the end, over the mean of the layer; below, the
    fullest and the emptiest expert of each layer over steps.

    Args:
        records: Of steps.
        path: Of the PNG.
        title: Above it.

    Cost: importing matplotlib, about half a second.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [record for record in records if LOAD in record]
    load = load_at_the_end(rows)
    if load is None:
        return False
    figure = Figure(figsize=(8, 6.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    _draw_map(figure, above, load)
    above.set_title(title, loc="left", color=_INK, fontsize=11)
    loads = _filled([row[LOAD] for row in rows])
    _draw_course(below, [row["step"] for row in rows[-len(loads) :]], loads)
    figure.savefig(path)
    return True


def _draw_map(figure: Any, axes: Any, load: np.ndarray) -> None:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    most = max(2.0, float(np.nanmax(load)))
    shown = axes.imshow(
        load, aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, most), interpolation="none"
    )
    layers, experts = load.shape
    if load.size <= 128:
        for layer in range(layers):
            for expert in range(experts):
                value = load[layer, expert]
                if np.isnan(value):
                    continue
                dark = value > 1 + 0.6 * (most - 1) or value < 0.3
                axes.text(
                    expert,
                    layer,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else _INK,
                )
    axes.set_xlabel("expert", color=_INK)
    axes.set_ylabel("layer", color=_INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    _undress(axes)
    bar = figure.colorbar(shown, ax=axes, pad=0.01)
    bar.set_label("load over the mean, at the end", color=_INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=_INK, length=0)


def _draw_course(axes: Any, steps: list[int], loads: np.ndarray) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    numbers = [at for at in range(loads.shape[1]) if not np.isnan(loads[-1, at]).all()]
    layers = len(numbers)
    colors = colormaps["viridis"](np.linspace(0.05, 0.85, layers))
    marker = "." if len(steps) == 1 else ""
    for at, layer in enumerate(numbers):
        label = f"layer {layer}" if at in (0, layers - 1) or layers <= 6 else None
        for values in (np.fmax.reduce(loads[:, layer], -1), np.fmin.reduce(loads[:, layer], -1)):
            axes.plot(steps, values, color=colors[at], linewidth=1.2, marker=marker, label=label)
            label = None
    axes.axhline(1.0, color=_INK, linestyle="--", linewidth=1)
    axes.set_xlabel("step", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("fullest and emptiest expert,\nover the mean", color=_INK)
    axes.set_ylim(0, 1.25 * np.nanmax(loads))  # room for the legend
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    _undress(axes)
    axes.legend(frameon=False, labelcolor=_INK, ncols=6, loc="upper right")


def _undress(axes: Any) -> None:
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
