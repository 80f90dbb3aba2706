"""Drafts change no token: an engine with any drafter says what it says without."""

import functools

import jax
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.inference.engine import Engine
from colossax.inference.engine.drafting import ModelDrafter, NgramDrafter
from tests.inference.engine.test_engine import SMALL, alone, flat, requests, tokens
from tests.inference.test_generator import CONFIGS, LLAMA


def itself(name, tokens):
    """The model drafts for itself: what it guesses is right."""
    spec, params, bound = flat(CONFIGS[name])
    return ModelDrafter(spec, bound, params, tokens)


def engine(drafter, config=LLAMA, **options):
    spec, params, bound = flat(config)
    return Engine(spec, bound, params, drafter=drafter, **{**SMALL, **options})


def test_ngrams():
    one = engine(NgramDrafter(3))
    assert tokens(one.generate_all(requests())) == alone("llama")
    stats = one.stats.scheduler
    assert stats.preemptions and stats.reused and stats.referenced == 0
    assert 0 < stats.accepted < stats.drafted


def test_a_model_that_drafts_for_itself():
    one = engine(itself("llama", 3))
    assert tokens(one.generate_all(requests())) == alone("llama")
    stats = one.stats.scheduler
    assert stats.preemptions and stats.reused and stats.referenced == 0
    assert stats.accepted > 0.7 * stats.drafted
