"""The plans that a search came to, as text for people."""

from collections.abc import Mapping

from colossax.config import MeshAxis, Plan
from colossax.planner.searching.planned import Answer, Planned
from colossax.planner.searching.search import told
from colossax.planner.telling.columns import columns

_GIB = 2**30


def describe_plans(title: str, answer: Answer, out: str | None) -> str:
    """The plans for people: the first in words, then a table."""
    first = answer.plans[0]
    rows = [
        f"{title}: {words(first)}",
        f"{first.seconds.total:.3f} s a step: {first.seconds.compute:.3f} s of matmuls,"
        f" {first.seconds.waited:.3f} s of collectives that they wait for,"
        f" {first.seconds.beside:.3f} s beside them"
        f" ({first.seconds.exposed:.3f} s of which stick out)",
        _memory(first, answer.room),
    ]
    if len(answer.plans) > 1:
        rows.append("")
        rows += _table(answer)
    if out is None:
        rows += ["", "to train with it: add --out plan.json here, and --plan plan.json there"]
    else:
        rows += ["", f"written to {out}; train with --plan {out}"]
    return "\n".join(rows) + "\n"


def _memory(one: Planned, room: float) -> str:
    room_told = f"of {room / _GIB:.1f} GiB that a step may take"
    if one.found is None:
        return f"{one.total_bytes / _GIB:.2f} GiB by formula, not compiled, {room_told}"
    terms = one.found["device_bytes"]["terms"]
    shown = sorted(terms.items(), key=lambda term: -term[1])[:5]
    told = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in shown if size > 0.005 * _GIB)
    return f"{one.total_bytes / _GIB:.2f} GiB compiled, {room_told}: {told}"


def _table(answer: Answer) -> list[str]:
    rows = [("plan", "seconds", "GiB", "why not first")]
    rows += [
        (
            f"{one.candidate.label}",
            f"{one.seconds.total:.3f}",
            f"{one.total_bytes / _GIB:.2f}",
            one.why_not_first or "-",
        )
        for one in answer.plans
    ]
    return columns(rows, indent="")


def words(one: Planned) -> str:
    """A plan in a sentence."""
    return f"{_mesh_words(one.plan)}; {told(one.candidate)}"


def _mesh_words(plan: Plan) -> str:
    names: Mapping[str, str] = {
        MeshAxis.DATA: "data over {}",
        MeshAxis.FSDP: "fsdp over {}",
        MeshAxis.EXPERT: "experts over {}",
        MeshAxis.RING: "rows around a ring of {}",
        MeshAxis.ULYSSES: "sequence for heads over {}",
        MeshAxis.TENSOR: "tensor over {}",
    }
    parts = [names.get(axis, f"{axis} {{}}").format(size) for axis, size in plan.mesh.items()]
    return ", ".join(parts) or "one device"
