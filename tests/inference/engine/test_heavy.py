"""Requests that keep what was looked at most and a window, among others that keep all."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.inference import make_engine, several
from colossax.inference.engine import Engine
from colossax.inference.engine.drafting import NgramDrafter
from colossax.pallas.attention import counted
from colossax.scheduling import EngineRequest, Keep, SamplingConfig
from tests.inference.engine.test_engine import SMALL, engine, flat, requests, tokens
from tests.inference.engine.test_keeping import company_changes_nothing, keeping
from tests.inference.engine.test_staged import bound_of as staged_bound
from tests.inference.test_generator import CONFIGS, LLAMA, build
from tests.pallas.attention.test_heavy import truth

pytestmark = pytest.mark.slow

PAGE = SMALL["page_tokens"]
KEEP = Keep(heavy=3, window=PAGE + 1)
"""One page and two."""


def normed(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + LLAMA.norm_eps) * scale


def turned(x):
    """`[s, n, h]`, pairs half a head apart, by their positions in the text."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * LLAMA.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def logits(ids, heavy, window):
    """Of each token, by NumPy in float64; pages of heavy hitters and of a window."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), flat(LLAMA)[1])
    x = params["embed"]["table"][np.asarray(ids)]
    for layer in params["layers"]["segments"].values():
        attn, mlp = layer["attn"], layer["mlp"]
        y = normed(x, layer["attn_norm"]["scale"])
        q, k, v = (np.einsum("sd,dnh->snh", y, attn[name]["w"]) for name in "qkv")
        out, _ = truth(turned(q), turned(k), v, heavy, window, PAGE)
        x = x + np.einsum("snh,nhd->sd", out.reshape(q.shape), attn["o"]["w"])
        y = normed(x, layer["mlp_norm"]["scale"])
        gate = y @ mlp["gate"]["w"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up"]["w"])) @ mlp["down"]["w"]
    return normed(x, params["norm"]["scale"]) @ params["head"]["w"]


@pytest.mark.catches("heavy-as-a-window")
def test_logits_are_those_of_numpy():
    """Greedy tokens and their log-probabilities, a prompt in chunks and then one by one."""
    prompt = tuple(np.random.default_rng(5).integers(0, 128, 27).tolist())
    asked = EngineRequest(
        prompt=prompt, max_tokens=21, keep=KEEP, sampling=SamplingConfig(logprobs=0)
    )
    one = engine(keeps="heavy", mixed_tokens=7)
    (told,) = one.generate_all([asked])
    said = [x.token for x in told]
    found = logits([*prompt, *said[:-1]], 1, 2)[len(prompt) - 1 :]
    assert said == np.argmax(found, axis=-1).tolist()
    whole = logits([*prompt, *said[:-1]], 0, 0)[len(prompt) - 1 :]
    assert said != np.argmax(whole, axis=-1).tolist()
    expected = found.max(-1) - np.log(np.exp(found).sum(-1))
    np.testing.assert_allclose([x.logprob for x in told], expected, atol=2e-4)


def test_others_are_as_if_alone_and_company_changes_nothing():
    company_changes_nothing("heavy", heavy=3, window=PAGE + 1)


@pytest.mark.catches("pages-of-one-token-are-read-once")
def test_pages_of_one_token():
    """However the prompt is cut."""
    asked = EngineRequest(prompt=tuple(range(20)), max_tokens=6, keep=Keep(heavy=4, window=4))
    sizes = {"page_tokens": 1, "seats": 1, "pages": 32}
    one, other = (
        engine(keeps="heavy", mixed_tokens=mixed, **sizes).generate_all([asked]) for mixed in (1, 7)
    )
    assert tokens(one) == tokens(other)


@pytest.mark.catches("heavy-holds-a-step-more")
def test_pages_of_a_long_request():
    """Never more than were asked for, of a pool for no whole sequence."""
    one = engine(keeps="heavy", pages=5, mixed_tokens=9, seats=2)
    keep = Keep(heavy=2 * PAGE, window=3 * PAGE)
    assert keep.pages(PAGE, 9).held == 5
    number = one.add(EngineRequest(prompt=tuple(range(40)), max_tokens=20, keep=keep))
    most, said = 0, []
    while one.busy:
        said += [x for x in one.step() if x.request == number]
        most = max(most, one.stats.scheduler.referenced)
    assert len(said) == 20 and said[-1].ended == "length" and most == 5


@functools.cache
def expected(form="own"):
    asked = keeping(requests()[:5], 2, heavy=3, window=PAGE + 1)
    one = engine(keeps="heavy", cache_format=form)
    return asked, tokens(one.generate_all(asked))


def test_devices_of_tensor_keep_their_own_heads():
    bound = Plan(mesh={"tensor": 2}).bind(jax.devices()[:2])
    spec, params = build(LLAMA, bound)
    asked, said = expected()
    assert tokens(Engine(spec, bound, params, **SMALL, keeps="heavy").generate_all(asked)) == said


@pytest.mark.sweep
def test_one_pass_over_keys_changes_no_token(monkeypatch):
    """As a kernel would make it, in chunks of any length, with two devices' heads apart."""
    asked, said = expected()
    monkeypatch.setattr(counted, "chosen_for", lambda *given, **how: "xla")
    bound = Plan(mesh={"tensor": 2}).bind(jax.devices()[:2])
    spec, params = build(LLAMA, bound)
    one = Engine(spec, bound, params, **{**SMALL, "mixed_tokens": 7}, keeps="heavy")
    assert tokens(one.generate_all(asked)) == said


@pytest.mark.sweep
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_are_kept_likewise(form):
    """Whoever else is there, and in chunks of any length."""
    asked, said = expected(form)
    again = engine(keeps="heavy", cache_format=form, seats=1, mixed_tokens=7, reuse=False)
    assert said == tokens(again.generate_all(asked))


@pytest.mark.catches("known-requests-keep-all")
def test_requests_that_are_all_known():
    """As `colossax generate` has them: those of an engine, in no more pages than are kept."""
    spec, params, bound = flat(LLAMA)
    keep = Keep(heavy=16, window=16)
    asked = [dataclasses.replace(x, keep=keep, ends=()) for x in requests()[:3] if x.max_tokens > 9]
    asked = [dataclasses.replace(x, prompt=tuple(range(30))) for x in asked]
    run = several(spec, bound, params, requests=asked)
    found = [x.tokens for x in run.run()]
    one = Engine(spec, bound, params, seats=2, keeps="heavy")
    assert found == tokens(one.generate_all(asked))
    assert run.arguments[2].cache["k"].shape[1] == 2 * len(asked)


@pytest.mark.catches("heavy-of-some-heads")
def test_refusals():
    asked = EngineRequest(prompt=(1,), max_tokens=4, keep=KEEP)
    with pytest.raises(InputError, match="leave it out, or make the engine with keeps='heavy'"):
        engine().add(asked)
    with pytest.raises(InputError, match="keep: this engine keeps the first tokens and a window"):
        engine(keeps="first").add(asked)
    with pytest.raises(InputError, match="keep: found sinks 2 and heavy 4; give one of them"):
        both = Keep(sinks=2, heavy=4, window=4)
        engine(keeps="heavy").add(dataclasses.replace(asked, keep=both))
    with pytest.raises(InputError, match="keeps: found 'most'; give first or heavy, or leave it"):
        engine(keeps="most")
    for name, why in {
        "mistral": "has layers with a window or chunks",
        "gpt2": "has a table of positions",
        "bloom": "has biases by distance",
    }.items():
        words = f"keeps: the model {why}, so that requests cannot keep the tokens that were looked"
        with pytest.raises(InputError, match=words):
            engine(CONFIGS[name], keeps="heavy")
    with pytest.raises(InputError, match="keeps: a drafter sees all tokens of a request"):
        engine(keeps="heavy", drafter=NgramDrafter(3))
    for mesh, words in {
        "ring": "keeps: the devices of 'ring' share a sequence's pages",
        "tensor": "keeps: 'heavy' counts who looks at a key, and 'tensor' splits 8 heads and not",
    }.items():
        bound = Plan(mesh={mesh: 4}).bind(jax.devices()[:4])
        spec, params = build(LLAMA, bound)
        with pytest.raises(PlanError, match=words):
            make_engine(spec, bound, params, **SMALL, keeps="heavy")
    staged = staged_bound({"stage": 2})
    spec, params = build(LLAMA, staged)
    for make in (
        lambda: make_engine(spec, staged, params, **SMALL, keeps="heavy"),
        lambda: several(spec, staged, params, requests=[asked]),
    ):
        with pytest.raises(InputError, match="keeps: stages keep all tokens of each request"):
            make()
    spec, params, bound = flat(LLAMA)
    first = dataclasses.replace(asked, keep=Keep(window=4))
    with pytest.raises(InputError, match="some requests keep sinks and some heavy hitters"):
        several(spec, bound, params, requests=[asked, first])
