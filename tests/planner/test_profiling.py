"""What a model is read to take, against published sizes and against traced policies."""

import dataclasses
import itertools

import jax
import pytest

from colossax.aot import parse_target
from colossax.cli.options.overrides import apply_overrides
from colossax.config import AttentionConfig, BatchConfig, OffloadConfig, Segment
from colossax.planner.counting.layer_costs import stack_costs
from colossax.planner.profiling import profile_task
from colossax.planner.searching.memory import kept_bytes
from colossax.planner.searching.sends import Tokens
from colossax.planner.task_step import task_step
from colossax.recipes import recipe
from colossax.tasks import task_of

TARGET = parse_target("h100:1x8")
NAMES = ("qkv", "attention", "mlp")


def profile(name, **changes):
    config = recipe(name).replace(**changes)
    return profile_task(task_of(config), config.plan, TARGET)


@pytest.mark.catches("maps-are-missed")
@pytest.mark.catches("attention-counts-as-a-map")
def test_flops_are_those_of_the_published_model():
    found = profile("llama3_8b")
    embed, queries, keys, mlp, vocab, tokens = 4096, 32 * 128, 8 * 128, 14336, 128256, 8192
    layer = embed * (2 * queries + 2 * keys + 3 * mlp)
    assert found.maps_flops == 32 * 2 * tokens * layer
    assert found.ends_flops == 2 * tokens * embed * vocab
    # Each token attends to itself and those before it, for scores and for values.
    assert found.pair_flops == 32 * 2 * tokens * (tokens + 1) * queries


@pytest.mark.parametrize("name", ["moe_tiny", "vit_digits", "t5_stdlib"])
def test_all_that_a_model_multiplies_is_found(name):
    config = recipe(name)
    task, found = task_of(config), profile(name)
    forward = found.maps_flops + found.ends_flops + found.pair_flops
    assert forward == pytest.approx(task.flops / 3 / config.data.global_batch, rel=1e-9)
    inside = [at for kind in found.kinds for at in kind.leaves]
    assert len(set(inside)) == len(inside)
    assert sorted([*inside, *found.outside]) == list(range(len(found.infos)))


@pytest.mark.slow
@pytest.mark.catches("experts-computed-once")
def test_a_mixture_computes_its_experts_again_whatever_is_kept():
    (kind,) = profile("moe_tiny").kinds
    up, gate, down = [at for at, one in enumerate(kind.traced.maps) if one.grouped]
    for again, _ in kind.traced.again.values():
        assert {up, gate} <= again
        assert down not in again


def policies():
    for count in range(len(NAMES) + 1):
        for names in itertools.combinations(NAMES, count):
            quick = names in ((), ("qkv", "attention"))
            yield pytest.param(names, marks=[] if quick else [pytest.mark.sweep])


@pytest.mark.catches("kept-names-are-computed-again")
@pytest.mark.catches("the-last-map-is-computed-again")
@pytest.mark.parametrize("names", list(policies()))
def test_a_policy_keeps_and_computes_what_the_layer_traced_under_it_does(names):
    config = recipe("llama_tiny")
    plan = config.plan.replace(
        mesh={"data": 1},
        batch=BatchConfig(),
        attention=AttentionConfig(kernel="reference"),
        segments=(Segment(remat="+".join(names) or "full"),),
    )
    data = dataclasses.replace(config.data, global_batch=1)
    task = task_of(config.replace(plan=plan, data=data))
    step = task_step(task, plan, jax.devices()[:1])
    truth = stack_costs(step, step, OffloadConfig()).layers[0]
    (kind,) = profile_task(task, plan, TARGET).kinds
    again, share = kind.traced.again[frozenset(names)]
    forward = [one.flops for one in kind.traced.maps]
    computed = 3 * (sum(forward) + kind.traced.other_flops)
    computed += sum(forward[at] for at in again) + share * kind.traced.other_flops
    assert truth.seconds == computed
    tokens = Tokens(inside=float(config.data.seq_len), held=float(config.data.seq_len))
    kept = kept_bytes(kind, frozenset(names), 1, tokens, config.data.seq_len)
    assert truth.kept_bytes == pytest.approx(kept)


@pytest.mark.catches("codes-are-no-map")
@pytest.mark.catches("what-is-frozen-has-gradients")
@pytest.mark.parametrize("base", [pytest.param("own", marks=pytest.mark.slow), "nf4"])
def test_an_adapter_beside_a_frozen_base_leaves_attention_what_it_takes(base):
    """In codes too; of the base backward has no gradient, so the task says fewer FLOPs of it."""
    adapter = [("adapter.rank", "4"), ("adapter.base", base)]
    config = apply_overrides(recipe("llama_tiny"), adapter)
    found = profile_task(task_of(config), config.plan, TARGET)
    plain = profile("llama_tiny")
    (kind,) = found.kinds
    held = [one.flops for one in kind.traced.maps if not found.learns[kind.leaves[one.leaf]]]
    assert kind.calls * sum(held) == plain.maps_flops
    # Of the first layer's inputs nobody wants gradients, which the task knows: some is missing.
    assert plain.pair_flops / 2 < found.pair_flops <= plain.pair_flops


@pytest.mark.catches("scores-are-forgotten")
def test_attention_outside_of_kernels_makes_scores_of_a_tile():
    config = recipe("llama3_8b")
    heads, tile = config.model.heads, 512
    for gpu, scores in (("a100", 4 * heads * tile * tile), ("h100", 0)):
        (kind,) = profile_task(task_of(config), config.plan, parse_target(f"{gpu}:1x8")).kinds
        assert kind.traced.scores == scores, gpu


def test_moments_are_those_of_the_optimizer():
    found = profile("llama_tiny")
    assert found.moments == (8.0,) * len(found.infos), "Adam's two, in float32"
