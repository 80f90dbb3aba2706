"""Pages that go to host memory and come back: the same tokens, and less is computed."""

import functools

import jax
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.inference import make_engine
from colossax.inference.engine import Engine, ModelDrafter, RetrievalDrafter
from colossax.inference.engine.hosting import WIDTH
from colossax.scheduling import EngineRequest
from tests.cases import quick_first
from tests.inference import test_caches as caches
from tests.inference.engine.test_engine import (
    SMALL,
    alone,
    compiled_while,
    engine,
    flat,
    requests,
    tokens,
)
from tests.inference.engine.test_staged import bound_of as staged_bound
from tests.inference.test_generator import CONFIGS, LLAMA, build

pytestmark = pytest.mark.slow

MESHES = {
    "tensor2": {"tensor": 2},
    "ring2 tensor2": {"ring": 2, "tensor": 2},
    "ring3": {"ring": 3},
    "fsdp2 tensor2": {"fsdp": 2, "tensor": 2},
    "data2": {"data": 2},
}


@functools.cache
def drafting():
    """The model drafts for itself."""
    spec, params, bound = flat(LLAMA)
    return ModelDrafter(spec, bound, params, 2)


def on_mesh(mesh, **options):
    bound = Plan(mesh=mesh).bind(jax.devices()[: int(np.prod(list(mesh.values())))])
    spec, params = build(LLAMA, bound)
    return make_engine(spec, bound, params, **SMALL | options)


def of_family(name, **options):
    bound, spec, params = caches.build(name)
    return Engine(spec, bound, params, **SMALL, **options)


MADE = {
    "llama": engine,
    "mistral": functools.partial(engine, CONFIGS["mistral"]),
    "bloom": functools.partial(engine, CONFIGS["bloom"]),
    "int8": functools.partial(engine, cache_format="int8"),
    "fp8": functools.partial(engine, cache_format="fp8"),
    "heavy": functools.partial(engine, keeps="heavy"),
    "model": lambda **options: engine(drafter=drafting(), **options),
    "retrieval": lambda **options: engine(drafter=RetrievalDrafter(3), **options),
    **{name: functools.partial(on_mesh, mesh) for name, mesh in MESHES.items()},
    **{name: functools.partial(of_family, name) for name in ("latent", "chunks", "sinks")},
}
QUICK = ["int8", "model", "latent"]


@functools.cache
def asked(name):
    """Twice the same, so that what had to leave its pages is asked for again."""
    small = name in ("latent", "chunks", "sinks")
    return requests(64 if small else 128) * 2


@functools.cache
def without(name):
    one = MADE[name]()
    return tokens(one.generate_all(asked(name))), one.stats.scheduler


def check(name):
    """Greedy and drawn, through chunks and preemption, in too few pages: the same tokens."""
    one = MADE[name](host_pages=200)
    found, (said, before) = tokens(one.generate_all(asked(name))), without(name)
    assert found == said
    stats = one.stats.scheduler
    assert stats.back and stats.out >= stats.back + stats.hosted
    assert stats.referenced == 0 and before.out == 0
    assert stats.planned < before.planned and stats.reused > before.reused
    assert one.stats.host_bytes > 0


@pytest.mark.parametrize("name", quick_first([n for n in MADE if n not in MESHES], QUICK))
def test_the_same_tokens_and_less_is_computed(name):
    check(name)


@pytest.mark.catches("a-rings-page-in-another-row")
@pytest.mark.parametrize("name", quick_first(MESHES, ["ring2 tensor2"]))
def test_meshes(name):
    check(name)


@pytest.mark.catches("comes-back-as-another")
@pytest.mark.catches("goes-out-behind-what-comes-back")
@pytest.mark.parametrize("host_pages", [1, 5, 200])
def test_places_are_used_again_and_again(host_pages):
    one = engine(host_pages=host_pages)
    assert tokens(one.generate_all(requests() * 2)) == alone("llama") * 2
    stats = one.stats.scheduler
    assert 0 < stats.hosted <= host_pages < stats.out and stats.back
    # Layers, keys and values, tokens, kv heads, numbers of a head, bytes of one.
    assert one.stats.host_bytes == stats.hosted * 3 * 2 * 4 * 2 * 8 * 4


@pytest.mark.catches("what-drafters-keep-stays")
def test_drafters_find_what_they_kept():
    """Who drafts for itself is right whenever it has read what the model has."""
    prompt = tuple(np.random.default_rng(1).integers(0, 128, 40).tolist())
    filler = [EngineRequest(prompt=(i,) * 40, max_tokens=20) for i in (5, 6, 7)]
    one = engine(drafter=drafting(), host_pages=64)
    again = EngineRequest(prompt=prompt, max_tokens=20)
    one.generate_all([again])
    alone = one.stats.scheduler
    one.generate_all(filler)
    before = one.stats.scheduler
    one.generate_all([again])
    after = one.stats.scheduler
    assert after.back - before.back >= 9
    assert after.accepted - before.accepted == alone.accepted
    assert after.drafted - before.drafted == alone.drafted


@pytest.mark.catches("copies-are-compiled-late")
@pytest.mark.parametrize("name", ["llama", "model"])
def test_nothing_is_compiled_after_warm(name):
    one = MADE[name](host_pages=40)
    one.warm()
    assert not compiled_while(lambda: one.generate_all(asked(name)))
    assert one.stats.scheduler.out > WIDTH and one.stats.scheduler.back
    assert one._host.compiled == {"out": 1, "back": 1}


def test_none_are_kept_where_nobody_asks():
    one = engine()
    one.warm()
    one.generate_all(requests())
    assert one._host.compiled == {} and one.stats.host_bytes == 0


def test_refusals():
    with pytest.raises(InputError, match="host_pages: found -1; give 1 or more, or 0 for none"):
        engine(host_pages=-1)
    with pytest.raises(InputError, match="host_pages: found 4, and prompts .* share no pages"):
        engine(host_pages=4, reuse=False)
    with pytest.raises(InputError, match="found 4, and with window_rings no page serves a later"):
        engine(CONFIGS["mistral"], host_pages=4, window_rings=True)
    with pytest.raises(InputError, match="found 4, and what the model keeps of a token is not"):
        of_family("recurrent", host_pages=4)
    with pytest.raises(PlanError, match="which are .* GB of host memory for each device, and .*"):
        engine(host_pages=2**40)
    staged = staged_bound({"stage": 2})
    spec, params = build(LLAMA, staged)
    with pytest.raises(InputError, match="host_pages: stages keep their pages on their devices"):
        make_engine(spec, staged, params, **SMALL, host_pages=4)
