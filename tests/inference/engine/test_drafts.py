"""Drafts change no token: an engine with any drafter says what it says without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.inference.engine import Engine
from colossax.inference.engine.drafting import ModelDrafter, NgramDrafter
from colossax.inference.engine.drafting.looking import Looked, accepted
from colossax.inference.engine.drafting.ngram import ngram_follows
from colossax.inference.engine.drafting.trees import Tree
from colossax.inference.plan import unrolled
from colossax.models import LlamaConfig
from colossax.scheduling import EngineRequest, SamplingConfig
from tests.cases import quick_first
from tests.inference.engine.test_engine import SMALL, Even, alone, flat, requests, tokens
from tests.inference.test_generator import CONFIGS, GROUPED, LLAMA, PLANS, build, single


def itself(config, tokens, noise=0.0, **options):
    """The model drafts for itself, or one that is like it does."""
    spec, params, bound = flat(config)
    return ModelDrafter(spec, bound, near(params, noise), tokens, **options)


def near(params, noise):
    """Parameters with so much noise, as a share of what each array's vary by."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    moved = [
        x + noise * x.std() * jax.random.normal(key, x.shape)
        for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def engine(drafter, config=LLAMA, **options):
    spec, params, bound = flat(config)
    return Engine(spec, bound, params, drafter=drafter, **{**SMALL, **options})


DRAFTERS = {
    "ngrams": lambda config: NgramDrafter(3),
    "model": lambda config: itself(config, 3),
    "tree": lambda config: itself(config, 2, noise=0.1, nodes=6),
}
ALL = [(drafter, name) for drafter in DRAFTERS for name in CONFIGS]
QUICK = [("ngrams", "llama"), ("model", "mistral"), ("tree", "llama"), ("tree", "bloom")]


@pytest.mark.parametrize(("drafter", "name"), quick_first(ALL, QUICK))
def test_each_as_if_alone(drafter, name):
    """Chunks, shared pages, preemptions, drawn tokens, and too few pages for all guesses."""
    one = engine(DRAFTERS[drafter](CONFIGS[name]), CONFIGS[name])
    assert tokens(one.generate_all(requests())) == alone(name)
    stats = one.stats.scheduler
    assert stats.preemptions and stats.reused and stats.referenced == 0
    assert 0 < stats.accepted < stats.drafted
    if drafter == "model":
        assert stats.accepted > 0.6 * stats.drafted  # some have no page
