"""Plans for serving, as text for people."""

from colossax.planner.searching.words import room_words, size_words, time_words
from colossax.planner.serving.planned import PlannedServing, ServingAnswer
from colossax.planner.telling.columns import columns
from colossax.planner.telling.plans import mesh_words


def describe_serving(title: str, answer: ServingAnswer, out: str | None) -> str:
    """The plans for people: the first in words, then a table."""
    first = answer.best
    seconds = first.seconds
    rows = [
        f"{title}: {serving_words(first)}",
        f"{first.tokens_per_second:.0f} tokens/s, each request one every"
        f" {time_words(seconds.total)}, all as long as they may be:"
        f" {time_words(seconds.reading)} to read weights and cache,"
        f" {time_words(seconds.compute)} of matmuls beside it,"
        f" {time_words(seconds.waited)} of collectives"
        + (f", {time_words(seconds.handed + seconds.idle)} of stages" if seconds.handed else ""),
        _memory(first, answer.room),
    ]
    if len(answer.plans) > 1:
        rows += ["", *_table(answer)]
    words = " ".join(first.words)
    if out is None:
        rows += ["", f"to serve with it: add --out plan.json here, and --plan plan.json {words} to"]
        rows[-1] += " colossax serve"
    else:
        rows += ["", f"written to {out}; serve with --plan {out} {words}"]
    return "\n".join(rows) + "\n"


def serving_words(one: PlannedServing) -> str:
    """A plan in a sentence."""
    candidate = one.candidate
    many = f"{candidate.all_seats} requests at once"
    many = "1 request at a time" if candidate.all_seats == 1 else many
    each = f", {candidate.seats} of each replica" if candidate.replicas > 1 else ""
    return f"{mesh_words(one.plan)}; {many}{each}, of up to {one.slots} tokens"


def found_serving_words(answer: ServingAnswer) -> str:
    """The first plan in a line, with what it takes."""
    first = answer.best
    source = "by formula" if first.found is None else "compiled"
    return (
        f"{serving_words(first)}; {first.tokens_per_second:.0f} tokens/s by formula,"
        f" {size_words(first.total_bytes)} {source} of {room_words(answer.room)} that an engine"
        " may take"
    )


def _memory(one: PlannedServing, room: float) -> str:
    told = f"of {room_words(room)} that an engine may take"
    if one.found is None:
        terms = vars(one.candidate.bytes)
        head = f"{size_words(one.total_bytes)} by formula, not compiled, {told}"
    else:
        terms = one.found.to_json()["terms"]
        head = f"{size_words(one.total_bytes)} compiled, {told}"
    shown = sorted(terms.items(), key=lambda term: -term[1])
    return f"{head}: {', '.join(f'{name} {size_words(size)}' for name, size in shown)}"


def _table(answer: ServingAnswer) -> list[str]:
    rows = [("plan", "tokens/s", "a token", "memory", "why not first")]
    rows += [
        (
            one.candidate.label,
            f"{one.tokens_per_second:.0f}",
            time_words(one.seconds.total),
            size_words(one.total_bytes),
            one.why_not_first or "-",
        )
        for one in answer.plans
    ]
    return columns(rows, indent="")
