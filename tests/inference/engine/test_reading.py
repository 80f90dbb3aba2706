"""Models that read a source, sound or images say through an engine what `transformers` says."""

import jax
import pytest

from colossax.config import Plan
from colossax.inference import Generator
from colossax.inference.engine import Engine
from colossax.models.hf_folder import read_params
from colossax.models.registry import maker
from colossax.nn import describe
from colossax.scheduling import EngineRequest
from colossax.sharding import param_sharding, use
from tests.cases import quick_first
from tests.models.test_pair_parity import CASES as PAIRS
from tests.models.test_parity import GOLDEN, expected
from tests.models.test_seeing_parity import CASES as SEEING
from tests.models.test_seeing_parity import given as seen_of
from tests.models.test_sound_parity import CASES as SOUND
from tests.models.test_sound_parity import frames_of

CASES = [*PAIRS, *SOUND, *SEEING]
PLANS = {"one": Plan(), "tensor": Plan(mesh={"tensor": 2}), "fsdp": Plan(mesh={"fsdp": 2})}
ALL = [(mesh, case) for mesh in PLANS for case in CASES]
QUICK = [("one", "t5"), ("one", "whisper"), ("one", "llava"), ("one", "qwen2_vl")]
SMALL = {"page_tokens": 4, "mixed_tokens": 7, "seats": 3}


def laid_out(case, plan):
    """Model and parameters under a plan, and what is published of it."""
    config, params = read_params(GOLDEN / case)
    devices = jax.devices()[: max(plan.mesh.values(), default=1)]
    bound = plan.bind(devices)
    with use(bound):
        spec = describe(maker(config))
    params = jax.tree.map(
        lambda info, x: jax.device_put(x, param_sharding(bound, "params", info)), spec.infos, params
    )
    return config, (spec, bound, params), expected(case)


def asked_of(case, config, want):
    """Prompts with two things to read, the first with its golden tokens, and a few words of none.

    Returns:
        Of each request what is asked, and of how many tokens.
    """
    greedy = len(want["greedy"])
    if case in SEEING:
        tokens, pixels = seen_of(want, config)
        prompt = tuple(tokens[0, : len(want["prompt"])].tolist())
        given = [{"prompt": prompt, "images": pixels[0, i : i + 1]} for i in (0, 1)]
        given.append({"prompt": (5, 6, 7)})
    elif case in SOUND:
        sounds = frames_of(want)
        given = [{"frames": x} for x in (sounds[0], sounds[0][::-1].copy(), sounds[0][:20])]
    else:
        source = tuple(want["prompt"].tolist())
        given = [{"source": x} for x in (source, source[::-1], source[: len(source) // 2])]
    begins = {} if case in SEEING else {"prompt": (config.start,)}
    lengths = (greedy, 7, greedy, 20, greedy)
    chosen = (given[0], given[1], given[2], given[0], given[1])
    return [({**begins, **one}, n) for one, n in zip(chosen, lengths, strict=True)]


@pytest.mark.catches("source-of-another-seat")
@pytest.mark.catches("length-of-another-source")
@pytest.mark.catches("image-over-image")
@pytest.mark.catches("places-of-another-counted")
@pytest.mark.parametrize(
    ("mesh", "case"), quick_first([(m, c) for m in PLANS for c in CASES], QUICK)
)
def test_greedy_tokens(mesh, case):
    """Beside one another, in chunks, by turns in three seats, and put off for want of pages."""
    config, model, want = laid_out(case, PLANS[mesh])
    asked = asked_of(case, config, want)
    slots = max(len(one["prompt"]) + n for one, n in asked)
    generator = Generator(*model, slots=slots, eos=-1)
    alone = [list(generator.generate(**one, max_tokens=n).tokens) for one, n in asked]
    assert alone[0] == want["greedy"].tolist() and alone[3] == alone[0][:20]
    assert alone[4] != alone[0] and alone[2] != alone[0]
    engine = Engine(*model, slots=slots, pages=-(-slots // 4) + 9, **SMALL)
    requests = [EngineRequest(**one, max_tokens=n) for one, n in asked]
    found = engine.generate_all(requests)
    assert [[x.token for x in each] for each in found] == alone
    assert engine.stats.scheduler.preemptions and not engine.stats.scheduler.reused
