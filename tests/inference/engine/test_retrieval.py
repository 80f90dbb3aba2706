"""A model that guesses for itself from a few of its pages: which, and that no guess shows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError
from colossax.inference.engine import Engine, make_engine
from colossax.inference.engine.drafting import (
    Drafter,
    Guesses,
    ModelDrafter,
    NgramDrafter,
    RetrievalDrafter,
)
from colossax.inference.plan import unrolled
from colossax.models import GPT2Config, LlamaConfig
from colossax.scheduling import EngineRequest, SamplingConfig
from tests.cases import quick_first
from tests.inference import test_caches as caches
from tests.inference.engine.test_drafts import engine, glide, itself
from tests.inference.engine.test_engine import SMALL, alone, compiled_while, flat, requests, tokens
from tests.inference.engine.test_reading import laid_out
from tests.inference.test_generator import CONFIGS, GROUPED, LLAMA, PLANS, build, single

pytestmark = pytest.mark.slow

FEW = {"pages": 2, "recent": 1}
LONG = {"seats": 2, "page_tokens": 4, "mixed_tokens": 16}

BELOW = {
    "alone": lambda config: None,
    "ngrams": lambda config: NgramDrafter(2),
    "model": lambda config: itself(config, 2, noise=0.1),
    "glide": lambda config: glide(config, 2),
}


def retrieval(below, config, tokens=4, **options):
    return RetrievalDrafter(tokens, below=BELOW[below](config), **{**FEW, **options})


ALL = [(below, name) for below in BELOW for name in CONFIGS]
QUICK = [("alone", "llama"), ("model", "qwen3"), ("ngrams", "bloom")]


@functools.cache
def served(below, name):
    """An engine whose programs tests share."""
    return engine(retrieval(below, CONFIGS[name]), CONFIGS[name])


@pytest.mark.parametrize(("below", "name"), quick_first(ALL, QUICK))
def test_each_as_if_alone(below, name):
    """Chunks, shared pages, preemptions, drawn tokens, and too few pages for all guesses."""
    one = served(below, name)
    assert tokens(one.generate_all(requests())) == alone(name)
    stats = one.stats.scheduler
    assert stats.preemptions and stats.reused and stats.referenced == 0
    assert 0 < stats.accepted < stats.drafted


def lengths(one, prompt, count):
    """What each step of a request says, but for the prompt's own."""
    one._scheduler._drafts._adapts = False
    one.add(EngineRequest(prompt=tuple(prompt), max_tokens=count))
    steps = []
    while one.busy:
        steps.append([x.token for x in one.step()])
    return [len(each) for each in steps if each][1:]


class Knows(Drafter):
    """Guesses a text that it knows, of one seat, and counts how often it was asked."""

    def __init__(self, text, tokens):
        self.params, self.tokens = {"text": jnp.asarray(text, jnp.int32)}, tokens

    def fitted(self, program):
        return self

    def empty(self):
        return jnp.int32(0)

    @property
    def abstract(self):
        return jax.ShapeDtypeStruct((), jnp.int32)

    def draft(self, params, held, view):
        at = view.length[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)
        return Guesses(tokens=params["text"].at[at].get(mode="fill", fill_value=0)), held + 1


@functools.cache
def far():
    """A model whose tokens look for tokens like themselves, wherever they are, and its text.

    Keys are made as queries are, and nothing says where a token stands. The text repeats at its
    end how it began.
    """
    config = GPT2Config(vocab=64, embed=64, layers=2, heads=4, max_seq=160, init_std=0.3, mlp=96)
    spec, params, bound = flat(config)
    params = jax.tree.map(lambda x: x, params)
    params["positions"]["table"] = jnp.zeros_like(params["positions"]["table"])
    for layer in params["layers"]["segments"].values():
        layer["attn"]["k"]["w"] = layer["attn"]["q"]["w"]
        layer["attn"]["o"]["w"] = layer["attn"]["o"]["w"] * 4
        layer["mlp"]["down"]["w"] = layer["mlp"]["down"]["w"] * 0.3
    noise = np.random.default_rng(0)
    passage, others = noise.permutation(32)[:24], 32 + noise.integers(0, 32, 88)
    return (spec, bound, params), (*passage.tolist(), *others.tolist(), *passage[:4].tolist())


def of_far(drafter):
    spec_bound_params, text = far()
    one = Engine(*spec_bound_params, drafter=drafter, **LONG)
    one._scheduler._drafts._adapts = False
    return one, text


@pytest.mark.catches("means-of-full-pages-are-old")
@pytest.mark.catches("means-of-prompts-are-old")
def test_who_finds_all_pages_is_always_right():
    """Greedily: each step says all guesses and a token more."""
    one, text = of_far(RetrievalDrafter(4, pages=40, recent=1))
    assert lengths(one, text, 41) == [5] * 8
    stats = one.stats.scheduler
    assert stats.accepted == stats.drafted
    check_means(one)
    assert lengths(one, text, 41) == [5] * 8 and one.stats.scheduler.reused
    check_means(one)  # of pages that were found, those that another made


def check_means(one):
    """Of pages that are full: those of the sequence that was served, by hand."""
    cache, means = one._state.cache["k"], one._state.drafter["means"]["mean"]
    length, each = int(one._state.length[0]), one.sizes.page_tokens
    rows = np.asarray(one._packer._there["table"])[0, : (length - 1) // each]
    assert len(rows) > 35
    want = np.asarray(cache)[:, rows].mean(axis=2)
    np.testing.assert_allclose(np.asarray(means)[:, rows], want, atol=1e-5)


@pytest.mark.catches("pages-are-not-found")
def test_far_pages_matter(monkeypatch):
    """With as many pages of the last ones in place of those that are found fewer are right."""

    def nothing(q, means, verified, *, count, **_more):
        return jnp.full((q.shape[0], count), -1, jnp.int32)

    shares = []
    for recent in (2, 6):
        one, text = of_far(RetrievalDrafter(4, pages=4, recent=recent))
        for temperature in (0.0, 0.5):
            ask = functools.partial(EngineRequest, prompt=text, max_tokens=40)
            draws = [SamplingConfig(seed=seed, temperature=temperature) for seed in range(8)]
            one.generate_all([ask(sampling=each) for each in draws])
        stats = one.stats.scheduler
        shares.append(stats.accepted / stats.drafted)
        monkeypatch.setattr("colossax.pallas.attention.retrieved.found_pages", nothing)
    assert shares[0] > shares[1] + 0.1


@pytest.mark.catches("guesses-turned-as-others")
@pytest.mark.catches("below-is-not-looked-at")
@pytest.mark.catches("below-guesses-behind-what-is-said")
def test_who_is_below_saves_passes_and_changes_no_guess():
    """Two of three tokens of a pass are guesses that are right, or none is."""
    prompt = (5, 9, 2)
    expected = engine(None, pages=64).generate_all([EngineRequest(prompt=prompt, max_tokens=60)])
    text = np.asarray([*prompt, *tokens(expected)[0]], np.int32)
    one = engine(RetrievalDrafter(5, pages=20, below=Knows(text, 2)), pages=64)
    assert passes(one, prompt) == 2
    one.program.drafter.params["text"] = jnp.asarray((text + 1) % 128)
    assert passes(Engine.of(one.program, flat(LLAMA)[1]), prompt) == 5


class Counted(ModelDrafter):
    """Counts how often any was asked where a request has pages for what is guessed."""

    asked = 0

    def draft(self, params, held, view):
        room = ~view.speaks | (view.length + self.tokens <= view.room)
        jax.debug.callback(self._count, jnp.all(room))
        return super().draft(params, held, view)

    @staticmethod
    def _count(room):
        Counted.asked += bool(room)


@pytest.mark.catches("below-has-not-read-what-was-right")
@pytest.mark.catches("no-room-for-the-next-drafts")
def test_a_model_below_reads_what_was_right():
    """The same weights below: all its guesses are right, behind drafts of two whole rounds too."""
    spec, params, bound = flat(LLAMA)
    drafter = RetrievalDrafter(6, pages=20, below=Counted(spec, bound, params, 2))
    one = engine(drafter, pages=64)
    one._scheduler._drafts._adapts = False
    one.generate_all([EngineRequest(prompt=(5, 9, 2), max_tokens=43)])
    jax.effects_barrier()
    steps = sum(one.stats.steps.values())
    # Six drafts of two rounds, and one round of a seventh, whose second has no page.
    assert 7 <= steps <= 9 and Counted.asked == 13


def passes(one, prompt):
    """Of each draft, all five guesses of which are right."""
    one._scheduler._drafts._adapts = False
    number = one.add(EngineRequest(prompt=prompt, max_tokens=60))
    told = []
    while sum(map(len, told)) < 31:
        told += [each] if (each := one.step()) else []
    assert [len(each) for each in told] == [1, 6, 6, 6, 6, 6]
    found = int(one._state.drafter["below"]) / sum(one.stats.steps.values())
    one.cancel(number)
    return found


SERVED = {
    "penalties": ({"frequency_penalty": 1.5, "presence_penalty": 0.5}, {}),
    "top": ({"top_k": 9, "top_p": 0.8, "min_p": 0.05, "logit_bias": ((5, 2.0),)}, {}),
    "deterministic": ({}, {"deterministic": True}),
}


@pytest.mark.parametrize("asks", quick_first(SERVED, ["penalties"]))
def test_whatever_is_asked(asks):
    fields, options = SERVED[asks]
    asked = [
        EngineRequest(
            prompt=one.prompt,
            max_tokens=one.max_tokens,
            sampling=SamplingConfig(**{"temperature": 0.7, "seed": 5, **fields}),
        )
        for one in requests()
    ]
    found = Engine.of(served("model", "qwen3").program, flat(CONFIGS["qwen3"])[1], **options)
    plain = engine(None, CONFIGS["qwen3"], **options)
    assert tokens(found.generate_all(asked)) == tokens(plain.generate_all(asked))


def test_nothing_is_compiled_after_warm():
    one = Engine.of(served("model", "qwen3").program, flat(CONFIGS["qwen3"])[1])
    one.warm()
    assert not compiled_while(lambda: one.generate_all(requests()))
    assert one.program.compiled == {"mixed": 1, "decode": 1}


@pytest.mark.parametrize("form", quick_first(["int8", "fp8"], ["int8"]))
def test_codes(form):
    """Guesses see codes, as the model does, but of each other."""
    one = engine(retrieval("alone", LLAMA, pages=20), cache_format=form)
    asked = requests()
    plain = engine(None, cache_format=form)
    assert tokens(one.generate_all(asked)) == tokens(plain.generate_all(asked))
    stats = one.stats.scheduler
    assert stats.accepted > 0.5 * stats.drafted  # some have no page


@pytest.mark.parametrize("name", quick_first(["sinks", "chunks"], ["sinks"]))
def test_layers_of_several_kinds(name):
    bound, spec, params = caches.build(name)
    asked = [one for one in requests(64) if len(one.prompt) < 30][:6]
    plain = Engine(spec, bound, params, **SMALL).generate_all(asked)
    one = Engine(spec, bound, params, drafter=RetrievalDrafter(2, pages=20), **SMALL)
    assert tokens(one.generate_all(asked)) == tokens(plain)
    assert one.stats.scheduler.accepted > 0.5 * one.stats.scheduler.drafted


@pytest.mark.parametrize("name", quick_first([*PLANS, "kv heads"], ["kv heads"]))
def test_meshes(name):
    """Each device finds pages for the kv heads that it holds; others hold all of them."""
    config = LLAMA if name in PLANS else LlamaConfig(**{**GROUPED, "kv_heads": 4})
    plan = PLANS.get(name, Plan(mesh={"fsdp": 2, "tensor": 4}))
    bound = plan.bind()
    if len(plan.segments) == 1:
        bound = unrolled(plan, build(config, single())[0]).bind()
    spec, params = build(config, bound)
    below = ModelDrafter(spec, bound, params, 2) if name in PLANS else None
    one = Engine(spec, bound, params, drafter=RetrievalDrafter(3, **FEW, below=below), **SMALL)
    plain = engine(None, config)
    assert tokens(one.generate_all(requests())) == tokens(plain.generate_all(requests()))
    there = engine(retrieval("alone", config, 3), config)
    there.generate_all(requests())
    assert one.stats.scheduler.accepted == there.stats.scheduler.accepted


@pytest.mark.sweep
def test_an_engine_for_each_place_along_data():
    plan = Plan(mesh={"data": 2, "fsdp": 2})
    bound = unrolled(plan, build(LLAMA, single())[0]).bind(jax.devices()[:4])
    spec, params = build(LLAMA, bound)
    drafter = RetrievalDrafter(3, **FEW, below=ModelDrafter(spec, bound, params, 2))
    one = make_engine(spec, bound, params, drafter=drafter, **SMALL)
    assert len(one.engines) == 2
    assert tokens(one.generate_all(requests())) == alone("llama")
    assert one.stats.scheduler.accepted


@pytest.mark.catches("latents-are-retrieved")
@pytest.mark.catches("rings-are-retrieved")
def test_refusals():
    for name in ("tokens", "pages", "recent"):
        with pytest.raises(InputError, match=f"{name}: found 0; give 1 or more"):
            RetrievalDrafter(**{name: 0})
    with pytest.raises(InputError, match="below: found a tree of 6 guesses, and retrieval looks"):
        RetrievalDrafter(below=itself(LLAMA, 2, nodes=6))
    bound, spec, params = caches.build("latent")
    with pytest.raises(InputError, match="the model keeps .* and pages are found by their keys"):
        Engine(spec, bound, params, drafter=RetrievalDrafter(), **SMALL)
    with pytest.raises(InputError, match="leave out window_rings, or draft with n-grams"):
        engine(RetrievalDrafter(), CONFIGS["mistral"], window_rings=True)
    ring = unrolled(Plan(mesh={"ring": 2}), build(LLAMA, single())[0]).bind(jax.devices()[:2])
    spec, params = build(LLAMA, ring)
    with pytest.raises(InputError, match="the devices of 'ring' share a sequence's pages, and"):
        Engine(spec, ring, params, drafter=RetrievalDrafter(), **SMALL)
    config, (spec, bound, params), _ = laid_out("t5", Plan())
    with pytest.raises(InputError, match="the model reads a source, sound or images, which"):
        Engine(spec, bound, params, drafter=RetrievalDrafter(), seats=2)
