"""That nothing fits, in a sentence: what needs least, what was seen, and what would do."""

from colossax.aot import Target
from colossax.aot.targets import MAX_DEVICES
from colossax.planner.searching.search import Found, told
from colossax.planner.searching.smallest import smallest_gb

_GIB = 2**30


def nothing(found: Found, room: float, target: Target, seen: str = "") -> str:
    """That nothing fits, with what needs least and what was seen of programs."""
    size, least = f"{room / _GIB:.1f} GiB", found.smallest
    if least is not None and not found.candidates:
        needs = least.predicted.bytes.total / _GIB
        seen = f"; {least.label} with {told(least)} needs least, {needs:.1f} GiB by formula{seen}"
    return (
        f"plan: nothing that is searched fits {size} of each of {target.size} {target.gpu.name}"
        f"{seen}"
    )


def enough(
    found: Found, room: float, target: Target, larger: Target | None, more: list[str]
) -> str:
    """What would do, as formulas say."""
    ways, least = [], found.smallest
    if larger is not None:
        ways.append(f"{larger.name} (the fewest of these GPUs that fit it by formula)")
    if least is not None and not found.candidates and (gb := smallest_gb(least)) * 1e9 > room:
        if gb * 1e9 <= target.gpu.memory_bytes:
            ways.append(f"--device-gb {gb:.1f} (the least that fits it by formula)")
        else:
            ways.append(f"GPUs of which it may take {gb:.1f} GB (the least, by formula)")
    ways += more
    ways.append("shorter rows")
    none = "" if larger else f"; no number of them up to {MAX_DEVICES} fits it by formula"
    return f"{none}; give {', '.join(ways[:-1])} or {ways[-1]}"
