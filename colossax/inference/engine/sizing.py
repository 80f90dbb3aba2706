"""How large an engine is: as its requests need, and as there is room for."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from colossax.config import BoundPlan
from colossax.errors import InputError, PlanError
from colossax.inference.cache import CacheLayout
from colossax.inference.decode import decoding_model
from colossax.inference.engine.drafting import Drafter
from colossax.inference.engine.keeping import kept_by
from colossax.inference.engine.program import EngineProgram, Sizes
from colossax.nn import ModelSpec
from colossax.offload import DEVICE_SHARE, device_memory, gb_down, gb_up
from colossax.scheduling import EngineRequest
from colossax.typing import Params

SEATS = 16
"""Sequences at once, where nobody says."""

MIXED_TOKENS = 256
"""Tokens of a step with prompts, where nobody says."""

PAGE_TOKENS = 16

SLOTS = 128
"""Of known requests slots are a multiple of these: a few sizes, for programs that are kept."""

FEW_TOKENS = 16
"""Tokens of a step of known requests that are few or short, where one program does for all."""

FEW_STEPS = 8
"""Of prompts: so many cost less than the compilation of a program for longer pieces of them."""

ROOMY = 0.5
"""Of a device's memory: what parameters and cache may take without a closer look."""

SHARE = 0.93
"""Of a device's memory: what an engine takes of it, all together."""


def asked_sizes(
    spec: ModelSpec,
    *,
    seats: int = SEATS,
    slots: int | None = None,
    pages: int | None = None,
    page_tokens: int = PAGE_TOKENS,
    mixed_tokens: int = MIXED_TOKENS,
    cache_format: str = "own",
    window_rings: bool = False,
    keeps: str | None = None,
    host_pages: int = 0,
    draft: int = 0,
) -> Sizes:
    """Of an engine, as of its arguments; with one page where those are to be found.

    Raises:
        InputError: The model cannot decode, or a size is none.
    """
    config = decoding_model(spec).config
    given = {"seats": seats, "page_tokens": page_tokens, "mixed_tokens": mixed_tokens}
    for name, value in given.items():
        if value < 1:
            raise InputError(f"{name}: found {value}; give 1 or more")
    if host_pages < 0:
        raise InputError(f"host_pages: found {host_pages}; give 1 or more, or 0 for none")
    return Sizes(
        seats=seats,
        pages=1 if pages is None else pages,
        page_tokens=page_tokens,
        slots=config.max_seq if slots is None else slots,
        mixed=max(mixed_tokens, seats * (1 + draft)),
        decode=seats * (1 + draft),
        draft=draft,
        cache=cache_format,
        rings=window_rings,
        keeps=keeps,
        host=host_pages,
    )


def sizes_for(
    requests: Sequence[EngineRequest],
    longest: int,
    draft: int = 0,
    *,
    engines: int = 1,
    seats: int = SEATS,
) -> Sizes:
    """Of an engine for requests that are all known, on devices with any room.

    Steps have one size where the prompts are short.

    Args:
        requests: One or more.
        longest: Of the model's sequences.
        draft: Tokens that are guessed behind each that is said.
        engines: That share them.
        seats: Of each at most.
    """
    seats = min(_power(-(-len(requests) // engines)), 1 << (seats.bit_length() - 1))
    lengths = [len(one.prompt) + one.max_tokens for one in requests]
    slots = min(longest, -(-max(lengths) // SLOTS) * SLOTS)
    of_each = -(-slots // PAGE_TOKENS)
    read = sum(sorted((len(one.prompt) for one in requests), reverse=True)[:seats])
    decode = seats * (1 + draft)
    few = max(FEW_TOKENS, decode)
    short = read <= FEW_STEPS * few
    mixed = few if short else max(decode, min(MIXED_TOKENS, _power(read)))
    held = sorted((_held(one, slots, mixed) for one in requests), reverse=True)
    pages, keeps = sum(held[:seats]), kept_by(requests)
    if keeps is None:  # a few sizes, for programs that are kept
        pages = -(-pages // of_each) * of_each
    return Sizes(
        seats=seats,
        pages=min(seats * of_each, pages),
        page_tokens=PAGE_TOKENS,
        slots=slots,
        mixed=mixed,
        decode=few if short else decode,
        draft=draft,
        keeps=keeps,
    )


def _held(request: EngineRequest, slots: int, mixed: int) -> int:
    """Pages that a request holds at most."""
    pages = -(-min(len(request.prompt) + request.max_tokens, slots) // PAGE_TOKENS)
    keep = request.keep
    return pages if keep is None else min(pages, keep.pages(PAGE_TOKENS, mixed).held)


def with_room(program: EngineProgram, params: Params, *, beside: int = 0) -> EngineProgram:
    """A program with fewer pages where the devices have no room for all of its own.

    As much of a device may be used as where layers are fitted into it.

    Args:
        program: See there.
        params: Arrays, or shapes with shardings.
        beside: Bytes of each device that are not to be had.

    Raises:
        PlanError: There is no room for the longest sequence.

    Cost: nothing where half of a device holds parameters and cache; else as of `pages_for`.
    """
    bound, sizes = program.bound, program.sizes
    memory = device_memory(list(bound.mesh.devices.flat), None)
    held = sum(
        _bytes(x) for x in jax.tree.leaves(params) if x.sharding.memory_kind != "pinned_host"
    )
    if memory is None or beside + held + cache_bytes(program) <= ROOMY * memory:
        return program
    drafter = program.drafter
    given = program.spec, bound, params, sizes
    # Requests that let go of tokens hold fewer pages than the longest sequence has.
    least = min(sizes.pages, sizes.pages_a_seat)
    how = {"drafter": drafter, "least": least, "beside": beside}
    pages = pages_for(*given, share=DEVICE_SHARE, **how)
    if pages >= sizes.pages:
        return program
    return EngineProgram(program.spec, bound, dataclasses.replace(sizes, pages=pages), drafter)


def pages_for(
    spec: ModelSpec,
    bound: BoundPlan,
    params: Params,
    sizes: Sizes,
    *,
    share: float = SHARE,
    drafter: Drafter | None = None,
    least: int | None = None,
    beside: int = 0,
) -> int:
    """As many as all seats could fill, or as the devices have room for beside the rest.

    Cost: where devices say how much memory they have, a compilation of the larger step, and of what
    reads the longest source, sound, or an image.

    Args:
        spec, bound, params: As of `Engine`.
        sizes: Of it, without pages.
        share: Of a device's memory that may be used.
        drafter: Of the engine, with a cache of its own in as many pages.
        least: See `room_for`.
        beside: See `with_room`.

    Raises:
        PlanError: There is no room for the longest sequence.
    """
    most = sizes.seats * sizes.pages_a_seat
    memory = device_memory(list(bound.mesh.devices.flat), None)
    if memory is None:
        return most
    one, few = (
        EngineProgram(spec, bound, dataclasses.replace(sizes, pages=n), drafter)
        for n in (1, sizes.pages_a_seat)
    )
    page_bytes = max(1, (cache_bytes(few) - cache_bytes(one)) // max(1, sizes.pages_a_seat - 1))
    programs = few.lowered("mixed", params), few.reading.lowered(params)
    rest = beside + max(used_bytes(one) for one in programs if one is not None)
    rest -= page_bytes * sizes.pages_a_seat  # what seats have for themselves stays
    return min(most, room_for(memory, rest, page_bytes, sizes, share=share, least=least))


def room_for(
    memory: float,
    rest: int,
    page_bytes: int,
    sizes: Sizes,
    *,
    share: float,
    least: int | None = None,
) -> int:
    """Pages that a device has room for.

    Args:
        memory: Bytes of it.
        rest: Bytes of all but the cache.
        page_bytes: Of one.
        sizes: Of the engine.
        share: Of the memory that may be used.
        least: Pages that there have to be; None: those of the longest sequence.

    Raises:
        PlanError: There is no room for the longest sequence.
    """
    room = int(share * memory - rest) // page_bytes
    least = sizes.pages_a_seat if least is None else least
    if room < least:
        needed = rest + page_bytes * least
        tokens = min(sizes.slots, least * sizes.page_tokens)
        raise PlanError(
            f"pages: a device has {gb_down(int(share * memory))} GB for an engine, and"
            f" {gb_up(needed)} GB are needed for one sequence of {tokens} tokens; give fewer"
            " slots, fewer seats, or more devices"
        )
    return room


def used_bytes(lowered: Any) -> int:
    """Bytes of each device while a program runs."""
    stats = lowered.compile().memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + results + stats.temp_size_in_bytes


def cache_bytes(program: EngineProgram) -> int:
    """Of the cache on each device, the drafter's too."""
    drafter = program.drafter
    own = 0 if drafter is None else sum(map(_bytes, jax.tree.leaves(drafter.abstract)))
    return own + layout_bytes(program.cache)


def layout_bytes(cache: CacheLayout) -> int:
    """Likewise, of a cache."""
    return sum(map(_bytes, jax.tree.leaves(cache.abstract)))


def _bytes(x: Any) -> int:
    """Of an array on each device."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
