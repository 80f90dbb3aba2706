"""How experts are spread over devices, and how tokens get to them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from colossax.config.axes import GROUP_AXES
from colossax.config.bounds import NotNegative, Positive, at_least
from colossax.config.frozen import check_types
from colossax.config.words import nearest
from colossax.errors import PlanError

DISPATCHES: tuple[str, ...] = ("auto", "passes", "capacity", "ragged", "gather", "weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRates:
    """How fast rows travel and are computed, of one device.

    Attributes:
        exchange_s: Seconds to begin an exchange.
        bytes_per_s: That a device sends of it, one way.
        compute_s: Seconds to begin the experts' computation.
        flops_per_s: Of it.
    """

    exchange_s: NotNegative = 0.0
    bytes_per_s: Positive = 1.0
    compute_s: NotNegative = 0.0
    flops_per_s: Positive = 1.0

    def __post_init__(self):
        check_types(self, "experts.rates", error=PlanError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Where the experts of a mixture live, and how rows of tokens travel.

    Attributes:
        group: Mesh axes over which experts are split, outer first: names, or their text as
            `expert,tensor`. `none`: all experts on every device. None: of `expert`, the axes of the
            sequence and `tensor`, those that together have most devices among the numbers that
            divide the experts.
        dispatch: How tokens meet their experts. `passes` sends rows to the experts' devices in
            buffers of a fixed size, as often as there are rows left, so that none is dropped;
            `ragged` does so, and sends no slot that is empty (GPUs alone, to be asked for by name;
            compiled for H100, and run by no GPU yet); `capacity` sends once, and what does not fit
            is dropped and counted; `gather` gives all tokens of the group to each of its devices
            and sums what they return, which sends less where the group is no larger than the
            choices of a token; `weights` gathers the experts and moves no token. `auto`: `gather`
            by that rule, else `passes`; where the group is one device, `weights`.
        capacity: Rows of a buffer for one device, over those of a balanced load.
        chunks: Parts of such a buffer, which travel one after another: while experts compute one,
            the next is sent and the one before comes back. Of forms that send rows. `auto`: of each
            layer the number that takes least time by `rates`.
        rates: For `chunks` of `auto`; None: by the data sheet of the devices.
        hierarchical: Rows travel along the inner axes of the group first, then along its outermost:
            fewer and larger messages over slow links, the same bytes over each of them.
        placement: Of each device of the group, in their order, the experts that it computes, as
            many on each; an expert may have several replicas. Rows of numbers, or the path of a
            JSON file of them, as `balanced_placement` makes them of the loads of a run. None: each
            device computes those that rest there.
    """

    group: Any = None
    dispatch: str = dataclasses.field(default="auto", metadata={"choices": DISPATCHES})
    capacity: Positive = 1.25
    chunks: int | str = 1
    rates: ExpertRates | None = None
    hierarchical: bool = False
    placement: Any = None

    def __post_init__(self):
        check_types(self, "experts", error=PlanError)
        object.__setattr__(self, "group", _group(self.group))
        if self.dispatch not in DISPATCHES:
            raise PlanError(
                f"experts.dispatch: unknown '{self.dispatch}'{nearest(self.dispatch, DISPATCHES)}"
            )
        object.__setattr__(self, "chunks", _chunks(self.chunks))
        object.__setattr__(self, "placement", _placement(self.placement))
        if self.hierarchical and self.dispatch == "ragged":
            raise PlanError(
                "experts: dispatch 'ragged' sends rows at once, and hierarchical axis by axis;"
                " leave one of the two out"
            )
        if self.dispatch == "weights" and self.placement is not None:
            raise PlanError(
                "experts: dispatch 'weights' has all experts on every device, and placement has"
                " some on each; leave one of the two out"
            )
        if self.dispatch == "weights" and self.group:
            raise PlanError(
                f"experts: dispatch 'weights' has all experts on every device, and group is"
                f" {','.join(self.group)}; leave one of the two out"
            )


def _chunks(given: Any) -> int | str:
    """A number, from its text too, or `auto`."""
    if given == "auto":
        return given
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool):
        raise PlanError(f"experts.chunks: found {given!r}; give a whole number, or 'auto'")
    at_least(1).check(given, "experts.chunks", error=PlanError)
    return given


def _placement(given: Any) -> tuple[tuple[int, ...], ...] | None:
    """Rows of experts' numbers, from a file too."""
    if given is None:
        return None
    where = "experts.placement"
    if isinstance(given, str):
        where = f"experts.placement '{given}'"
        try:
            given = json.loads(Path(given).read_text("utf-8"))
        except (OSError, ValueError) as problem:
            raise PlanError(
                f"{where}: cannot be read ({problem}); give the path of a JSON file with a list of"
                " experts for each device"
            ) from problem
    rows = given if isinstance(given, list | tuple) else ()
    if not rows or not all(isinstance(row, list | tuple) for row in rows):
        raise PlanError(f"{where}: found {given!r}; give a list of experts for each device")
    if not all(type(expert) is int and expert >= 0 for row in rows for expert in row):
        raise PlanError(f"{where}: experts are numbers from 0; give whole numbers, 0 or more")
    if len({len(row) for row in rows}) > 1 or not rows[0]:
        raise PlanError(
            f"{where}: devices have {', '.join(str(len(row)) for row in rows)} experts; give each"
            " as many, 1 or more"
        )
    return tuple(tuple(row) for row in rows)


def _group(given: Any) -> tuple[str, ...] | None:
    """Mesh axes, from names or their text."""
    if given is None:
        return None
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple):
        raise PlanError(
            f"experts.group: found {given!r}; give names of mesh axes, as 'expert,tensor'"
        )
    axes = tuple(str(name).strip() for name in names)
    if axes == ("none",):
        return ()
    for axis in axes:
        if axis not in GROUP_AXES:
            raise PlanError(
                f"experts.group: experts cannot be split over '{axis}'{nearest(axis, GROUP_AXES)}"
            )
    if len(set(axes)) < len(axes):
        raise PlanError(f"experts.group: found {','.join(axes)}; name each axis once")
    return tuple(axis for axis in GROUP_AXES if axis in axes)
