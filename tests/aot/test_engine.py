"""Steps of an engine compiled for GPUs that are not there: what they need, and what they copy."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

import colossax
from colossax.aot import compile_program, parse_target, target_devices
from colossax.config import Plan, Precision
from colossax.inference.engine.drafting import ModelDrafter, RetrievalDrafter
from colossax.inference.engine.program import EngineProgram, Sizes
from colossax.inference.engine.sizing import cache_bytes
from colossax.inference.plan import unrolled
from colossax.models import LlamaConfig, MixtralConfig, maker
from colossax.nn import Decoder, describe
from colossax.pallas.attention import counted
from colossax.pallas.target import target
from colossax.sharding import param_sharding
from tests.inference import test_caches as caches

pytestmark = [pytest.mark.aot, pytest.mark.slow]

GIB = 2**30
LLAMA_8B = LlamaConfig(
    vocab=128256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, max_seq=8192
)
SIZES = Sizes(seats=64, pages=20_480, page_tokens=16, slots=8192, mixed=2048, decode=64)
"""A cache of 40 GiB for it."""


def _program(config, plan, sizes, on="h100:1x1", *, stacked=False, drafts=None):
    """The program and its parameters as shapes; with drafts, of a model that drafts for itself.

    Where there are drafts and no nodes of them are named, of one that finds pages of its own.
    """
    make = maker(config) if hasattr(config, "decoder") else lambda rngs: Decoder(config, rngs=rngs)
    bf16 = Precision(params="bfloat16", compute="bfloat16", cache="bfloat16")
    plan, devices = plan.replace(precision=bf16), target_devices(parse_target(on))
    bound = plan.bind(devices)
    with colossax.use(bound):
        spec = describe(make)
    bound = bound if stacked else unrolled(plan, spec).bind(devices)
    with colossax.use(bound):
        spec = describe(make)
    params = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(
            info.shape, np.dtype("bfloat16"), sharding=param_sharding(bound, "params", info)
        ),
        spec.infos,
    )
    drafter = None if drafts is None else ModelDrafter(spec, bound, params, 2, nodes=drafts)
    if sizes.draft and drafter is None:
        drafter = RetrievalDrafter(sizes.draft, pages=4, recent=2)
    return EngineProgram(spec, bound, sizes, drafter), params


@functools.cache
def _compiled(kind):
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(LLAMA_8B, Plan(), SIZES)
        return program, compile_program(program.lowered(kind, params))


@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_8b_on_one_h100(kind):
    """Weights, cache and 1.2 GiB."""
    program, compiled = _compiled(kind)
    weights = 2 * 8_030_261_248
    cache = cache_bytes(program)
    assert cache == 40 * GIB
    spare = compiled.device_bytes - weights - cache
    print(f"{kind}: {spare / GIB:.3f} GiB beside weights and cache")
    assert 0 < spare < 1.2 * GIB


@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_no_copy_of_the_cache_or_of_weights(kind):
    """Nothing of the cache's size is made, nor of one layer's part of it; no weight is copied."""
    program, compiled = _compiled(kind)
    (shape,) = {x.shape for x in program.cache.abstract.values()}
    made = _made(compiled.hlo)
    whole, layer = (",".join(map(str, x)) for x in (shape, shape[1:]))
    assert not [one for one in made if re.search(rf"\[({whole}|{layer}|1,{layer})\]", one)]
    for weight in ("14336,4096", "4096,14336", "4096,4096"):
        assert not [one for one in made if f"bf16[{weight}]" in one]


FAMILIES = {
    "mixture": MixtralConfig(
        vocab=512, embed=256, layers=2, heads=8, kv_heads=4, mlp=384, experts=8, choices=2
    ),
    "window": caches.MISTRAL,
    "latent": caches.LATENT,
    "sinks": caches.SINKS,
    "chunks": caches.CHUNKS,
}


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_copies_its_cache(name, stacked):
    """Neither in a program of layers one by one, nor in a loop over a stack of them."""
    config = FAMILIES[name]
    sizes = Sizes(seats=8, pages=4097, page_tokens=16, slots=64, mixed=64, decode=8)
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(config, Plan(), sizes, stacked=stacked)
        compiled = compile_program(program.lowered("mixed", params))
    cache = cache_bytes(program)
    assert compiled.stats.temp_size_in_bytes < cache / 4
    assert not [one for one in _made(compiled.hlo) if "4097,16" in one]


@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize("name", ["mixture", "latent"])
def test_trees_of_drafts_move_tokens_and_no_cache(name, kind):
    """What is kept of a guess goes to its place by itself."""
    sizes = Sizes(seats=8, pages=4097, page_tokens=16, slots=64, mixed=64, decode=56, draft=6)
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(FAMILIES[name], Plan(), sizes, drafts=6)
        compiled = compile_program(program.lowered(kind, params))
    assert compiled.stats.temp_size_in_bytes < cache_bytes(program) / 4
    assert not [one for one in _made(compiled.hlo) if "4097,16" in one]


@pytest.mark.parametrize(
    ("name", "kind"), [("mixture", "mixed"), ("mixture", "decode"), ("window", "decode")]
)
def test_the_kernel_reads_trees_where_the_cache_is(name, kind):
    """Heads that it knows: three operands more in each layer, and no copy of the cache."""
    sizes = Sizes(seats=8, pages=4097, page_tokens=16, slots=64, mixed=64, decode=56, draft=6)
    config = FAMILIES[name]
    of_heads = {"embed": 64 * config.heads} if name == "mixture" else {"head_dim": 64}
    config = dataclasses.replace(config, **of_heads)
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(config, Plan(), sizes, drafts=6)
        compiled = compile_program(program.lowered(kind, params))
    calls = re.findall(r"custom-call\((.*)\), custom.*paged_attention_kernel", compiled.hlo)
    # The drafter guesses without, and reads along in mixed steps, the last layer's keys alone.
    reads = config.layers - 1 if kind == "mixed" else 0
    worded = [one.count("%") == 13 for one in calls]
    assert sum(worded) == config.layers + reads
    assert worded.count(False) == 2 * config.layers
    assert compiled.stats.temp_size_in_bytes < cache_bytes(program) / 4
    assert not [one for one in _made(compiled.hlo) if "4097,16" in one]


@pytest.mark.parametrize("name", ["window", "chunks"])
def test_rings_of_pages_are_written_in_place(name):
    """Of a sequence many times longer than what a layer with a window keeps of it."""
    sizes = Sizes(
        seats=409, pages=4097, page_tokens=16, slots=1024, mixed=409, decode=409, rings=True
    )
    config = dataclasses.replace(FAMILIES[name], max_seq=sizes.slots)
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(config, Plan(), sizes)
        compiled = compile_program(program.lowered("decode", params))
    ring = 409 * -(-(5 - 1 + 409) // 16)
    assert ring in {x.shape[1] for x in jax.tree.leaves(program.cache.abstract)}
    assert not [one for one in _made(compiled.hlo) if re.search(rf"({ring}|4097),16", one)]


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_heavy_hitters_move_tokens_and_no_cache(kind, stacked):
    """Where pages begin, vectors go to their places; masses lie beside keys and are not copied."""
    sizes = Sizes(seats=8, pages=4097, page_tokens=16, slots=64, mixed=64, decode=8, keeps="heavy")
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(FAMILIES["mixture"], Plan(), sizes, stacked=stacked)
        compiled = compile_program(program.lowered(kind, params))
    assert {x.dtype.itemsize for x in jax.tree.leaves(program.cache.abstract)} == {2, 4}
    assert compiled.stats.temp_size_in_bytes < cache_bytes(program) / 4
    assert not [one for one in _made(compiled.hlo) if "4097,16" in one]


@pytest.mark.parametrize(("kind", "seats"), [("mixed", 3), ("decode", 8)])
def test_the_kernel_counts_heavy_hitters_where_the_cache_is(kind, seats, monkeypatch):
    """Heads that it knows, all seats at once or some: two calls a layer, and nothing is copied."""
    sizes = Sizes(seats=8, pages=4097, page_tokens=16, slots=64, mixed=64, decode=8, keeps="heavy")
    config = dataclasses.replace(FAMILIES["mixture"], embed=512)
    of_one = 4 * (16 if kind == "mixed" else 1) * config.heads * sizes.slots
    monkeypatch.setattr(counted, "LOGITS_BYTES", seats * of_one)
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(config, Plan(), sizes)
        compiled = compile_program(program.lowered(kind, params))
    calls = re.findall(r"custom-call\(.*paged_attention_kernel", compiled.hlo)
    assert len(calls) == 2 * config.layers
    assert compiled.stats.temp_size_in_bytes < cache_bytes(program) / 4
    assert not [one for one in _made(compiled.hlo) if "4097,16" in one]


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_who_finds_pages_reads_them_where_they_are(kind, stacked):
    sizes = Sizes(seats=8, pages=4097, page_tokens=16, slots=256, mixed=64, decode=40, draft=4)
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(FAMILIES["mixture"], Plan(), sizes, stacked=stacked)
        compiled = compile_program(program.lowered(kind, params))
    assert compiled.stats.temp_size_in_bytes < cache_bytes(program) / 4
    assert not [one for one in _made(compiled.hlo) if "4097,16" in one]


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["mixture", "latent"])
def test_codes_are_decoded_where_they_are_gathered(name, form):
    """No array of the cache's size is made, of codes or of what they stand for."""
    sizes = Sizes(seats=8, pages=4097, page_tokens=16, slots=64, mixed=64, decode=8, cache=form)
    with target("gpu", compute_capability=(9, 0)):
        program, params = _program(FAMILIES[name], Plan(), sizes)
        compiled = compile_program(program.lowered("mixed", params))
    cache = program.cache.abstract
    assert {x.dtype.itemsize for x in jax.tree.leaves(cache)} == {1, 2}
    assert compiled.stats.temp_size_in_bytes < cache_bytes(program) / 4
    for codes in (x for x in jax.tree.leaves(cache) if x.dtype.itemsize == 1):
        whole, layer = (",".join(map(str, dims)) for dims in (codes.shape, codes.shape[1:]))
        assert not re.search(rf"(bf16|f16|f32)\[({whole}|{layer})\]", compiled.hlo)


def _made(hlo):
    """Instructions that write new memory: copies, and fusions that end in neither an update."""
    found = re.findall(r"^\s*%?\S+ = (\S+) (copy|copy-start|slice|concatenate)\(", hlo, re.M)
    return [shape for shape, _ in found]
