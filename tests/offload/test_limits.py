"""How much memory devices have that are not there."""

import dataclasses

import jax
import pytest

from colossax.aot import parse_target
from colossax.offload import device_memory

GIB = 2**30


def target(*memories):
    """Islands of these devices of 8 GiB, 16 GiB, ..., and one of H100s."""
    found = parse_target("+".join(["h100:1x4"] * (len(memories) + 1)))
    here = jax.devices()[0].device_kind
    islands = [
        dataclasses.replace(
            island, gpu=dataclasses.replace(island.gpu, name=here, memory_bytes=memory * GIB)
        )
        for island, memory in zip(found.islands, memories, strict=False)
    ]
    return dataclasses.replace(found, islands=(*islands, found.islands[-1]))


@pytest.mark.catches("memory-of-another-island")
def test_memory_is_that_of_the_least_of_the_kinds_that_are_used():
    h100 = parse_target("h100:1x4").gpu.memory_bytes
    assert device_memory(jax.devices(), target(200)) == 200 * GIB > h100
    assert device_memory(jax.devices(), target(200, 100)) == 100 * GIB
    assert device_memory(jax.devices(), parse_target("h100:1x4")) == h100
