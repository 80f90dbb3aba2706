"""Log-probabilities of a prompt's own tokens are those of a whole forward pass over it."""

import dataclasses

import jax
import numpy as np
import pytest

from colossax.inference import NgramDrafter
from colossax.inference.engine import Engine
from colossax.inference.engine.sampling import Chosen
from colossax.inference.engine.scoring import Probabilities, Scored
from colossax.inference.plan import unrolled
from colossax.scheduling import EngineRequest, Piece, SamplingConfig, StepPlan
from tests.cases import quick_first
from tests.inference.engine.test_engine import EOS, SMALL, alone, engine, flat, requests, tokens
from tests.inference.engine.test_staged import made
from tests.inference.test_generator import CONFIGS, LLAMA, PLANS, build, forward, single


def asked(begin=1, top=3, **changes):
    """All requests of the other tests, of which two of three want their prompts scored."""
    return [
        dataclasses.replace(
            one,
            score_from=begin if i % 3 else None,
            sampling=dataclasses.replace(one.sampling, logprobs=top if i % 3 else None),
            **changes,
        )
        for i, one in enumerate(requests())
    ]


def told(request, name="llama"):
    """What a whole pass over a prompt tells of its tokens: log-probabilities `[s - begin, v]`."""
    logits = forward(CONFIGS[name])(request.prompt).astype(np.float64)[request.score_from - 1 : -1]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check(found, request, name="llama"):
    """With the first token, and with no other."""
    assert not any(one.scores for one in found[1:])
    if request.score_from is None:
        assert not found[0].scores
        return
    expected = told(request, name)
    assert len(found[0].scores) == len(expected)
    behind = request.prompt[request.score_from :]
    for token, row, (logprob, top) in zip(behind, expected, found[0].scores, strict=True):
        np.testing.assert_allclose(logprob, row[token], atol=1e-4)
        best = np.sort(row)[::-1][: request.sampling.logprobs]
        np.testing.assert_allclose([p for _, p in top], best, atol=1e-4)
        np.testing.assert_allclose([p for _, p in top], [row[t] for t, _ in top], atol=1e-4)


@pytest.mark.catches("scores-of-the-token-before")
@pytest.mark.catches("a-turn-of-scores-too-few")
@pytest.mark.parametrize("name", quick_first(["llama", "mistral", "bloom"], ["llama"]))
def test_scores_are_those_of_a_whole_pass(name):
    """Cut into chunks, beside others, with seats lost; and no token is another for it."""
    one = engine(CONFIGS[name])
    one.warm()
    found = one.generate_all(asked())
    assert tokens(found) == alone(name)
    assert one.stats.scheduler.preemptions
    for each, request in zip(found, asked(), strict=True):
        check(each, request, name)
    assert one.program.compiled == {"mixed": 1, "decode": 1}


@pytest.mark.catches("scores-of-what-was-found")
def test_a_prefix_is_found_up_to_what_is_scored():
    one = engine(pages=64)
    begun = tuple(range(1, 21))
    alike = [
        EngineRequest(
            prompt=(*begun, 30 + i),
            max_tokens=1,
            score_from=begin,
            sampling=SamplingConfig(logprobs=1),
        )
        for i, begin in enumerate((1, 1, 20, 8))
    ]
    before = 0
    for request, reused in zip(alike, (0, 0, 16, 4), strict=True):
        check(*one.generate_all([request]), request)
        assert one.stats.scheduler.reused - before == reused
        before = one.stats.scheduler.reused


@pytest.mark.catches("scores-forgotten-with-a-seat")
def test_a_seat_lost_amid_a_prompt_loses_no_score():
    """The long prompt has begun when an older request takes its pages."""
    one = engine(seats=2, pages=12, mixed_tokens=4)
    old = EngineRequest(prompt=(1, 2), max_tokens=40, ends=())
    long = EngineRequest(
        prompt=requests()[0].prompt[:1] + tuple(range(40)),
        max_tokens=2,
        score_from=1,
        sampling=SamplingConfig(logprobs=2),
    )
    plain, found = one.generate_all([old, long])
    assert one.stats.scheduler.preemptions
    check(found, long)
    assert tokens([plain]) == tokens(engine(pages=64).generate_all([old]))


@pytest.mark.catches("scores-told-again")
def test_after_a_restart_they_are_told_to_nobody_who_had_them():
    (whole,) = engine().generate_all([asked(max_tokens=9, ends=())[1]])
    said = tuple(one.token for one in whole)
    again = asked(max_tokens=9, ends=(), generated=said[:4])[1]
    one = engine(pages=64)
    for _ in range(2):  # the second finds all of it
        (found,) = one.generate_all([again])
        assert tuple(x.token for x in found) == said[4:]
        assert not any(x.scores for x in found)
    assert one.stats.scheduler.reused


def test_beside_guesses():
    one = engine(drafter=NgramDrafter(3))
    found = one.generate_all(asked())
    assert tokens(found) == alone("llama")
    for each, request in zip(found, asked(), strict=True):
        check(each, request)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["fsdp2 tensor4", "data2 fsdp4"])
def test_on_meshes(name):
    bound = unrolled(PLANS[name], build(LLAMA, single())[0]).bind()
    spec, params = build(LLAMA, bound)
    found = Engine(spec, bound, params, **SMALL).generate_all(asked())
    assert tokens(found) == alone("llama")
    for each, request in zip(found, asked(), strict=True):
        check(each, request)


def test_numbers_that_are_none():
    """A token that the model gives no numbers behind ends its own request."""
    spec, params, bound = flat(LLAMA)
    bad = jax.tree.map(lambda x: x, params)
    bad["embed"]["table"] = params["embed"]["table"].at[77].set(np.nan)
    one = Engine(spec, bound, bad, **SMALL)
    given = {"max_tokens": 3, "score_from": 1, "sampling": SamplingConfig(logprobs=1)}
    good, wrong = one.generate_all(
        [EngineRequest(prompt=(1, 2, 5), **given), EngineRequest(prompt=(1, 77, 5), **given)]
    )
    assert [x.ended for x in wrong] == ["error"] and "NaN" in wrong[0].message
    check(good, EngineRequest(prompt=(1, 2, 5), **given))


@pytest.mark.catches("scores-that-are-none-are-told")
def test_scores_that_are_none_end_their_request_whatever_it_says():
    probabilities = Probabilities()
    for number in (3, 4):
        probabilities.add(number, EngineRequest(prompt=(1, 2), score_from=1))
    pieces = (Piece(3, 0, 0, (1, 2), True), Piece(4, 1, 0, (1, 2), True))
    plan = StepPlan(kind="mixed", pieces=pieces, fresh=(), table=np.zeros((2, 1)), version=0)
    assert [one.at for one in probabilities.sends(plan)] == [0, 2]
    top = np.zeros((2, 20))
    scores = Scored(logprob=np.asarray([-1, np.nan]), top_tokens=top, top_logprobs=top)
    fields = dict.fromkeys(("token", "logprob", "top_tokens", "top_logprobs", "sound"), top)
    _, broken = probabilities.lands(Chosen(**fields, scored=scores))
    assert broken == {4}


def test_a_prompt_of_one_token_has_nothing_to_tell():
    request = EngineRequest(
        prompt=(5,), max_tokens=1, score_from=1, ends=(EOS,), sampling=SamplingConfig(logprobs=0)
    )
    (found,) = engine().generate_all([request])
    assert [one.scores for one in found] == [()]


@pytest.mark.sweep
def test_through_stages():
    found = made({"stage": 2, "tensor": 2}).generate_all(asked())
    assert tokens(found) == alone("llama")
    for each, request in zip(found, asked(), strict=True):
        check(each, request)
