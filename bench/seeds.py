"""Learning by several seeds: runs that are kept, and a picture of their curves."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common


def arguments(about: str, name: str) -> argparse.Namespace:
    """How many seeds, where their figures are kept, and where the picture goes.

    Args:
        about: What is measured.
        name: Of the figures' file and of the picture.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / f"{name}.json")
    picture = common.REPOSITORY / "docs" / f"{name}.png"
    parser.add_argument("--plot", type=Path, default=picture)
    return parser.parse_args()


def measured(
    args: argparse.Namespace,
    run: Callable[[int], dict[str, Any]],
    whole: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """Figures of each seed, by its number as text.

    Those that the file holds and that are `whole`, of as many steps, are not made again.
    """
    facts = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"seeds": {}}
    facts["seeds"] = {seed: one for seed, one in facts["seeds"].items() if whole(one)}
    facts["versions"] = common.versions()
    for seed in range(args.seeds):
        if str(seed) not in facts["seeds"]:
            facts["seeds"][str(seed)] = run(seed)
            common.write_json(args.out, facts)
    return facts["seeds"]


Curve = tuple[Sequence[int], Sequence[float]]
"""Steps, and a share after each."""


def draw(curves: Mapping[str, Curve], plot: Path, *, y: str, chance: float = 0.0) -> None:
    """A curve of each seed into a file, from what chance would be right up."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for seed, (steps, shares) in curves.items():
        axes.plot(steps, shares, label=f"seed {seed}")
    axes.set(xlabel="step", ylabel=y, ylim=(chance, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(plot)
