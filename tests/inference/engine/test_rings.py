"""Layers with a window keep it alone, in rings of pages, and say what they say with all pages."""

import dataclasses

import jax
import pytest

from colossax.errors import InputError
from colossax.inference.engine import Engine
from colossax.inference.engine.program import EngineProgram, Sizes
from colossax.inference.engine.sizing import cache_bytes
from tests.cases import quick_first
from tests.inference import test_caches as caches
from tests.inference.engine.test_engine import SMALL, alone, engine, requests, tokens
from tests.inference.test_generator import CONFIGS, LLAMA

pytestmark = pytest.mark.slow

WINDOWED = ["local and global", "sinks", "chunks"]


@pytest.mark.catches("ring-without-the-step")
def test_each_as_if_alone():
    """Long past the window, in chunks, seats taken by one after another, and some twice."""
    one = engine(CONFIGS["mistral"], window_rings=True)
    assert tokens(one.generate_all(requests())) == alone("mistral")
    stats = one.stats.scheduler
    assert stats.preemptions and not stats.reused
    (rows,) = {x.shape[1] for x in jax.tree.leaves(one.program.cache.abstract)}
    assert rows == SMALL["seats"] * -(-(5 - 1 + SMALL["mixed_tokens"]) // SMALL["page_tokens"])


@pytest.mark.parametrize("name", quick_first(WINDOWED, ["local and global"]))
def test_layers_of_several_kinds(name):
    """Rings beside pages of layers that see all, in codes."""
    bound, spec, params = caches.build(name)
    asked = [one for one in requests(64) if len(one.prompt) < 30]
    options = {**SMALL, "cache_format": "int8", "mixed_tokens": 8}
    ringed = Engine(spec, bound, params, **options, window_rings=True)
    plain = Engine(spec, bound, params, **options)
    assert tokens(ringed.generate_all(asked)) == tokens(plain.generate_all(asked))
    assert len({x.shape[1] for x in jax.tree.leaves(ringed.program.cache.abstract)}) == 2


def test_long_sequences_take_their_windows():
    """Bytes of layers with a window do not grow with the length; of the others they do."""
    bound, spec, _ = caches.build("local and global")
    sizes = Sizes(seats=2, pages=32, page_tokens=4, slots=32, mixed=4, decode=2, rings=True)

    def held(**changed):
        return cache_bytes(EngineProgram(spec, bound, dataclasses.replace(sizes, **changed)))

    of_page = 4 * 2 * 2 * 8 * 4
    ring = -(-(caches.WINDOW - 1 + 4) // 4)
    assert held() == of_page * (1 * 32 + 4 * 2 * ring)
    assert held(slots=64, pages=64) == of_page * (1 * 64 + 4 * 2 * ring)
    assert held(slots=64, pages=64, rings=False) == of_page * 5 * 64


def test_refusals():
    message = "window_rings: no layer of the model needs less than a sequence of 64 tokens"
    with pytest.raises(InputError, match=message):
        engine(LLAMA, window_rings=True)
    with pytest.raises(InputError, match=message + " with steps of 60; leave them out, or give"):
        engine(CONFIGS["mistral"], window_rings=True, mixed_tokens=60)
