"""How fast the devices of each stage are, and the links between them, by what one knows of them."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from colossax.errors import InputError, PlanError
from colossax.pipeline.cuts import Link
from colossax.pipeline.measured import load_layer_times, load_link_times, stage_speeds

CUTS = "plan.pipeline.cuts auto"
"""How lines of what was decided begin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of the devices of each stage.

    Attributes:
        relative: To the fastest.
        known_by: For people.
        flops_per_s: Of a device of the fastest, in layers of the recipe; None where nothing was
            measured.
    """

    relative: tuple[float, ...]
    known_by: str
    flops_per_s: float | None = None


def speeds_of(
    kinds: Sequence[Sequence[str]],
    given: Sequence[float] | None,
    recipe: str | None,
    *,
    peak: Callable[[str], float | None] | None = None,
) -> Speeds:
    """Of each stage: as given; all alike, where devices are; else as `bench stages` measured.

    Args:
        kinds: Of each stage those of its devices, the slowest of which counts.
        given: Speeds of the stages.
        recipe: Under whose name layers were measured; None: none were.
        peak: Of devices that are not there: FLOP/s of a kind by its data sheet, which count where
            not all kinds were measured.

    Raises:
        PlanError: Speeds of other numbers of stages are given; devices are of several kinds, and
            nothing says how fast.
        InputError: A file of what was measured is damaged.
    """
    if given is not None:
        if len(given) != len(kinds):
            raise PlanError(
                f"plan.pipeline.speeds: found {len(given)} for {len(kinds)} stages; give one for"
                " each"
            )
        relative = tuple(speed / max(given) for speed in given)
        return Speeds(relative=relative, known_by=f"speeds {_shown(given)} of the stages, as given")
    names = sorted({kind for stage in kinds for kind in stage})
    rate = _rate(names, recipe)
    if len(names) == 1:
        known_by = f"all devices are '{names[0]}', which count as equally fast"
        return Speeds(relative=(1.0,) * len(kinds), known_by=known_by, flops_per_s=rate)
    each, said = _measured(names, recipe, peak)
    by_kind = dict(zip(names, each, strict=True))
    relative = tuple(min(by_kind[kind] for kind in stage) for stage in kinds)
    return Speeds(relative=relative, known_by=f"speeds {_shown(relative)} {said}", flops_per_s=rate)


def links_of(kinds: Sequence[Sequence[str]], recipe: str | None) -> list[list[Link]] | None:
    """Between any two stages, whose devices send side by side; None where any was not measured.

    Args:
        kinds: See `speeds_of`.
        recipe: Likewise.

    Raises:
        InputError: See `speeds_of`.
    """
    pairs = {
        _pair(*pair)
        for one, other in itertools.combinations(kinds, 2)
        for pair in zip(one, other, strict=True)
    }
    times = {} if recipe is None else {pair: load_link_times(*pair, recipe) for pair in pairs}
    found = {pair: one.link for pair, one in times.items() if one is not None}
    if len(found) < len(pairs):
        return None

    def slowest(one: Sequence[str], other: Sequence[str]) -> Link:
        links = [found[_pair(*pair)] for pair in zip(one, other, strict=True)]
        return min(links, key=lambda link: link.bytes_per_s or 0.0)

    return [
        [slowest(one, other) if a != b else Link() for b, other in enumerate(kinds)]
        for a, one in enumerate(kinds)
    ]


def _pair(kind: str, other: str) -> tuple[str, str]:
    return min(kind, other), max(kind, other)


def _rate(names: Sequence[str], recipe: str | None) -> float | None:
    """Of the fastest kind; None where not all were measured and counted."""
    times = [None if recipe is None else load_layer_times(name, recipe) for name in names]
    rates = [one.flops / one.seconds() for one in times if one is not None and one.flops]
    return max(rates) if len(rates) == len(names) else None


def _measured(
    names: Sequence[str], recipe: str | None, peak: Callable[[str], float | None] | None
) -> tuple[tuple[float, ...], str]:
    """Of kinds of devices, relative to the fastest, and by what."""
    peaks = [None if peak is None else peak(name) for name in names]
    known = [found for found in peaks if found is not None]
    if recipe is not None:
        try:
            return stage_speeds(names, recipe), "as colossax bench stages measured"
        except InputError as problem:
            if len(known) < len(names):
                raise PlanError(f"{CUTS}: {problem} (plan.pipeline.speeds)") from problem
    if len(known) < len(names):
        shown = ", ".join(map(repr, names))
        raise PlanError(
            f"{CUTS}: devices are of several kinds ({shown}); give the speed of each stage, as"
            " --plan.pipeline.speeds 2,1"
        )
    return tuple(rate / max(known) for rate in known), "by the peaks of their data sheets"


def _shown(speeds: Sequence[float]) -> str:
    return ",".join(f"{speed:.3g}" for speed in speeds)
