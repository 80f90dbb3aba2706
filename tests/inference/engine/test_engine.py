"""An engine serves each request as if it were alone, whoever else is there and on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import colossax
from colossax.config import Plan, Segment
from colossax.errors import InputError, PlanError
from colossax.inference.engine import Engine
from colossax.inference.plan import unrolled
from colossax.models import MixtralConfig
from colossax.scheduling import EngineRequest, SamplingConfig
from tests.cases import quick_first
from tests.inference.test_generator import CONFIGS, GROUPED, LLAMA, PLANS, build, make, single

EOS = 3
SMALL = {"seats": 4, "pages": 18, "page_tokens": 4, "mixed_tokens": 16}
"""Too few pages for four long requests, and chunks shorter than most prompts."""


def requests(vocab=128, penalty=0.0):
    """Prompts of any length, some of which begin alike; greedy and drawn."""
    noise = np.random.default_rng(3)
    prompts = [
        tuple(noise.integers(0, vocab, int(noise.integers(1, 40))).tolist()) for _ in range(12)
    ]
    prompts += [(*prompts[0], 5), prompts[1], prompts[3] + prompts[0][:10]]
    return [
        EngineRequest(
            prompt=prompt,
            max_tokens=(24, 5, 20, 1, 24)[i % 5],
            ends=(EOS,),
            sampling=SamplingConfig(
                temperature=(i % 3) * 0.7,
                seed=i,
                frequency_penalty=penalty,
                presence_penalty=penalty / 4,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


@functools.cache
def alone(name):
    """What each gets from a generator that runs one at a time."""
    generator = make(CONFIGS[name], eos=EOS)
    return [
        generator.generate(
            one.prompt,
            max_tokens=one.max_tokens,
            temperature=one.sampling.temperature,
            seed=one.sampling.seed,
        ).tokens
        for one in requests()
    ]


@functools.cache
def flat(config):
    """On one device, each layer with arrays of its own."""
    bound = unrolled(Plan(), build(config, single())[0]).bind(jax.devices()[:1])
    return *build(config, bound), bound


def engine(config=LLAMA, **options):
    spec, params, bound = flat(config)
    return Engine(spec, bound, params, **{**SMALL, **options})


def tokens(found):
    return [tuple(one.token for one in each if one.token is not None) for each in found]


def compiled_while(run):
    """JAX's own events of compilations."""
    found = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _seconds, **_more: found.append(name) if "compile" in name else None
    )
    try:
        jax.jit(lambda x: x * 3)(jnp.ones(7))
        assert found, "a compilation would not have been noticed"
        found.clear()
        run()
    finally:
        jax.monitoring.clear_event_listeners()
    return found


@pytest.mark.catches("engine-tells-of-all-seats")
@pytest.mark.sentinel("llama")
@pytest.mark.catches("token-of-another-seat")
@pytest.mark.catches("engine-draw-key")
@pytest.mark.catches("token-not-remembered")
@pytest.mark.parametrize("name", quick_first(CONFIGS, ["llama", "mistral", "bloom"]))
def test_each_as_if_alone(name):
    """Chunks, pages that are shared, and requests that had to leave their seats among them."""
    one, seated = engine(CONFIGS[name]), []
    one.began = seated.extend
    found = one.generate_all(requests())
    assert tokens(found) == alone(name)
    stats = one.stats.scheduler
    assert set(seated) == set(range(len(found)))
    assert len(seated) == len(found) + stats.preemptions
    assert stats.preemptions and stats.reused
    assert stats.referenced == 0 and stats.finished == len(found)
    for each, request in zip(found, requests(), strict=True):
        assert [x.ended for x in each[:-1]] == [None] * (len(each) - 1)
        assert each[-1].ended == ("stop" if each[-1].token == EOS else "length")
        assert len(each) <= request.max_tokens


@pytest.mark.catches("penalties-of-what-was-found")
def test_penalties_count_what_was_said_before_a_seat_was_lost():
    """What a request has said is not there for it to find, but to be fed, as penalties ask."""
    asked = requests(penalty=2.0)
    one = engine()
    plain = engine(reuse=False, pages=64).generate_all(asked)
    assert tokens(one.generate_all(asked)) == tokens(plain)
    assert one.stats.scheduler.preemptions and one.stats.scheduler.reused


@pytest.mark.parametrize("options", [{"reuse": False}, {"deterministic": True}, {"pages": 64}])
def test_nothing_of_how_it_is_served_shows(options):
    assert tokens(engine(**options).generate_all(requests())) == alone("llama")


@pytest.mark.parametrize("name", quick_first([*PLANS, "experts"], ["fsdp2 tensor4"]))
def test_meshes(name):
    plan = Plan(mesh={"expert": 2, "tensor": 2, "fsdp": 2}) if name == "experts" else PLANS[name]
    mixtral = MixtralConfig(**GROUPED, experts=4, choices=2)
    config = mixtral if name == "experts" else LLAMA
    bound = plan.bind()
    if len(plan.segments) == 1:
        bound = unrolled(plan, build(config, single())[0]).bind()
    spec, params = build(config, bound)
    found = Engine(spec, bound, params, **SMALL).generate_all(requests())
    expected = engine(config).generate_all(requests()) if name == "experts" else None
    assert tokens(found) == (alone("llama") if expected is None else tokens(expected))


def test_nothing_is_compiled_after_warm():
    """A mix of all that requests may ask for, from two programs."""
    one = engine()
    one.warm()
    sampling = [
        SamplingConfig(),
        SamplingConfig(temperature=1.0, top_k=5),
        SamplingConfig(temperature=1.0, top_p=0.5, min_p=0.1, logprobs=3),
        SamplingConfig(presence_penalty=1.0, frequency_penalty=-1.0, logit_bias=((5, 2.0),)),
    ]
    asked = [
        EngineRequest(prompt=(1, 2, 3 + i), max_tokens=9, sampling=s)
        for i, s in enumerate(sampling)
    ]
    assert not compiled_while(lambda: one.generate_all(asked))
    assert one.program.compiled == {"mixed": 1, "decode": 1}


@pytest.mark.catches("said-not-counted")
def test_goes_on_where_it_was():
    """What was said before a restart is fed again, counted as said, and changes no token."""
    sampling = SamplingConfig(temperature=0.8, seed=7, frequency_penalty=2.0, presence_penalty=0.5)
    whole = EngineRequest(prompt=(5, 9, 2), max_tokens=30, sampling=sampling)
    (expected,) = tokens(engine().generate_all([whole]))
    plain = EngineRequest(
        prompt=(5, 9, 2), max_tokens=30, sampling=SamplingConfig(temperature=0.8, seed=7)
    )
    assert tokens(engine().generate_all([plain])) != [expected]
    cut = 11
    again = EngineRequest(
        prompt=(5, 9, 2), generated=expected[:cut], max_tokens=30, sampling=sampling
    )
    assert tokens(engine().generate_all([again])) == [expected[cut:]]


@pytest.mark.catches("engine-logprobs")
def test_logprobs_are_of_the_models_own_distribution():
    sampling = SamplingConfig(temperature=2.0, seed=1, logprobs=4, logit_bias=((9, 5.0),))
    request = EngineRequest(prompt=(5, 9, 2), max_tokens=6, sampling=sampling)
    (found,) = engine().generate_all([request])
    spec, params, bound = flat(LLAMA)
    text = (*request.prompt, *(one.token for one in found))
    with colossax.use(bound):
        logits = np.asarray(spec.merge(params)(jnp.asarray([text], jnp.int32))[0], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for at, one in enumerate(found, len(request.prompt) - 1):
        np.testing.assert_allclose(one.logprob, logprobs[at, one.token], atol=1e-4)
        best = np.argsort(-logprobs[at])[:4]
        assert [token for token, _ in one.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in one.top], logprobs[at, best], atol=1e-4)


def test_deterministic_numbers_are_the_same_bit_by_bit():
    sampling = SamplingConfig(logprobs=20)
    asked = [
        EngineRequest(prompt=one.prompt, max_tokens=8, ends=(), sampling=sampling)
        for one in requests()
    ]
    together = engine(deterministic=True, pages=64).generate_all(asked)
    for request, found in zip(asked, together, strict=True):
        (lone,) = engine(deterministic=True, pages=64, reuse=False).generate_all([request])
        assert [(x.token, x.logprob, x.top) for x in lone] == [
            (x.token, x.logprob, x.top) for x in found
        ]


def test_cancelled_and_late_requests_leave():
    now = [0.0]
    one = engine(clock=lambda: now[0])
    stays = one.add(EngineRequest(prompt=(1, 2), max_tokens=9))
    goes = one.add(EngineRequest(prompt=(3, 4), max_tokens=30))
    late = one.add(EngineRequest(prompt=(5, 6), max_tokens=30, deadline_s=5.0))
    told = []
    while one.busy:
        told += one.step()
        if len(told) == 6:
            one.cancel(goes)
            now[0] = 6.0
    ends = {x.request: x.ended for x in told if x.ended}
    assert ends == {stays: "length", goes: "cancelled", late: "deadline"}
    assert sum(x.request == stays for x in told) == 9
    assert one.stats.scheduler.referenced == 0


@pytest.mark.catches("left-behind-is-read")
@pytest.mark.catches("nan-is-a-token")
def test_numbers_that_are_none_are_told_to_one_client():
    spec, params, bound = flat(LLAMA)
    bad = jax.tree.map(lambda x: x, params)
    bad["embed"]["table"] = params["embed"]["table"].at[77].set(np.nan)
    one = Engine(spec, bound, bad, **SMALL)
    asked = [EngineRequest(prompt=(1, 2), max_tokens=9, ends=(EOS, 77)) for _ in range(2)]
    asked.insert(1, EngineRequest(prompt=(1, 77), max_tokens=9))
    good, wrong, also = one.generate_all(asked)
    assert len(wrong) == 1 and wrong[0].ended == "error" and "NaN" in wrong[0].message
    assert tokens([good]) == tokens([also]) == tokens(engine().generate_all(asked[:1]))


class Even:
    """Even tokens, twenty of them, then none."""

    def __init__(self, vocab, most):
        self.taken, self.vocab, self.most = [], vocab, most

    def mask(self):
        bits = np.zeros(-(-self.vocab // 32) * 32, np.uint8)
        if len(self.taken) < self.most:
            bits[: self.vocab : 2] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def took(self, token):
        self.taken.append(token)


@pytest.mark.catches("mask-of-another")
def test_constraints_hold_for_their_own_request():
    one, free = engine(), requests()[:3]
    limits = [Even(128, 40), Even(128, 5)]
    sampling = SamplingConfig(temperature=1.0, seed=3)
    bound = [
        one.add(EngineRequest(prompt=(7, 8), max_tokens=12, waits=True, sampling=sampling), x)
        for x in limits
    ]
    others = [one.add(request) for request in free]
    told = {number: [] for number in (*bound, *others)}
    while one.busy:
        for x in one.step():
            told[x.request].append(x)
    assert len(limits[0].taken) == 12 and not any(x % 2 for x in limits[0].taken)
    assert limits[1].taken == limits[0].taken[:5]
    assert told[bound[1]][-1].ended == "error" and "grammar" in told[bound[1]][-1].message
    assert tokens(told[number] for number in others) == alone("llama")[:3]


class Refuses(Even):
    """Refuses the third token that it has allowed."""

    def took(self, token):
        super().took(token)
        if len(self.taken) == 3:
            raise InputError("grammar: it became too complex; change it")


@pytest.mark.catches("end-before-the-last-token")
def test_a_constraint_that_refuses_ends_its_own_request_after_its_last_token():
    one = engine()
    number = one.add(EngineRequest(prompt=(7, 8), max_tokens=12, waits=True), Refuses(128, 40))
    other = one.add(requests()[0])
    told = []
    while one.busy:
        told += one.step()
    own = [x for x in told if x.request == number]
    assert [x.ended for x in own] == [None, None, None, "error"] and own[-1].token is None
    assert "too complex" in own[-1].message
    assert tokens([[x for x in told if x.request == other]]) == alone("llama")[:1]


def test_refusals():
    spec, params, bound = flat(LLAMA)
    with pytest.raises(InputError, match="seats: found 0; give 1 or more"):
        engine(seats=0)
    with pytest.raises(InputError, match="slots: found 65, but the model's longest sequence is 64"):
        engine(slots=65)
    with pytest.raises(InputError, match="max_tokens: a prompt of 2 and 63 more make 65"):
        engine().add(EngineRequest(prompt=(1, 2), max_tokens=63))
    with pytest.raises(InputError, match="constraint: .*give it with waits=True"):
        engine().add(EngineRequest(prompt=(1, 2), max_tokens=5), Even(128, 5))
    stages = Plan(mesh={"stage": 2}, segments=(Segment(),)).bind(jax.devices()[:2])
    with pytest.raises(PlanError, match="mesh axis 'stage': an engine runs all layers"):
        Engine(*build(LLAMA, single())[:1], stages, params)
