"""Requests that keep their first tokens and a window, among others that keep all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.inference import Generator, make_engine
from colossax.inference.engine import Engine
from colossax.inference.engine.drafting import NgramDrafter
from colossax.nn import Decoder, RopeConfig, YarnScaling, describe
from colossax.nn.rope import rope_tables, rotate, turn_tables
from colossax.scheduling import EngineRequest, Keep
from colossax.sharding import use
from tests.inference import test_caches as caches
from tests.inference.engine.test_engine import SMALL, alone, engine, requests, tokens
from tests.inference.engine.test_staged import bound_of as staged_bound
from tests.inference.test_generator import CONFIGS, LLAMA, build

pytestmark = pytest.mark.slow

PAGE = SMALL["page_tokens"]


def keeping(asked, every, **keep):
    """Each `every`th of them keeps so much."""
    return [
        dataclasses.replace(one, keep=Keep(**keep)) if i % every == 0 else one
        for i, one in enumerate(asked)
    ]


def company_changes_nothing(keeps, **keep):
    """Every other request keeps so much: too few pages for all, a seat alone, and a restart."""
    asked = keeping(requests(), 2, **keep)
    one = engine(keeps=keeps)
    one.warm()
    before = one.program.compiled
    said = tokens(one.generate_all(asked))
    assert one.program.compiled == before
    assert one.stats.scheduler.preemptions and one.stats.scheduler.reused
    assert said[1::2] == alone("llama")[1::2]
    assert said[::2] != alone("llama")[::2]
    again = engine(keeps=keeps, pages=64, seats=1, mixed_tokens=7, reuse=False)
    assert said == tokens(again.generate_all(asked))
    begun = [dataclasses.replace(asked[0], generated=said[0][:9]), asked[1]]
    assert tokens(again.generate_all(begun)) == [said[0][9:], said[1]]


@pytest.mark.catches("kept-pages-are-named")
def test_others_are_as_if_alone_and_company_changes_nothing():
    company_changes_nothing("first", sinks=3, window=2 * PAGE)


def test_pages_of_a_long_request():
    """No more at a time than first pages, a window and a step, of a pool for no whole sequence."""
    one = engine(keeps="first", pages=8, mixed_tokens=9, seats=2)
    keep = Keep(sinks=1, window=3 * PAGE)
    held = keep.pages(PAGE, 9).held
    assert held == 1 + 3 + 2
    number = one.add(EngineRequest(prompt=tuple(range(40)), max_tokens=20, keep=keep))
    most, said = 0, []
    while one.busy:
        said += [x for x in one.step() if x.request == number]
        most = max(most, one.stats.scheduler.referenced)
    assert len(said) == 20 and said[-1].ended == "length" and most == held


@pytest.mark.catches("window-of-a-page-less")
def test_a_window_of_a_page_is_a_chunk():
    """Without first pages and with a window of one page it is the model whose chunks are pages."""
    bound, device = Plan().bind(jax.devices()[:1]), caches.CONFIG
    whole, chunked = (
        described(dataclasses.replace(device, chunk=chunk), bound) for chunk in (None, PAGE)
    )
    params = caches.initialise(whole, bound, jax.random.key(1))
    prompt = caches.PROMPT[:21]
    want = Generator(chunked, bound, params).generate(prompt, max_tokens=12).tokens
    one = Engine(whole, bound, params, **SMALL, keeps="first")
    asked = EngineRequest(prompt=prompt, max_tokens=12, keep=Keep(sinks=0, window=PAGE))
    assert tokens(one.generate_all([asked])) == [want]


def described(config, bound):
    with use(bound):
        return describe(lambda rngs: Decoder(config, rngs=rngs))


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(yarn=YarnScaling(factor=4.0, original_max_positions=16)),
        RopeConfig(interleaved=True),
    ],
    ids=["plain", "yarn", "interleaved"],
)
@pytest.mark.catches("turned-and-lengthened")
def test_turns_add_up(rope):
    """What is turned twice is turned once by both, however frequencies are scaled."""
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 16))
    at = jnp.asarray([[0, 3, 7, 30, 31]])
    by = jnp.asarray([[0, -2, -7, -16, 4]])
    once = rotate(x, rope_tables(at + by, rope, 16), interleaved=rope.interleaved)
    twice = rotate(x, rope_tables(at, rope, 16), interleaved=rope.interleaved)
    np.testing.assert_allclose(rotate(twice, turn_tables(by, rope, 16)), once, atol=1e-5)


def test_refusals():
    with pytest.raises(InputError, match="keep: this engine keeps all tokens of each request"):
        engine().add(EngineRequest(prompt=(1,), max_tokens=4, keep=Keep(window=4)))
    with pytest.raises(InputError, match="keep.window: found 0; give 1 or more"):
        engine(keeps="first").add(EngineRequest(prompt=(1,), max_tokens=4, keep=Keep(window=0)))
    for name, why in {
        "mistral": "has layers with a window or chunks",
        "gpt2": "has a table of positions",
        "bloom": "has biases by distance",
    }.items():
        with pytest.raises(InputError, match=f"keeps: the model {why}, so that requests cannot"):
            engine(CONFIGS[name], keeps="first")
    with pytest.raises(InputError, match="keeps: a drafter sees all tokens of a request"):
        engine(keeps="first", drafter=NgramDrafter(3))
    ring = Plan(mesh={"ring": 2}).bind(jax.devices()[:2])
    spec, params = build(LLAMA, ring)
    with pytest.raises(PlanError, match="keeps: the devices of 'ring' share a sequence's pages"):
        make_engine(spec, ring, params, **SMALL, keeps="first")
    staged = staged_bound({"stage": 2})
    spec, params = build(LLAMA, staged)
    with pytest.raises(InputError, match="keeps: stages keep all tokens of each request"):
        make_engine(spec, staged, params, **SMALL, keeps="first")


def test_it_waits_for_its_turn_as_one_without_a_prefix():
    """What is cached of its prompt is none of its own."""
    one = engine(keeps="first")
    prompt = tuple(range(20))
    one.generate_all([EngineRequest(prompt=prompt, max_tokens=1)])
    asked = EngineRequest(prompt=prompt, max_tokens=1)
    assert one.ahead(asked) == (20 - 4 * PAGE, 0)
    keep = Keep(sinks=0, window=PAGE)
    assert one.ahead(dataclasses.replace(asked, keep=keep)) == (20, 0)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_are_kept_likewise(form):
    """Whoever else is there, and in chunks of any length."""
    asked = keeping(requests()[:4], 2, sinks=3, window=2 * PAGE)
    one = engine(keeps="first", cache_format=form)
    again = engine(keeps="first", cache_format=form, seats=1, mixed_tokens=7, reuse=False)
    assert tokens(one.generate_all(asked)) == tokens(again.generate_all(asked))
