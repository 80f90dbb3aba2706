"""The engine of a mesh: one, or one for each of its parts."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import InputError
from colossax.inference.engine.engine import Engine
from colossax.inference.engine.hosting import STAGES_KEEP_NONE
from colossax.inference.engine.keeping import STAGES_KEEP_ALL
from colossax.inference.engine.parts import params_on, replicas_of
from colossax.inference.engine.program import Sizes
from colossax.inference.engine.replicas import Replicas
from colossax.inference.engine.sizing import (
    SHARE,
    asked_sizes,
    layout_bytes,
    room_for,
    used_bytes,
)
from colossax.inference.engine.stage_parts import check_staged
from colossax.inference.engine.staged import StagedSteps
from colossax.inference.plan import inference_plan
from colossax.nn import ModelSpec
from colossax.offload import device_memory
from colossax.typing import Params

_SIZES = (
    "seats", "slots", "pages", "page_tokens", "mixed_tokens", "cache_format", "window_rings",
    "keeps", "host_pages",
)  # fmt: skip
"""Options that say how large an engine is."""


def make_engine(
    spec: ModelSpec, bound: BoundPlan, params: Params, **options: Any
) -> Engine | Replicas:
    """An engine for a mesh; several behind one front where it has `data` or `stage`.

    Each place along `data` has one, of so many seats and pages as the options say. With stages
    those are shared by as many engines as stages, whose steps go through the stages by turns, so
    that each stage has work while the others have theirs.

    Args:
        spec, bound, params: As of `Engine`. Stages have programs of their own, as
            `StoredModel.load(unroll=True)` makes them.
        options: As of `Engine`, for each place along `data`.

    Raises:
        InputError: As `Engine`.
        PlanError: Likewise; or the stages cannot have parts of the model, see `check_staged`.

    Cost: parameters are there once, as they were laid out, but for a table of tokens that is the
    head too: the first stage and the last have it. Programs are compiled for each place along
    `data`.
    """
    check_staged(spec, bound)
    staged, drafter = bound.mesh.shape[MeshAxis.STAGE] > 1, options.pop("drafter", None)
    if staged and drafter is not None:
        raise InputError(
            "draft: stages take one token after another, and guess none; leave it out, or give the"
            " devices of 'stage' to 'tensor' or 'fsdp'"
        )
    if staged and options.get("window_rings"):
        raise InputError(
            "window_rings: stages keep all pages; leave the rings out, or give the devices of"
            " 'stage' to 'tensor' or 'fsdp'"
        )
    if staged and options.get("keeps") is not None:
        raise InputError(STAGES_KEEP_ALL)
    if staged and options.get("host_pages"):
        raise InputError(STAGES_KEEP_NONE)
    parts = replicas_of(bound)
    if len(parts) == 1 and not staged:
        return Engine(spec, bound, params, drafter=drafter, **options)
    engines: list[Engine] = []
    for one in parts:
        here = params if len(parts) == 1 else params_on(spec, one, params)
        if staged:
            engines += _through_stages(spec, one, here, **options)
        else:
            own = None if drafter is None else drafter.on(one)
            engines.append(Engine(spec, one, here, drafter=own, **options))
    return Replicas(whole(bound), engines)


def whole(bound: BoundPlan) -> BoundPlan:
    """All devices, and the plan as generation has it."""
    return dataclasses.replace(bound, plan=inference_plan(bound.plan))


def _through_stages(
    spec: ModelSpec, bound: BoundPlan, params: Params, **options: Any
) -> Iterator[Engine]:
    """Engines that share the programs of stages, with seats and pages in equal parts."""
    given = {name: options.pop(name) for name in _SIZES if name in options}
    sizes = asked_sizes(spec, **given)
    count = min(bound.mesh.shape[MeshAxis.STAGE], sizes.seats)
    seats = -(-sizes.seats // count)
    pages = -(-sizes.pages // count)
    sizes = dataclasses.replace(
        sizes, seats=seats, decode=seats, pages=pages, mixed=max(seats, sizes.mixed)
    )
    if given.get("pages") is None:
        sizes = dataclasses.replace(sizes, pages=_pages(spec, bound, params, sizes, count))
    program = StagedSteps(spec, bound, sizes)
    own = program.params(params)
    for _ in range(count):
        yield Engine.of(program, own, **options)


def _pages(spec: ModelSpec, bound: BoundPlan, params: Params, sizes: Sizes, engines: int) -> int:
    """Of each of so many engines: what all seats could fill, or what all stages have room for.

    Cost: as of `pages_for`, on each stage.
    """
    most = sizes.seats * sizes.pages_a_seat
    memory = device_memory(list(bound.mesh.devices.flat), None)
    if memory is None:
        return most
    one, few = (
        StagedSteps(spec, bound, dataclasses.replace(sizes, pages=n))
        for n in (1, sizes.pages_a_seat)
    )
    rooms = [most]
    for small, large, lowered in zip(
        one.stages, few.stages, few.lowered("mixed", params), strict=True
    ):
        held = layout_bytes(large.cache)
        page = max(1, (held - layout_bytes(small.cache)) // max(1, sizes.pages_a_seat - 1))
        rest = used_bytes(lowered) - held
        rooms.append(room_for(memory, rest, engines * page, sizes, share=SHARE))
    return min(rooms)
