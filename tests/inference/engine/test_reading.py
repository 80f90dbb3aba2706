"""Models that read a source, sound or images say through an engine what `transformers` says."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError
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
@pytest.mark.catches("source-read-once")
@pytest.mark.catches("images-in-pages")
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


@functools.cache
def engine_of(case, slots=48):
    return Engine(*laid_out(case, PLANS["one"])[1], slots=slots, **SMALL)


@pytest.mark.catches("image-over-image")
@pytest.mark.parametrize("case", ["llava", "qwen2_vl"])
def test_two_images_of_one_prompt(case):
    """The next token is that of whole rows, read at once."""
    config, _, want = laid_out(case, PLANS["one"])
    tokens, pixels = seen_of(want, config)
    assert pixels.shape[1] == 2
    likeliest = want["logits"].argmax(-1)
    behind = [
        (row, end)
        for row in range(len(tokens))
        for end in range(2 + int(tokens[row].argmax()), tokens.shape[1] + 1, 6)
    ]
    asked = [
        EngineRequest(prompt=tuple(tokens[row, :end].tolist()), images=pixels[row], max_tokens=1)
        for row, end in behind
    ]
    found = engine_of(case, slots=80).generate_all(asked)
    assert [each[0].token for each in found] == [likeliest[row, end - 1] for row, end in behind]
    assert len(behind) >= 8


@pytest.mark.catches("places-of-another-counted")
def test_places_are_counted_from_each_sequence_s_first_token():
    """Else positions grow by those of all that had the seat, until their angles are no numbers."""
    config, _, want = laid_out("qwen2_vl", PLANS["one"])
    engine, greedy = engine_of("qwen2_vl", slots=80), want["greedy"].tolist()
    ((given, _), *_) = asked_of("qwen2_vl", config, want)
    state = engine._state
    seen = state.cache["images"]
    many = {**seen, "count": seen["count"] + 600_000_000}
    engine._state = dataclasses.replace(state, cache={**state.cache, "images": many})
    (found,) = engine.generate_all([EngineRequest(**given, max_tokens=len(greedy))])
    assert [x.token for x in found] == greedy


def test_nothing_is_compiled_after_warm():
    """Sources of all lengths; and an image more, or in another seat."""
    config, _, want = laid_out("t5", PLANS["one"])
    pair, seeing = engine_of("t5"), engine_of("llava")
    for one in (pair, seeing):
        one.warm()
    counts = [one.program.reading.compiled for one in (pair, seeing)]
    assert counts == [3, 1]  # 32, 64 and 96 tokens
    source = tuple(want["prompt"].tolist())
    pair.generate_all(
        [
            EngineRequest(prompt=(config.start,), source=(source * 9)[:n], max_tokens=2)
            for n in (1, 33, 65, 96)
        ]
    )
    image = np.zeros((1, 8, 8, 3), np.float32)
    several = [image, np.concatenate([image, image])]
    seeing.generate_all([EngineRequest(prompt=(1, 128), images=x, max_tokens=2) for x in several])
    assert [one.program.reading.compiled for one in (pair, seeing)] == counts
    assert pair.program.compiled == {"mixed": 1, "decode": 1}


def test_what_cannot_be_read_is_refused():
    image, sound = np.zeros((1, 8, 8, 3), np.float32), np.zeros((8, 10), np.float32)
    for case, given, message in (
        ("t5", {}, "source: it is empty, and the model's encoder reads one"),
        ("t5", {"source": (2,) * 97}, "source: it has 97 tokens, above the 96 of the model"),
        ("t5", {"source": (128,)}, "source: token 128 is outside the vocabulary of 128"),
        ("t5", {"source": (1,), "frames": sound}, "frames: the model has no encoder that reads"),
        ("whisper", {}, "frames: the model's encoder reads sound; give it"),
        (
            "whisper",
            {"frames": sound[:7]},
            r"frames: found shape \[7, 10\], and the model reads an",
        ),
        ("whisper", {"frames": sound, "source": (1,)}, "source: the model's encoder reads sound"),
        ("llava", {"prompt": (128,)}, "prompt: token 128 is outside the vocabulary of 128"),
        ("llava", {"images": image[0]}, r"images: found shape \[8, 8, 3\], and the model's are 8"),
        ("llava", {"images": np.zeros((4, 8, 8, 3))}, "images: 4 of them take 64 tokens, above"),
        ("llava", {"source": (1,)}, "source: the model has no encoder that reads one"),
    ):
        with pytest.raises(InputError, match=message):
            engine_of(case).add(EngineRequest(**{"prompt": (1,), "max_tokens": 4, **given}))
        assert not engine_of(case).busy
