"""The plans that a search came to, as text for people."""

from collections.abc import Mapping

from colossax.config import MeshAxis, Plan
from colossax.planner.searching.disk import DISK_BYTES_PER_S
from colossax.planner.searching.planned import Answer, Planned
from colossax.planner.searching.search import told
from colossax.planner.telling.columns import columns

_GIB = 2**30
_RATE = f", at {DISK_BYTES_PER_S / 1e9:g} GB/s each way, as is assumed of a host's disk"


def describe_plans(title: str, answer: Answer, out: str | None) -> str:
    """The plans for people: the first in words, then a table."""
    first = answer.plans[0]
    seconds = first.seconds
    rows = [
        f"{title}: {words(first)}",
        f"{time_words(seconds.total)} a step: {time_words(seconds.compute)} of matmuls,"
        f" {time_words(seconds.waited)} of collectives that they wait for,"
        f" {time_words(seconds.beside)} beside them"
        f" ({time_words(seconds.exposed)} of which stick out)"
        + (f", {time_words(seconds.bus)} of transfers to and from host" if seconds.bus else "")
        + (f", {time_words(seconds.disk)} of updates in a file{_RATE}" if seconds.disk else ""),
        _memory(first, answer.room),
    ]
    rows += [answer.rates] if answer.rates else []
    if len(answer.plans) > 1:
        rows.append("")
        rows += _table(answer)
    train = " ".join([f"--plan {out or 'plan.json'}", *first.by_leave])
    if out is None:
        rows += ["", f"to train with it: add --out plan.json here, and {train} there"]
    else:
        rows += ["", f"written to {out}; train with {train}"]
    return "\n".join(rows) + "\n"


def found_words(answer: Answer) -> str:
    """The first plan in a line, with what it takes."""
    first = answer.plans[0]
    source = "by formula" if first.found is None else "compiled"
    return (
        f"{words(first)}; {time_words(first.seconds.total)} a step by formula,"
        f" {size_words(first.total_bytes)} {source} of {answer.room / _GIB:.1f} GiB that a step"
        f" may take{_of_host(first)}"
    )


def _memory(one: Planned, room: float) -> str:
    return _device(one, room) + _of_host(one)


def _of_host(one: Planned) -> str:
    host = f"; {size_words(one.host_bytes)} of the host" if one.host_bytes else ""
    return host + (f", {size_words(one.disk_bytes)} of a file" if one.disk_bytes else "")


def _device(one: Planned, room: float) -> str:
    room_told = f"of {room / _GIB:.1f} GiB that a step may take"
    if one.found is None:
        return f"{size_words(one.total_bytes)} by formula, not compiled, {room_told}"
    terms = one.found["device_bytes"]["terms"]
    shown = sorted(terms.items(), key=lambda term: -term[1])[:5]
    told = ", ".join(f"{name} {size_words(size)}" for name, size in shown if size)
    return f"{size_words(one.total_bytes)} compiled, {room_told}: {told}"


def _table(answer: Answer) -> list[str]:
    rows = [("plan", "a step", "memory", "why not first")]
    rows += [
        (
            " ".join([one.candidate.label, *one.by_leave]),
            time_words(one.seconds.total),
            size_words(one.total_bytes),
            one.why_not_first or "-",
        )
        for one in answer.plans
    ]
    return columns(rows, indent="")


def time_words(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds:.3f} s" if seconds >= 0.1 or not seconds else f"{1e3 * seconds:.3g} ms"


def size_words(count: float) -> str:
    """Bytes for people."""
    return f"{count / _GIB:.2f} GiB" if count >= 0.1 * _GIB else f"{count / 2**20:.3g} MiB"


def words(one: Planned) -> str:
    """A plan in a sentence."""
    leave = f"; by leave: {', '.join(one.by_leave)}" if one.by_leave else ""
    return f"{mesh_words(one.plan)}, {one.candidate.words}; {told(one.candidate)}{leave}"


def mesh_words(plan: Plan) -> str:
    """A mesh in words."""
    names: Mapping[str, str] = {
        MeshAxis.STAGE: "{} stages",
        MeshAxis.DATA: "data over {}",
        MeshAxis.FSDP: "fsdp over {}",
        MeshAxis.EXPERT: "experts over {}",
        MeshAxis.RING: "rows around a ring of {}",
        MeshAxis.ULYSSES: "sequence for heads over {}",
        MeshAxis.TENSOR: "tensor over {}",
    }
    parts = [
        names.get(axis, f"{axis} {{}}").format(size) for axis, size in plan.mesh.items() if size > 1
    ]
    return ", ".join(parts) or "one device"
