"""The plans that a search came to, as text for people."""

from collections.abc import Mapping

from colossax.config import MeshAxis, Plan
from colossax.planner.searching.disk import DISK_BYTES_PER_S
from colossax.planner.searching.island_layouts import IslandPrediction
from colossax.planner.searching.planned import Answer, Planned
from colossax.planner.searching.search import told
from colossax.planner.searching.seconds import Seconds
from colossax.planner.searching.words import SPENT, room_words, size_words, time_words
from colossax.planner.telling.columns import columns

_MOST = 5
"""Terms of memory, and kinds of collectives, that are told."""

_SHOWN = 0.001
"""Of a step's seconds, what a part has to take to be told."""

_RATE = f", at {DISK_BYTES_PER_S / 1e9:g} GB/s each way, as is assumed of a host's disk"


def describe_plans(title: str, answer: Answer, out: str | None) -> str:
    """The plans for people: the first in words, then a table."""
    first = answer.plans[0]
    rows = [f"{title}: {words(first)}", _spent(first.seconds), _memory(first, answer.room)]
    rows += _sent(first)
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
        f" {size_words(first.total_bytes)} {source} of {room_words(answer.room)} that a step"
        f" may take{_of_host(first)}"
    )


def _memory(one: Planned, room: float) -> str:
    return _device(one, room) + _of_host(one)


def _of_host(one: Planned) -> str:
    host = f"; {size_words(one.host_bytes)} of the host" if one.host_bytes else ""
    return host + (f", {size_words(one.disk_bytes)} of a file" if one.disk_bytes else "")


def _device(one: Planned, room: float) -> str:
    predicted = one.candidate.predicted
    terms, source = predicted.bytes.terms, "by formula, not compiled"
    if one.found is not None:
        terms = one.found["device_bytes"]["terms"]
        source = f"compiled ({size_words(predicted.bytes.total)} by formula)"
    shown = sorted(terms.items(), key=lambda term: -term[1])[:_MOST]
    told = ", ".join(f"{name} {size_words(size)}" for name, size in shown if size)
    if isinstance(predicted, IslandPrediction):
        each = ", ".join(size_words(size) for size in predicted.stages)
        told += f"; stages take {each} by formula, and this is the one with least room left"
    may = f"of {room_words(room)} that a step may take"
    return f"{size_words(one.total_bytes)} {source}, {may}: {told}"


def _spent(seconds: Seconds) -> str:
    """What a step's seconds are made of, and what of its collectives is hidden."""
    parts = [
        f"{time_words(spent)} of {SPENT[term]}{_RATE if term == 'disk' else ''}"
        for term, spent in seconds.terms.items()
        if spent >= _SHOWN * seconds.total
    ]
    hidden = seconds.beside - seconds.exposed
    beside = f"; {time_words(hidden)} of collectives are beside matmuls" if hidden else ""
    return f"{time_words(seconds.total)} a step: {', '.join(parts)}{beside}"


def _sent(one: Planned) -> list[str]:
    """What a device sends in a step, most first."""
    sent = sorted(one.collectives, key=lambda each: -each["ring_bytes"])
    if not sent:
        return []
    told = [
        f"{each['kind']} along {each['axis']} {size_words(each['ring_bytes'])}"
        for each in sent[:_MOST]
    ]
    rest = sum(each["ring_bytes"] for each in sent[_MOST:])
    told += [f"others {size_words(rest)}"] if rest else []
    return [f"each device sends: {', '.join(told)}"]


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
