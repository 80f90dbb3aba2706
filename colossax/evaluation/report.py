"""Results of one checkpoint or several side by side: JSON, a table, a picture, and every item."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colossax.evaluation.benchmark import Result
from colossax.evaluation.scores import Score
from colossax.files import write_whole

RESULTS, TABLE, PICTURE = "results.json", "results.md", "scores.png"
LONGEST = 1e6
"""Larger numbers are told in powers of ten."""

_COLOURS = ("#2f6fde", "#d64545", "#2f9e6e", "#8a4fd6", "#c98a1b", "#1f2933")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What came of one checkpoint.

    Attributes:
        checkpoint: As it was named.
        step: Its training step; None of a model without.
        results: By the names of the benchmarks.
        computed: Tokens that went through the model.
        shared: Tokens that did not have to, as others of the same text had.
    """

    checkpoint: str
    step: int | None
    results: Mapping[str, Result]
    computed: int
    shared: int

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "tasks": {name: one.told() for name, one in self.results.items()},
            "tokens": {"computed": self.computed, "shared": self.shared},
        }


def spelt(score: Score | None) -> str:
    """A score with its error."""
    if score is None:
        return ""
    form = ".4f" if abs(score.value) < LONGEST else ".4g"
    error = "" if score.stderr is None else f" ± {score.stderr:{form}}"
    return f"{score.value:{form}}{error}"


def table(each: Sequence[Evaluated]) -> list[list[str]]:
    """Rows of texts, the first of them names: each metric of each benchmark, then each group's one.

    Checkpoints are columns.
    """
    rows = [["task", "items", "metric", *(one.checkpoint for one in each)]]
    for name, first in each[0].results.items():
        found = [one.results[name] for one in each]
        for i, metric in enumerate(first.scores):
            values = [spelt(one.scores.get(metric)) for one in found]
            rows.append(["" if i else name, "" if i else str(first.items), metric, *values])
        for group, scores in first.groups.items():
            values = [spelt(one.groups[group].get(first.metric)) for one in found]
            rows.append([f"  {group}", str(scores[first.metric].items), first.metric, *values])
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The table for a terminal."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, wide)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The table for a page."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "".join(f"| {' | '.join(x.replace('|', '/') for x in line)} |\n" for line in lines)


def written(each: Sequence[Evaluated], folder: Path) -> None:
    """Write results, table, picture, and the items of each checkpoint, to a folder.

    Raises:
        OSError: They cannot be written.
    """
    told = [one.told() for one in each]
    write_whole(folder / RESULTS, json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / TABLE, markdown(table(each)))
    for number, one in enumerate(each):
        lines = (
            json.dumps({"task": name, **record}, ensure_ascii=False) + "\n"
            for name, result in one.results.items()
            for record in result.records
        )
        write_whole(folder / f"items-{number}.jsonl", "".join(lines))
    draw(each, folder / PICTURE)


def draw(each: Sequence[Evaluated], path: Path) -> None:
    """Bars of each benchmark's metric with its error, checkpoints beside one another, to a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(each[0].results)
    figure = Figure(figsize=(max(4.0, 1.6 + 1.2 * len(names)), 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for i, (name, place) in enumerate(zip(names, axes, strict=True)):
        _draw_task(place, name, [one.results[name] for one in each])
        if i == 0:
            for bar, one in zip(place.patches, each, strict=True):
                bar.set_label(one.checkpoint)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    figure.savefig(path)


def _draw_task(axes: Any, name: str, results: Sequence[Result]) -> None:
    metric = results[0].metric
    scores = [one.scores[metric] for one in results]
    tops = [one.value + (one.stderr or 0.0) for one in scores]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(scores))]
    places, values = range(len(scores)), [one.value for one in scores]
    errors = [one.stderr or 0.0 for one in scores]
    axes.bar(places, values, yerr=errors, capsize=3, color=colours, width=0.8)
    for at, top, value in zip(places, tops, values, strict=True):
        axes.annotate(f"{value:.3g}", (at, top), ha="center", va="bottom", fontsize=7)
    axes.set_ylim(0, 1.15 * max(tops) or 1)
    axes.set_title(f"{name}\n{metric}", fontsize=8)
    axes.set_xticks([])
    axes.tick_params(labelsize=7, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
