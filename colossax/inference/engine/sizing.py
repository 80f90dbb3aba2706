"""How many pages there is room for."""

import dataclasses
import math
from typing import Any

import jax

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.inference.engine.program import EngineProgram, Sizes
from colossax.nn import ModelSpec
from colossax.offload import device_memory, gb_down, gb_up
from colossax.typing import Params

SHARE = 0.93
"""Of a device's memory: what an engine takes of it, all together."""


def pages_for(spec: ModelSpec, bound: BoundPlan, params: Params, sizes: Sizes) -> int:
    """As many as all seats could fill, or as the devices have room for beside the rest.

    Cost: where devices say how much memory they have, a compilation of the larger step, and of what
    reads the longest source, sound, or an image.

    Args:
        spec, bound, params: As of `Engine`.
        sizes: Of it, without pages.

    Raises:
        PlanError: There is no room for the longest sequence.
    """
    most = sizes.seats * sizes.pages_a_seat
    memory = device_memory(list(bound.mesh.devices.flat), None)
    if memory is None:
        return most
    one, few = (
        EngineProgram(spec, bound, dataclasses.replace(sizes, pages=n))
        for n in (1, sizes.pages_a_seat)
    )
    page_bytes = max(1, (cache_bytes(few) - cache_bytes(one)) // max(1, sizes.pages_a_seat - 1))
    programs = few.lowered("mixed", params), few.reading.lowered(params)
    rest = max(_used(one) for one in programs if one is not None) - cache_bytes(few)
    room = int(SHARE * memory - rest) // page_bytes
    if room < sizes.pages_a_seat:
        needed = rest + page_bytes * sizes.pages_a_seat
        raise PlanError(
            f"pages: a device has {gb_down(int(SHARE * memory))} GB for an engine, and"
            f" {gb_up(needed)} GB are needed for one sequence of {sizes.slots} tokens; give fewer"
            " slots, fewer seats, or more devices"
        )
    return min(most, room)


def _used(lowered: Any) -> int:
    """Bytes of each device while a program runs."""
    stats = lowered.compile().memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + results + stats.temp_size_in_bytes


def cache_bytes(program: EngineProgram) -> int:
    """Of the cache on each device."""
    leaves: list[Any] = jax.tree.leaves(program.cache.abstract)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
