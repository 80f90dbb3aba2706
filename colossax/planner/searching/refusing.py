"""That nothing fits, in a sentence: what needs least, what was seen, and what would do."""

from colossax.aot import Target
from colossax.aot.targets import MAX_DEVICES
from colossax.planner.searching.search import Found, told
from colossax.planner.searching.smallest import rounded_up, smallest_gb
from colossax.planner.searching.words import room_words


def nothing(found: Found, room: float, target: Target, seen: str = "") -> str:
    """That nothing fits, with what needs least and what was seen of programs."""
    least = found.smallest
    if least is not None and not found.candidates:
        needs = room_words(least.predicted.bytes.total)
        seen = f"; {least.label} with {told(least)} needs least, {needs} by formula{seen}"
    return (
        f"plan: nothing that is searched fits {room_words(room)} of each of {target.size}"
        f" {target.gpu.name}{seen}"
    )


def enough(
    found: Found,
    room: float,
    target: Target,
    larger: Target | None,
    more: list[str],
    compiled: tuple[str, float, float] | None = None,
) -> str:
    """What would do: as formulas say, and of programs that were compiled what takes least."""
    ways, least = [], found.smallest
    if larger is not None:
        ways.append(f"{larger.name} (the fewest of these GPUs that fit it by formula)")
    if compiled is not None:
        label, total, _ = compiled
        ways += _budget(rounded_up(total), room, target, f"what {label} takes, compiled")
    elif least is not None and not found.candidates:
        ways += _budget(smallest_gb(least), room, target, "the least that fits it by formula")
    ways += more
    ways.append("shorter rows")
    none = "" if larger else f"; no number of them up to {MAX_DEVICES} fits it by formula"
    return f"{none}; give {', '.join(ways[:-1])} or {ways[-1]}"


def _budget(gb: float, room: float, target: Target, why: str) -> list[str]:
    """How a device may have so much room; nothing where it has."""
    if gb * 1e9 <= room:
        return []
    if gb * 1e9 <= target.gpu.memory_bytes:
        return [f"--device-gb {gb:.4g} ({why})"]
    return [f"GPUs of which it may take {gb:.4g} GB ({why})"]
