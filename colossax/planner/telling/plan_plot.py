"""The picture of plans: memory by term against the budget, and what a step's time is made of."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from colossax.planner.counting.inspection_plot import stack_bars
from colossax.planner.searching.planned import Answer, Planned

_GIB = 2**30


def plot_plans(answer: Answer, path: Path) -> None:
    """A row for each plan, the fastest on top: its memory, and its step from left to right.

    Raises:
        OSError: The file cannot be written.
    """
    # Mesh above rules: in one line they would take the room of the bars.
    names = [
        f"{one.candidate.label.removesuffix(one.candidate.words).strip()}\n{one.candidate.words}"
        for one in answer.plans
    ]
    figure = Figure(figsize=(13.0, 2.8 + 0.7 * max(2, len(names))), layout="constrained")
    memory, time = figure.subplots(1, 2)
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
    figure.savefig(path, dpi=110, format="png")


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
    return {
        "matmuls": [one.seconds.compute for one in plans],
        "collectives waited for": [one.seconds.waited for one in plans],
        "collectives that stick out": [one.seconds.exposed for one in plans],
        "matmuls slowed by collectives": [one.seconds.slowed for one in plans],
        "updates and sums of gradients": [one.seconds.memory for one in plans],
        "transfers to and from host": [one.seconds.bus for one in plans],
    }
