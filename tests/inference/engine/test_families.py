"""Every family that continues texts says through an engine what `transformers` says."""

import jax
import numpy as np
import pytest

from colossax.config import Plan
from colossax.inference.engine import Engine
from colossax.models.hf_folder import read_params
from colossax.models.registry import maker
from colossax.nn import describe
from colossax.scheduling import EngineRequest
from colossax.sharding import use
from tests.cases import quick_first
from tests.models.test_parity import GOLDEN, TEXTS, expected

QUICK = ["llama", "gemma3", "deepseek_v3"]


@pytest.mark.catches("latent-pages")
@pytest.mark.parametrize("case", quick_first(TEXTS, QUICK))
def test_greedy_tokens(case):
    """Twice at once, in chunks of seven and beside one another, in pages of four."""
    config, params = read_params(GOLDEN / case)
    want = expected(case)
    prompt, greedy = tuple(want["prompt"].tolist()), want["greedy"].tolist()
    bound = Plan().bind(jax.devices()[:1])
    with use(bound):
        spec = describe(maker(config))
    sizes = {"slots": len(prompt) + len(greedy), "page_tokens": 4, "mixed_tokens": 7, "seats": 3}
    engine = Engine(spec, bound, jax.tree.map(np.asarray, params), **sizes)
    asked = [EngineRequest(prompt=prompt, max_tokens=n) for n in (len(greedy), 3, 9)]
    for found, one in zip(engine.generate_all(asked), asked, strict=True):
        assert [x.token for x in found] == greedy[: one.max_tokens]
