"""What a mixture's configuration refuses: one sentence with the culprit and a remedy."""

import dataclasses

import pytest
from flax import nnx

from colossax.config import ExpertsConfig
from colossax.errors import InputError, PlanError
from colossax.nn import DecoderConfig, Experts, MixtureConfig
from colossax.nn.experts import gate_of
from colossax.recipes import recipe

MISTAKES = [
    ({"gate": "expert_choice"}, "'expert_choice' gives a token experts by the tokens behind it"),
    ({"gate": "base", "choices": 1}, "'base' gives a token experts by the tokens behind it"),
    ({"choices": 9}, "choices: 9 experts of a token, and there are 8; give at most 8"),
    ({"capacity_factor": 0.0}, "capacity_factor: found 0.0"),
    ({"gate": "topc"}, "gate: unknown 'topc'; did you mean 'topk'"),
    ({"groups": 3, "kept_groups": 1}, "3 groups do not divide 8 experts"),
    ({"groups": 4}, "kept_groups: found 0 of 4 groups; give 1 to 4"),
    ({"gate": "hierarchical"}, "'hierarchical' has groups; give them"),
    ({"choices": 1}, "the weight of a single choice is then 1"),
    ({"choices": 1, "score": "sigmoid"}, "is then 1, which teaches the router nothing; give ren"),
    ({"choices": 1, "gate": "hierarchical", "groups": 2}, "router nothing; give more choices"),
    ({"gate": "hash"}, "found 2, and gate 'hash' gives a token 1 of the experts; give 1"),
    ({"gate": "base"}, "found 2, and gate 'base' gives a token 1 of the experts; give 1"),
    ({"gate": "gshard", "choices": 3}, "found 3, and gate 'gshard' gives a token 2"),
    ({"gate": "gshard", "experts": 1}, "2 experts of a token, and there are 1; give more experts"),
    ({"gate": "gshard", "bias_rate": 0.1}, "bias_rate: gate 'gshard' takes no notice of it"),
    ({"gate": "dense_to_sparse", "capacity_factor": 1.0}, "or give gate one of topk, ktop1"),
    ({"gate": "hash", "choices": 1, "score": "sigmoid"}, "score: gate 'hash' takes no notice"),
    ({"gate": "ktop1", "renormalise": False}, "renormalise: gate 'ktop1' takes no notice of it"),
    ({"gate": "ktop1", "groups": 2}, "leave it out, or give gate one of topk, hierarchical"),
    ({"temperature": 0.5}, "temperature: gate 'topk' takes no notice of it; leave it out, or give"),
    ({"router_dim": 8}, "router_dim: router 'linear' has none; leave it out, or give router cos"),
    ({"router": "cosine", "router_bias": True}, "router_bias: router 'cosine' has none"),
    ({"shared_gated": True}, "shared_gated: there is no shared MLP; give shared, its width"),
    ({"balance": "none", "balance_loss": 0.1}, "balance_loss: with balance 'none' nothing is"),
    ({"gate": "gshard", "priority": "random"}, "priority: found 'random', and gate 'gshard' takes"),
    ({"priority": "probability"}, "and without a capacity_factor none comes first; give one"),
    ({"choices": 3, "groups": 4, "kept_groups": 1}, "among 2, of 1 of 4 groups; give at most 2"),
    ({"choices": 5, "gate": "hierarchical", "groups": 2}, "among 4, of 1 of 2 groups; give at"),
    (
        {"groups": 8, "kept_groups": 2, "group_score": "top2"},
        "8 groups of 8 experts have one each; give",
    ),
    ({"choices": 3, "gate": "ktop1"}, "of 3 groups, which do not divide 8 experts"),
    ({"gate": "dense_to_sparse", "threshold": 1.0}, "threshold: found 1.0; give 0 or more, below"),
    ({"pyramid": (8, 64)}, "found (8, 64); give pairs of a layer's number and its experts"),
    ({"pyramid": 5}, "pyramid: found 5; give pairs"),
]

TAKEN = [
    ({"gate": "hash", "choices": 1}, 1),
    ({"gate": "base", "choices": 1, "look_ahead": True}, 1),
    ({"gate": "gshard"}, 2),
    ({"gate": "ktop1", "choices": 4}, 4),
    ({"gate": "expert_choice", "choices": 3, "look_ahead": True}, 3),
    ({"gate": "dense_to_sparse", "choices": 3}, 3),
    ({"gate": "dense_to_sparse", "choices": 8, "threshold": 0.0}, 8),
    ({"gate": "dense_to_sparse", "choices": 8, "threshold": 0.4}, 2),
    ({"choices": 1, "score": "sigmoid", "renormalise": False}, 1),
]


@pytest.mark.catches("choices-of-masked-groups")
@pytest.mark.catches("looks-ahead-unrefused")
@pytest.mark.catches("unread-by-the-gate")
@pytest.mark.parametrize(("changes", "told"), MISTAKES)
def test_each_mistake_is_one_sentence(changes, told):
    with pytest.raises(InputError) as refused:
        MixtureConfig(**{"experts": 8, "choices": 2, "mlp": 16, **changes})
    assert told in str(refused.value) and ". " not in str(refused.value)


@pytest.mark.catches("choices-never-taken")
@pytest.mark.parametrize(("changes", "taken"), TAKEN)
def test_flops_are_of_the_experts_that_a_gate_gives_a_token(changes, taken):
    mixture = MixtureConfig(**{"experts": 8, "choices": 2, "mlp": 16, **changes})
    sizes = {"vocab": 64, "embed": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp": 16}
    dense = DecoderConfig(**sizes, layers=3, max_seq=8)
    mixed = dataclasses.replace(dense, mixture=mixture)
    more = mixed.flops_per_token - dense.flops_per_token
    assert mixture.taken == taken
    assert more == 6 * 3 * 16 * (3 * 16 * (taken - 1) + 8)  # and the router
    assert gate_of(mixture, 64).choices == taken


def test_a_layer_has_as_many_experts_as_its_configuration_knows():
    config = MixtureConfig(experts=8, choices=2, mlp=16, pyramid=[[1, 16]])
    assert config.pyramid == ((1, 16),)
    for count in (0, 32):
        with pytest.raises(InputError, match=f"found {count} experts, and layers of the mixture"):
            Experts(16, config, rngs=nnx.Rngs(0), experts=count)


def test_a_group_is_named():
    with pytest.raises(PlanError, match="group: found 5; give names of mesh axes"):
        ExpertsConfig(group=5)


def test_gates_that_look_ahead_are_taken_where_asked_for():
    given = MixtureConfig(
        experts=8, choices=2, mlp=16, gate="expert_choice", look_ahead=True, balance="none"
    )
    assert given.look_ahead


def test_flops_count_the_experts_that_a_token_takes():
    one, two = (
        recipe("moe_tiny").replace(model=model).model.decoder().flops_per_token
        for model in (_with_experts(8), _with_experts(16))
    )
    assert two - one == 6 * 4 * 128 * 8  # columns of the routers alone


def _with_experts(count):
    return dataclasses.replace(recipe("moe_tiny").model, experts=count)
