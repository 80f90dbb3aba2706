"""Trees of guesses by the kernel's words of ancestors: the tokens that there are without."""

import functools

import jax
import pytest

from colossax.config import Plan, Precision
from colossax.inference.engine import Engine
from colossax.inference.engine.drafting import ModelDrafter
from colossax.inference.plan import unrolled
from colossax.models import LlamaConfig
from colossax.pallas.attention import cache, paged
from colossax.scheduling import EngineRequest
from tests.cases import quick_first
from tests.inference.engine.test_drafts import DRAFTERS, engine, near
from tests.inference.engine.test_engine import alone, requests, tokens
from tests.inference.test_generator import CONFIGS, build, single

pytestmark = pytest.mark.slow


def by(implementation, monkeypatch):
    """Whoever attends to pages asks this one; the list is of the trees that it was given."""
    trees = []

    def attend(q, held, layer, pages, **how):
        trees.append(pages.branches is not None)
        return paged.attend_by_kernel(q, held, layer, pages, **how, implementation=implementation)

    monkeypatch.setattr(cache, "attend_by_kernel", attend)
    return trees


ALL = [(drafter, name) for drafter in ("tree", "glide") for name in CONFIGS if name != "bloom"]


@pytest.mark.parametrize(("drafter", "name"), quick_first(ALL, [("tree", "mistral")]))
def test_words_change_no_token(drafter, name, monkeypatch):
    """Chunks, shared pages, preemptions, and trees for which there is no room; a window too."""
    trees = by("xla", monkeypatch)
    one = engine(DRAFTERS[drafter](CONFIGS[name]), CONFIGS[name])
    assert tokens(one.generate_all(requests())) == alone(name)
    stats = one.stats.scheduler
    assert any(trees) and stats.preemptions and 0 < stats.accepted < stats.drafted


HALF = LlamaConfig(
    vocab=128, embed=128, layers=1, heads=2, kv_heads=1, mlp=96, max_seq=64, init_std=0.3
)
"""A head of 64, which the kernel knows."""


@functools.cache
def in_half():
    """The model on one device with a cache of bfloat16."""
    plan = Plan(precision=Precision(cache="bfloat16"))
    bound = unrolled(plan, build(HALF, single())[0]).bind(jax.devices()[:1])
    return *build(HALF, bound), bound


def said():
    """By an engine with trees, and how many guesses were right."""
    spec, params, bound = in_half()
    drafter = ModelDrafter(spec, bound, near(params, 0.1), 2, nodes=5)
    sizes = {"seats": 2, "pages": 12, "page_tokens": 8, "mixed_tokens": 12}
    one = Engine(spec, bound, params, drafter=drafter, **sizes)
    asked = [EngineRequest(prompt=tuple(range(n, 2 * n)), max_tokens=8) for n in (3, 19, 11)]
    return tokens(one.generate_all(asked)), one.stats.scheduler.accepted


@pytest.mark.sweep
def test_the_kernel_says_the_same(monkeypatch):
    """Interpreted, through every step of an engine."""
    plainly = said()
    trees = by("interpret", monkeypatch)
    assert said() == plainly and plainly[1] > 0
    assert any(trees)
