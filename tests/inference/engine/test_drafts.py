"""Drafts change no token: an engine with any drafter says what it says without."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan, Segment
from colossax.errors import InputError
from colossax.inference.engine import Engine, make_engine
from colossax.inference.engine.drafting import GlideDrafter, ModelDrafter, NgramDrafter
from colossax.inference.engine.drafting.looking import Looked, accepted
from colossax.inference.engine.drafting.ngram import ngram_follows
from colossax.inference.engine.drafting.trees import Tree
from colossax.inference.plan import unrolled
from colossax.models import LlamaConfig
from colossax.nn import DrafterConfig, describe, drafter_maker, initialise
from colossax.scheduling import EngineRequest, SamplingConfig
from colossax.sharding import use
from colossax.tasks.drafting.acceptance import draft_lengths, told_right, walk
from tests.cases import quick_first
from tests.inference.engine.test_engine import (
    SMALL,
    Even,
    alone,
    compiled_while,
    flat,
    requests,
    tokens,
)
from tests.inference.test_generator import CONFIGS, GROUPED, LLAMA, PLANS, build, single

pytestmark = pytest.mark.slow


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


def glide(config, tokens, **options):
    """A drafter that has learned nothing reads what the model keeps."""
    _, _, bound = flat(config)
    own = bound.replace(segments=(Segment(count=1),))
    with use(own):
        spec = describe(drafter_maker(DrafterConfig(layers=1, block=3), config.decoder()))
    return GlideDrafter(spec, own, initialise(spec, own, jax.random.key(5)), tokens, **options)


DRAFTERS = {
    "ngrams": lambda config: NgramDrafter(3),
    "model": lambda config: itself(config, 3),
    "glide": lambda config: glide(config, 2, nodes=10),
    "tree": lambda config: itself(config, 2, noise=0.1, nodes=6),
}
# Of a model with a window nothing is kept for such a drafter to read.
ALL = [pair for pair in itertools.product(DRAFTERS, CONFIGS) if pair != ("glide", "mistral")]
QUICK = [
    ("ngrams", "llama"),
    ("model", "mistral"),
    ("glide", "qwen3"),
    ("tree", "llama"),
    ("tree", "bloom"),
]


@pytest.mark.parametrize(("drafter", "name"), quick_first(ALL, QUICK))
def test_each_as_if_alone(drafter, name):
    """Chunks, shared pages, preemptions, drawn tokens, and too few pages for all guesses."""
    one = engine(DRAFTERS[drafter](CONFIGS[name]), CONFIGS[name])
    assert tokens(one.generate_all(requests())) == alone(name)
    stats = one.stats.scheduler
    assert stats.preemptions and stats.referenced == 0
    assert stats.accepted < stats.drafted
    if (drafter, name) in QUICK:  # elsewhere it depends on what a random model says
        assert stats.reused and stats.accepted
    if drafter == "model":
        assert stats.accepted > 0.6 * stats.drafted  # some have no page


SERVED = {
    "penalties": ({"frequency_penalty": 1.5, "presence_penalty": 0.5}, {}),
    "logprobs": ({"logprobs": 3, "temperature": 0.0}, {}),
    "top": ({"top_k": 9, "top_p": 0.8, "min_p": 0.05, "logit_bias": ((5, 2.0),)}, {}),
    "deterministic": ({}, {"deterministic": True}),
}


@functools.cache
def served(drafter):
    """Programs that all tests of this drafter share."""
    return engine(DRAFTERS[drafter](LLAMA)).program


@pytest.mark.parametrize(
    ("drafter", "asks"),
    quick_first(
        [(d, a) for d in DRAFTERS for a in SERVED], [("tree", "penalties"), ("tree", "top")]
    ),
)
def test_whatever_is_asked(drafter, asks):
    """All that a request may ask of its draws holds behind guesses as it does without."""
    fields, options = SERVED[asks]
    asked = [
        EngineRequest(
            prompt=one.prompt,
            max_tokens=one.max_tokens,
            sampling=SamplingConfig(**{"temperature": 0.7, "seed": 5, **fields}),
        )
        for one in requests()
    ]
    params = flat(LLAMA)[1]
    found = Engine.of(served(drafter), params, **options).generate_all(asked)
    plain = engine(None, **options).generate_all(asked)
    assert tokens(found) == tokens(plain)
    for ours, theirs in zip(found, plain, strict=True):
        assert [x.ended for x in ours] == [x.ended for x in theirs]
        if asks == "logprobs":
            assert [[t for t, _ in x.top] for x in ours] == [[t for t, _ in x.top] for x in theirs]
            np.testing.assert_allclose(
                [x.logprob for x in ours], [x.logprob for x in theirs], atol=1e-4
            )


def test_who_waits_and_who_is_cancelled():
    """A grammar knows each token before the next, and others are guessed for beside it."""
    one = Engine.of(served("tree"), flat(LLAMA)[1])
    sampling = SamplingConfig(temperature=1.0, seed=3)
    limit = Even(128, 40)
    waits = one.add(
        EngineRequest(prompt=(7, 8), max_tokens=12, waits=True, sampling=sampling), limit
    )
    goes = one.add(EngineRequest(prompt=(3, 4), max_tokens=50))
    others = [one.add(request) for request in requests()[:3]]
    told = {number: [] for number in (waits, goes, *others)}
    while one.busy:
        for x in one.step():
            told[x.request].append(x)
        if len(told[goes]) > 4:
            one.cancel(goes)
    assert len(limit.taken) == 12 and not any(x % 2 for x in limit.taken)
    assert told[goes][-1].ended == "cancelled"
    assert tokens(told[number] for number in others) == alone("llama")[:3]
    assert one.stats.scheduler.referenced == 0


def test_nothing_is_compiled_after_warm():
    one = Engine.of(served("tree"), flat(LLAMA)[1])
    one.warm()
    assert not compiled_while(lambda: one.generate_all(requests()))
    assert one.program.compiled == {"mixed": 1, "decode": 1}


def test_numbers_that_are_none_are_told_to_one_client():
    """The model's, behind a token that nobody could have guessed; and the drafting model's."""
    spec, params, bound = flat(LLAMA)
    bad = jax.tree.map(lambda x: x, params)
    bad["embed"]["table"] = params["embed"]["table"].at[77].set(np.nan)
    asked = [EngineRequest(prompt=(1, 2), max_tokens=9) for _ in range(2)]
    asked.insert(1, EngineRequest(prompt=(1, 77), max_tokens=9))
    expected = tokens(engine(None).generate_all(asked))
    found = Engine.of(served("tree"), bad).generate_all(asked)
    assert found[1][-1].ended == "error" and "NaN" in found[1][-1].message
    assert 77 in expected[0] or tokens(found[::2]) == expected[::2]
    lost = ModelDrafter(spec, bound, jax.tree.map(lambda x: x * np.nan, params), 2, nodes=4)
    assert tokens(engine(lost).generate_all(asked)) == expected


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLANS)
def test_meshes(name):
    plan = PLANS[name]
    bound = plan.bind()
    if len(plan.segments) == 1:
        bound = unrolled(plan, build(LLAMA, single())[0]).bind()
    spec, params = build(LLAMA, bound)
    drafter = ModelDrafter(spec, bound, near(params, 0.1), 2, nodes=6)
    found = Engine(spec, bound, params, drafter=drafter, **SMALL).generate_all(requests())
    assert tokens(found) == alone("llama")


@pytest.mark.sweep
@pytest.mark.parametrize("drafter", ["ngrams", "model", "tree"])
def test_an_engine_for_each_place_along_data(drafter):
    """Each drafts on its own devices, by parameters that are there once."""
    plan = Plan(mesh={"data": 2, "fsdp": 2})
    bound = unrolled(plan, build(LLAMA, single())[0]).bind(jax.devices()[:4])
    spec, params = build(LLAMA, bound)
    made = {
        "ngrams": lambda: NgramDrafter(3),
        "model": lambda: ModelDrafter(spec, bound, params, 3),
        "tree": lambda: ModelDrafter(spec, bound, near(params, 0.1), 2, nodes=6),
    }
    one = make_engine(spec, bound, params, drafter=made[drafter](), **SMALL)
    assert len(one.engines) == 2
    assert tokens(one.generate_all(requests())) == alone("llama")
    assert one.stats.scheduler.accepted


def by_hand(said, longest):
    """Position behind the last place where the longest run of last tokens stood before."""
    for count in range(longest, 0, -1):
        for end in range(len(said) - 1, count - 1, -1):
            if said[end - count : end] == said[-count:]:
                return end
    return 0


@pytest.mark.catches("n-grams-find-themselves")
def test_ngrams_are_found():
    noise = np.random.default_rng(0)
    texts = [noise.integers(0, 4, int(noise.integers(1, 30))).tolist() for _ in range(200)]
    said = np.full((200, 33), 1, np.int32)
    for row, text in zip(said, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    for longest in (1, 2, 3):
        found = ngram_follows(jnp.asarray(said), jnp.asarray(lengths), longest)
        assert found.tolist() == [by_hand(text, longest) for text in texts]


def random_trees(noise, seats, drafts):
    parent = np.array([[noise.integers(0, i + 1) for i in range(drafts)] for _ in range(seats)])
    return jnp.asarray(parent, jnp.int32)


def lines_by_hand(parent):
    lines = [[0]]
    for i, up in enumerate(parent, 1):
        lines.append([*lines[up], i])
    return lines


@pytest.mark.catches("siblings-see-each-other")
@pytest.mark.parametrize("drafts", [1, 6, 40])
def test_trees_by_hand(drafts):
    noise = np.random.default_rng(drafts)
    parent = random_trees(noise, 20, drafts)
    tree = Tree.of(parent)
    words = np.asarray(tree.words())
    for seat, parents in enumerate(parent.tolist()):
        for node, line in enumerate(lines_by_hand(parents)):
            assert int(tree.depth[seat, node]) == len(line) - 1
            bits = [i for i in range(drafts + 1) if words[seat, node, i // 32] >> (i % 32) & 1]
            assert bits == line == np.flatnonzero(tree.line[seat, node]).tolist()


@pytest.mark.catches("guesses-compared-with-themselves")
@pytest.mark.catches("right-without-a-page")
@pytest.mark.parametrize("drafts", [1, 6])
def test_the_line_that_is_right(drafts):
    """From the root on, each time the guess that the model draws, if there is one with room."""
    noise = np.random.default_rng(drafts)
    seats = 300
    parent = random_trees(noise, seats, drafts)
    ids = noise.integers(0, 3, (seats, drafts + 1))
    drawn = noise.integers(0, 3, (seats, drafts + 1))
    kept = noise.random((seats, drafts + 1)) < 0.9
    there = np.arange(drafts + 1) < noise.integers(1, drafts + 2, (seats, 1))
    for tree in (Tree.of(parent), None):
        looked = Looked(
            there=jnp.asarray(there),
            ids=jnp.asarray(ids, jnp.int32),
            position=jnp.zeros((seats, drafts + 1), jnp.int32),
            kept=jnp.asarray(kept),
            tree=tree,
        )
        count, path = accepted(looked, jnp.asarray(drawn, jnp.int32))
        for seat in range(seats):
            follows = parent[seat].tolist() if tree is not None else list(range(drafts))
            line = [0]
            while True:
                good = [
                    i
                    for i in range(1, drafts + 1)
                    if follows[i - 1] == line[-1]
                    and there[seat, i]
                    and kept[seat, i]
                    and ids[seat, i] == drawn[seat, line[-1]]
                ]
                if not good:
                    break
                line.append(good[0])
            assert int(count[seat]) == len(line) - 1
            assert path[seat, : len(line)].tolist() == line


def test_refusals():
    spec, params, bound = flat(LLAMA)
    with pytest.raises(InputError, match="tokens: found 0; give 1 or more"):
        NgramDrafter(0)
    with pytest.raises(InputError, match="nodes: found 2; give 3 or more, one for each token"):
        ModelDrafter(spec, bound, params, 3, nodes=2)
    with pytest.raises(InputError, match="nodes: found 60, and 3 places have 8 guesses each"):
        ModelDrafter(spec, bound, params, 3, nodes=60)
    with pytest.raises(InputError, match="draft: found a tree of 64 guesses; give 63 or fewer"):
        engine(ModelDrafter(spec, bound, params, 10, nodes=64))
    other = LlamaConfig(**{**GROUPED, "vocab": 64})
    with pytest.raises(InputError, match="the drafting model has 64 tokens and .* for 128"):
        engine(itself(other, 2))
    short = LlamaConfig(**{**GROUPED, "max_seq": 32})
    with pytest.raises(InputError, match="longest sequence is 32 tokens and the engine's 64"):
        engine(itself(short, 2))


@functools.cache
def few_tokens():
    """A target whose few tokens an untrained drafter guesses right now and then."""
    return LlamaConfig(**{**GROUPED, "vocab": 3, "layers": 2})


@dataclasses.dataclass
class Under:
    """A drafter under the plan of its own layers."""

    drafter: Any
    bound: Any

    def hidden(self, *given):
        with use(self.bound):
            return self.drafter.hidden(*given)


@pytest.mark.catches("drafter-sees-ahead-of-its-model")
def test_what_learned_beside_a_model_guesses_as_its_training_says():
    """Each guess is that of the training pass whose blocks begin where the guess does."""
    config, block, longest = few_tokens(), 3, 40
    _, params, bound = flat(config)
    drafter = glide(config, block)
    prompts = [(0, 1, 2, 2, 1), (2, 2, 0), (1,) * 9, (0, 2, 1, 0, 2, 1, 0)]
    said, found = [], []
    one = engine(drafter, config, pages=64, reuse=False)
    one._scheduler._drafts._adapts = False
    for prompt in prompts:
        one.add(EngineRequest(prompt=prompt, max_tokens=longest - len(prompt)))
        steps = []
        while one.busy:
            steps.append([x.token for x in one.step()])
        steps = [each for each in steps if each]
        said.append([*prompt, *(token for each in steps for token in each)])
        found.append([len(each) - 1 for each in steps[1:]])  # a prompt's own step looks at none
    rows = jnp.asarray(said, jnp.int32)
    assert rows.shape == (4, longest)
    with use(bound):
        target = flat(config)[0].merge(params)
    with use(drafter._bound):
        own = drafter.spec.merge(drafter.params)

    @jax.jit
    def right(rows):
        with use(bound):
            beside = Under(own, drafter._bound)
            return told_right({"target": target, "drafter": beside}, rows, block, 1)

    lengths = draft_lengths(np.asarray(right(rows)), block)
    begin = np.asarray([len(prompt) for prompt in prompts])
    for row, start, steps in zip(lengths, begin, found, strict=True):
        told = walk(row[None], np.asarray([start]), np.asarray([longest]), block).tolist()
        assert len(told) > 5 and steps[: len(told)] == told
    assert {0, 1, 2, 3} == {count for steps in found for count in steps}
