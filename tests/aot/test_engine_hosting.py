"""Copies of an engine's pages to host memory and back, compiled for GPUs that are not there."""

import re

import jax
import pytest

from colossax.aot import compile_program
from colossax.config import Plan
from colossax.inference.engine.hosting import WIDTH, HostPages
from colossax.inference.engine.program import Sizes
from colossax.inference.engine.sizing import cache_bytes
from tests.aot.test_engine import FAMILIES, LLAMA_8B, _program

pytestmark = [pytest.mark.aot, pytest.mark.slow]

MIB = 2**20
SIZES = Sizes(seats=64, pages=20_480, page_tokens=16, slots=8192, mixed=2048, decode=64, host=64)
"""A cache of 40 GiB for 8B."""


def compiled(config, plan, sizes, on="h100:1x1"):
    program, _ = _program(config, plan, sizes, on)
    host = HostPages(program)
    return program, host, [compile_program(one) for one in host.lowered()]


@pytest.mark.catches("the-cache-is-copied-for-a-page")
@pytest.mark.parametrize("name", ["one", "tensor"])
def test_pages_of_8b_are_copied_and_no_cache(name):
    """Of 2 MiB a page, on a device alone or of four; in place on the way back."""
    plan, on, devices = (Plan(), "h100:1x1", 1)
    if name == "tensor":
        plan, on, devices = Plan(mesh={"tensor": 4}), "h100:1x4", 4
    program, host, (out, back) = compiled(LLAMA_8B, plan, SIZES, on)
    copies = WIDTH * 2 * MIB // devices
    print(f"{name}: {out.stats.temp_size_in_bytes / MIB:.1f} MiB out, ", end="")
    print(f"{back.stats.temp_size_in_bytes / MIB:.1f} MiB back, of temporaries")
    assert out.stats.host_output_size_in_bytes >= copies
    assert back.stats.host_argument_size_in_bytes >= copies
    assert back.stats.alias_size_in_bytes >= cache_bytes(program)
    for one in (out, back):
        assert one.stats.temp_size_in_bytes <= 9 * copies // 8
        assert not re.search(r"(all-gather|all-reduce|all-to-all|collective-permute)\(", one.hlo)


@pytest.mark.parametrize("form", ["own", "int8", "fp8"])
@pytest.mark.parametrize("name", ["latent", "sinks", "chunks"])
def test_no_family_copies_its_cache(name, form):
    """Arrays of several kinds, and codes with their scales."""
    sizes = Sizes(
        seats=8, pages=4097, page_tokens=16, slots=64, mixed=64, decode=8, host=64, cache=form
    )
    program, host, both = compiled(FAMILIES[name], Plan(), sizes)
    leaves = jax.tree.leaves(program.cache.abstract)
    assert host.page_bytes == cache_bytes(program) // 4097
    for one in both:
        assert one.stats.temp_size_in_bytes < cache_bytes(program) / 100
    out, back = both
    assert len(re.findall(r"S\(5\)", out.hlo)) >= WIDTH * len(leaves)
    assert back.stats.alias_size_in_bytes >= cache_bytes(program)
