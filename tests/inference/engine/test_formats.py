"""An engine whose pages are codes says what one says whose keys and values are rounded to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError
from colossax.inference.engine import Engine
from colossax.inference.engine.formats import in_codes
from colossax.inference.engine.program import EngineProgram, Sizes
from colossax.inference.engine.sizing import cache_bytes
from colossax.models import LlamaConfig, maker
from colossax.nn import CacheArray, describe
from colossax.sharding import use
from tests.cases import quick_first
from tests.inference import test_caches as caches
from tests.inference.engine.test_engine import SMALL, engine, requests, tokens
from tests.inference.test_generator import CONFIGS, LLAMA, PLANS, build
from tests.pallas.attention.test_codes import stands_for

pytestmark = pytest.mark.slow

FORMS = ("int8", "fp8")


def rounding(form):
    """`attend_cache` of a cache in floats, whose keys and values are what codes stand for."""
    from colossax.pallas.attention import cache

    def numpy(x):
        return stands_for(x, form).astype(np.float32)

    def kept(new, _cache):
        return {
            name: jax.pure_callback(numpy, jax.ShapeDtypeStruct(x.shape, jnp.float32), x)
            for name, x in new.items()
        }

    return cache, kept


@pytest.mark.catches("one-format-for-all")
@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_rounded_keys_and_values(form, monkeypatch):
    """NumPy rounds them in a cache of floats: greedy and drawn, with chunks and preemption."""
    found = engine(cache_format=form)
    said = tokens(found.generate_all(requests()))
    assert found.stats.scheduler.preemptions and found.stats.scheduler.reused
    module, kept = rounding(form)
    monkeypatch.setattr(module, "as_kept", kept)
    assert said == tokens(engine().generate_all(requests()))


@pytest.mark.parametrize("name", quick_first(["llama", "mistral", "bloom"], ["llama"]))
def test_company_preemption_and_cuts_change_no_token(name):
    said = tokens(engine(CONFIGS[name], cache_format="int8").generate_all(requests()))
    one = engine(CONFIGS[name], cache_format="int8", reuse=False, pages=64, mixed_tokens=7, seats=1)
    assert said == tokens(one.generate_all(requests()))


@pytest.mark.parametrize("name", quick_first(["latent", "sinks", "chunks"], ["latent"]))
def test_other_caches(name):
    """Latents of all heads, and layers of several kinds."""
    bound, spec, params = caches.build(name)
    asked = [one for one in requests(64) if len(one.prompt) < 30][:6]
    first = Engine(spec, bound, params, **SMALL, cache_format="int8").generate_all(asked)
    options = {**SMALL, "mixed_tokens": 7, "seats": 2}
    again = Engine(spec, bound, params, **options, cache_format="int8").generate_all(asked)
    assert tokens(first) == tokens(again)


@pytest.mark.parametrize("name", quick_first(PLANS, ["fsdp2 tensor4"]))
def test_meshes(name):
    bound = PLANS[name].bind()
    spec, params = build(LLAMA, bound)
    found = Engine(spec, bound, params, **SMALL, cache_format="int8").generate_all(requests())
    assert tokens(found) == tokens(engine(cache_format="int8").generate_all(requests()))


def test_nothing_is_compiled_after_warm():
    one = engine(cache_format="fp8")
    one.warm()
    before = dict(one.program.compiled)
    one.generate_all(requests())
    assert one.program.compiled == before == {"mixed": 1, "decode": 1}


@pytest.mark.catches("scales-as-wide-as-codes")
def test_the_same_bytes_hold_nearly_twice_the_pages():
    """A byte for each number and two for each head and token, where bfloat16 takes two for each."""
    head, kv_heads, layers = 128, 2, 2
    config = LlamaConfig(
        vocab=64, embed=32, layers=layers, heads=4, kv_heads=kv_heads, mlp=48, head_dim=head
    )
    bf16 = Plan().precision
    bf16 = type(bf16)(params="bfloat16", compute="bfloat16", cache="bfloat16")
    bound = Plan(precision=bf16).bind(jax.devices()[:1])
    with use(bound):
        spec = describe(maker(config))

    def held(form, pages):
        sizes = Sizes(seats=2, pages=pages, page_tokens=16, slots=64, mixed=8, decode=2, cache=form)
        return cache_bytes(EngineProgram(spec, bound, sizes))

    of_tokens = 16 * layers * 2 * kv_heads
    assert held("own", 32) == 32 * of_tokens * 2 * head
    for form in FORMS:
        assert held(form, 32) == 32 * of_tokens * (head + 2)
        assert held(form, 63) <= held("own", 32)


def test_refusals():
    with pytest.raises(InputError, match="cache_format: found 'int4'; give own, int8 or fp8"):
        engine(cache_format="int4")
    own = CacheArray(shape=(1, 2, 4, 8), dims=("layers", None, None, None))
    with pytest.raises(InputError, match="as 'own' by itself, which knows no codes; give own"):
        in_codes({"own": own}, "fp8")
    bound, spec, params = caches.build("recurrent")
    with pytest.raises(
        InputError, match="cache_format: found 'int8', and nothing .* lies in pages"
    ):
        Engine(spec, bound, params, **SMALL, cache_format="int8")
