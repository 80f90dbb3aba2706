"""The picture of what inspections found."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from colossax.planner.inspection import Inspection

_GIB, _GB = 2**30, 1e9


def plot_inspections(by_name: Mapping[str, Inspection], path: Path) -> None:
    """Memory by term against the limit as stacked bars, ring bytes by axis beside it, as PNG.

    Raises:
        OSError: The file cannot be written.
    """
    figure = Figure(figsize=(11, 1.6 + 0.7 * max(3, len(by_name))), layout="constrained")
    memory, sent = figure.subplots(1, 2)
    names = list(by_name)
    terms = {term for one in by_name.values() for term, size in one.memory.terms.items() if size}
    weight = {t: max(one.memory.terms.get(t, 0) for one in by_name.values()) for t in terms}
    _stack(
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
    _stack(
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
    figure.savefig(path, dpi=110, format="png")


def _stack(axes, names: list[str], parts: Mapping[str, list[float]]) -> None:
    left = [0.0] * len(names)
    for number, (label, widths) in enumerate(parts.items()):
        hatch = "//" if number >= 10 else None
        axes.barh(names, widths, left=left, height=0.7, label=label, hatch=hatch)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    if parts:
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4)
